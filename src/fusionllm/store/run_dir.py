"""The folder of one run: where each result lies, and the refusal to write over another run.

    runs/NAME/  config.toml  metrics.jsonl  tb/  loss.png  summary.json  checkpoints/

Knows only names, not what is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fusionllm.errors import UserError, near_hint
from fusionllm.store.atomic import write_atomic

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NUMBERED = re.compile(r"run-([0-9]{1,9})")


@dataclass(frozen=True)
class RunDir:
    """Paths of a run. Made by ``create`` or ``open``.

    Attributes:
        path: the run's folder.
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One event a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard event files."""
        return self.path / "tb"

    @property
    def loss_curve(self) -> Path:
        return self.path / "loss.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def create(cls, root: Path, name: str | None = None, resume: bool = False) -> RunDir:
        """Make the folder of a new run, or find that of a run to resume.

        Args:
            root: the folder of all runs; made when missing.
            name: of the run; None for the next free ``run-NNN``, or with ``resume`` the latest of those.
            resume: go on with an existing run.

        Raises:
            UserError: a bad name, a run that exists (without ``resume``) or does not (with it).
        """
        if name is not None and not _NAME.fullmatch(name):
            raise UserError(
                f"run name {name!r}: use letters, digits, '.', '_' and '-', at most 100, beginning with a "
                f"letter or digit"
            )
        if resume:
            return cls.open(root, name)
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(_make_numbered(root) if name is None else _make_named(root, name))
        except OSError as error:
            raise UserError(f"cannot make a run in {root}: {error.strerror or error}; choose another folder") from error

    @classmethod
    def open(cls, root: Path, name: str | None = None) -> RunDir:
        """Find an existing run; None for the latest numbered one. Raises UserError when there is none."""
        names = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        if name is None:
            numbers = _numbers(names)
            if not numbers:
                raise UserError(f"no numbered run in {root}; name the run")
            name = numbers[max(numbers)]
        if name not in names:
            known = ", ".join(names[-10:]) or "none"
            raise UserError(f"no run {name!r} in {root}{near_hint(name, names)}; the runs there: {known}")
        return cls(root / name)

    def write_config(self, text: str) -> None:
        """Save the resolved configuration, TOML; for the user's eyes only, as a ticket may be in it."""
        write_atomic(self.config, text.encode())
        self.config.chmod(0o600)


def _make_named(root: Path, name: str) -> Path:
    path = root / name
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir() or any(path.iterdir()):
            begun = any(path.glob("checkpoints/*"))
            way = "exists in {}; resume it," if begun else "exists in {} without a checkpoint;"
            raise UserError(f"run {name!r} {way.format(root)} choose another name, or remove {path}") from None
    return path


def _make_numbered(root: Path) -> Path:
    """The next free ``run-NNN``; two processes that ask at once get two."""
    number = max(_numbers(path.name for path in root.iterdir()), default=0) + 1
    while True:
        path = root / f"run-{number:03d}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _numbers(names: Iterable[str]) -> dict[int, str]:
    matches = ((name, _NUMBERED.fullmatch(name)) for name in names)
    return {int(match.group(1)): name for name, match in matches if match}
