"""Checkpoints: everything a run needs to go on, in a folder that is whole or not there.

    checkpoints/step-00000100/
        manifest.json            step, graph hash, seed, data position, hash of each file, place of each
        tensor weights.safetensors      by the model's own parameter names, so any layout of stages can load
        it optimizer.safetensors    ``exp_avg/<parameter>`` and so on
        codecs.safetensors       what the links' codecs carry from message to message, where they do

A save writes into a hidden folder of the same parent, flushes it, and renames it: an interrupted save damages
nothing, and what it left behind is removed by the next. Saving a step again makes a new revision
(``step-00000100-r2``) beside the old before the old goes. Names no framework: a tensor is a ``Blob``. On the
path: Blob -> **files**.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fusionllm.errors import CheckpointError
from fusionllm.store.atomic import sync_folder
from fusionllm.store.manifest import (
    CODECS_FILE,
    FORMAT,
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    VERSION,
    WEIGHTS_FILE,
    CheckpointMeta,
    FileEntry,
    Manifest,
    TensorEntry,
    encode_manifest,
    read_manifest,
)
from fusionllm.store.tensorfile import Blob, TensorFile, hash_file, write_tensors

_log = logging.getLogger(__name__)
_FOLDER = re.compile(r"step-([0-9]{8,15})(?:-r([0-9]{1,6}))?")


class Checkpoint:
    """A checkpoint opened for reading. Made by ``load_checkpoint``.

    Attributes:
        path: its folder.
        manifest: its contents.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._files: dict[str, TensorFile] = {}
        for index in (manifest.weights, manifest.optimizer, manifest.codecs):
            for name, entry in index.items():
                self._check_entry(name, entry)

    def read_weight(self, name: str) -> Blob:
        """A parameter or buffer by its name or an alias. Raises CheckpointError when there is none."""
        return self._read(self.manifest.meta.aliases.get(name, name), self.manifest.weights, "weight")

    def read_optimizer(self, name: str) -> Blob:
        """An optimizer tensor such as ``exp_avg/<parameter>``. Raises CheckpointError when there is none."""
        return self._read(name, self.manifest.optimizer, "optimizer tensor")

    def read_codec(self, name: str) -> Blob:
        """A tensor of a codec's state. Raises CheckpointError when there is none."""
        return self._read(name, self.manifest.codecs, "codec tensor")

    def verify(self) -> None:
        """Read every byte of every file and compare the hashes.

        Raises:
            CheckpointError: a file's size or hash is not what the manifest says.
        """
        for name, entry in self.manifest.files.items():
            found = hash_file(self.path / name)
            if (found.num_bytes, found.xxh3_128) != (entry.num_bytes, entry.xxh3_128):
                raise CheckpointError(
                    f"{self.path / name} was damaged: {found.num_bytes} bytes with hash {found.xxh3_128}, "
                    f"the manifest says {entry.num_bytes} bytes with hash "
                    f"{entry.xxh3_128}{_others(self.path)}"
                )

    def require(self, *, graph_hash: str | None = None, data_fingerprint: str | None = None) -> None:
        """Refuse to go on with another model or with other data, of those that are given.

        Raises:
            CheckpointError: the hashes differ.
        """
        meta = self.manifest.meta
        if graph_hash is not None and meta.graph_hash != graph_hash:
            raise CheckpointError(
                f"{self.path} belongs to another model: its graph is {meta.graph_hash[:12]}, this run's is "
                f"{graph_hash[:12]}; resume with the run's own config.toml, which has the model it was made with"
            )
        if data_fingerprint is not None and meta.data_fingerprint != data_fingerprint:
            raise CheckpointError(
                f"{self.path} was made with other data: {meta.data_fingerprint}, this run's is "
                f"{data_fingerprint}; restore the data and its settings (source, tokenizer, seq_len, seed), "
                f"or start a new run"
            )

    def _check_entry(self, name: str, entry: TensorEntry) -> None:
        file = self._files.get(entry.file)
        if file is None:
            if entry.file not in self.manifest.files:
                raise CheckpointError(f"{self.path}: tensor {name!r} is in {entry.file!r}, a file it does not list")
            file = self._files[entry.file] = TensorFile(self.path / entry.file)
        if file.spec(name) != (entry.dtype, entry.shape):
            raise CheckpointError(
                f"{file.path}: tensor {name!r} is {file.spec(name)}, the manifest says {(entry.dtype, entry.shape)}"
            )

    def _read(self, name: str, index: dict[str, TensorEntry], what: str) -> Blob:
        entry = index.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: no {what} {name!r} among its {len(index)}")
        return self._files[entry.file].read(name)


def save_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Blob],
    optimizer: Mapping[str, Blob],
    meta: CheckpointMeta,
    *,
    codecs: Mapping[str, Blob] | None = None,
    keep_last: int = 3,
) -> Path:
    """Write a checkpoint and remove the oldest ones.

    Args:
        folder: the run's checkpoints folder; made when missing.
        step: steps completed.
        weights: parameters and buffers by the model's own names; of tied ones only the canonical one.
        optimizer: optimizer tensors, ``<state>/<parameter>``.
        meta: what it belongs to.
        codecs: tensors of the links' codecs, ``<stage>/...``.
        keep_last: how many to keep, counting this one; this one is never removed.

    Returns:
        The checkpoint's folder, complete and on the disk.

    Raises:
        CheckpointError: it cannot be written; the checkpoints that were there are untouched.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {folder}: {error.strerror or error}") from error
    _sweep(folder)
    taken = [revision for found, revision, _ in _list(folder) if found == step]
    name = f"step-{step:08d}" + (f"-r{max(taken) + 1}" if taken else "")
    temporary = folder / f".tmp-{os.getpid()}-{name}"
    try:
        temporary.mkdir()
        _write_contents(temporary, step, weights, optimizer, codecs or {}, meta)
        temporary.rename(folder / name)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / name}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(folder, folder / name, step, keep_last)
    return folder / name


def load_checkpoint(path: Path, step: int | None = None, *, weights_only: bool = False) -> Checkpoint:
    """Open a checkpoint: the manifest, file sizes and headers are checked, the hashes only by ``verify``.

    Args:
        path: a checkpoint's folder, or the folder that holds a run's checkpoints.
        step: which one; None for the latest.
        weights_only: leave the optimizer's and the codecs' tensors out; that their files are damaged is only logged.

    Raises:
        CheckpointError: there is none, or it is torn, of another version, or not a checkpoint.
    """
    if not (path / MANIFEST_FILE).is_file():
        path = _choose(path, step)
    manifest = read_manifest(path, _others(path))
    for name, entry in manifest.files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry.num_bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            damage = f"{file} {found}, the manifest says {entry.num_bytes} bytes"
            if not weights_only or name == WEIGHTS_FILE:
                raise CheckpointError(f"{damage}{_others(path)}")
            _log.warning("%s; only the weights are used, a run could not go on from it", damage)
    if weights_only:
        files = {name: entry for name, entry in manifest.files.items() if name == WEIGHTS_FILE}
        manifest = msgspec.structs.replace(manifest, files=files, optimizer={}, codecs={})
    return Checkpoint(path, manifest)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """``(step, folder)`` of every checkpoint, oldest first; of a step saved twice the newest revision."""
    return sorted({step: path for step, _, path in _list(folder)}.items())


def _write_contents(
    folder: Path, step: int, weights: Mapping[str, Blob], optimizer: Mapping[str, Blob], codecs: Mapping[str, Blob],
    meta: CheckpointMeta,
) -> None:  # fmt: skip
    files: dict[str, FileEntry] = {}
    index: dict[str, dict[str, TensorEntry]] = {}
    contents = {WEIGHTS_FILE: weights, OPTIMIZER_FILE: optimizer} | ({CODECS_FILE: codecs} if codecs else {})
    for file, tensors in contents.items():
        written = write_tensors(folder / file, tensors)
        files[file] = FileEntry(num_bytes=written.num_bytes, xxh3_128=written.xxh3_128)
        index[file] = {
            name: TensorEntry(dtype=blob.dtype, shape=tuple(blob.shape), file=file)
            for name, blob in sorted(tensors.items())
        }
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        step=step,
        meta=meta,
        files=files,
        weights=index[WEIGHTS_FILE],
        optimizer=index[OPTIMIZER_FILE],
        codecs=index.get(CODECS_FILE, {}),
    )
    with (folder / MANIFEST_FILE).open("xb") as out:
        out.write(encode_manifest(manifest))
        out.flush()
        os.fsync(out.fileno())
    sync_folder(folder)


def _list(folder: Path) -> list[tuple[int, int, Path]]:
    """(step, revision, path) of every complete checkpoint folder, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match and (path / MANIFEST_FILE).is_file():
            found.append((int(match.group(1)), int(match.group(2) or 1), path))
    return sorted(found)


def _choose(folder: Path, step: int | None) -> Path:
    known = dict(list_checkpoints(folder))
    if not known:
        raise CheckpointError(
            f"no checkpoint in {folder}: the run ended before its first (train.checkpoint_every); "
            f"start anew under another name"
        )
    if step is not None and step not in known:
        steps = ", ".join(map(str, known))
        raise CheckpointError(f"no checkpoint of step {step} in {folder}; there are those of step {steps}")
    return known[max(known) if step is None else step]


def _others(path: Path) -> str:
    """The way out when a checkpoint is damaged: the other ones beside it."""
    others = [str(step) for step, other in list_checkpoints(path.parent) if other != path]
    steps = " and ".join(others)
    return f"; there is another of step {steps}: export it with --step, or remove {path} to resume" if others else ""


def _sweep(folder: Path) -> None:
    """Remove what interrupted saves left behind."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _prune(folder: Path, saved: Path, step: int, keep_last: int) -> None:
    """Remove older revisions and the oldest checkpoints, never the one just saved."""
    found = _list(folder)
    newest = {number: path for number, _, path in found if number != step}
    kept = {saved, *[path for _, path in sorted(newest.items(), reverse=True)][: max(keep_last - 1, 0)]}
    for _, _, path in found:
        if path not in kept:
            doomed = folder / f".tmp-{os.getpid()}-old-{path.name}"
            try:
                path.rename(doomed)  # out of the way as a whole first: half of one must never look complete
            except OSError as error:  # the new one is safe; this only costs space
                _log.warning("cannot remove the old checkpoint %s: %s", path, error.strerror or error)
            shutil.rmtree(doomed, ignore_errors=True)
