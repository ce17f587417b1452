"""Where events go: a JSON Lines file, TensorBoard, memory. A new sink is a class and one line in ``SINKS``.

A sink has two methods, ``write(event)`` and ``close()``, and may be opened on an earlier run's files to go on
after ``resume_step``: what was recorded of later steps is then dropped, for these steps will be done again.
Knows no clock and no protocol. On the path, aside: event -> **file**.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from fusionllm.errors import UserError, known_names
from fusionllm.telemetry.events import Event, Note, StepMetrics, ValMetrics, decode_event, encode_event


class Sink(Protocol):
    """Takes events until it is closed."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


class MemorySink:
    """Keeps the events in a list: the history of a Python call, and what tests look at.

    Attributes:
        events: in order.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


class JsonlSink:
    """``metrics.jsonl``: one event a line, flushed line by line, so that a killed run loses none."""

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Open the file.

        Args:
            path: of the file; what is in it is replaced, unless resumed.
            resume_step: keep the events up to and including this step.

        Raises:
            UserError: the file cannot be written.
        """
        kept = b""
        if resume_step is not None and path.exists():
            kept = b"".join(encode_event(e) + b"\n" for e in read_events(path) if e.step <= resume_step)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".tmp-{path.name}")
            temporary.write_bytes(kept)
            temporary.replace(path)  # in one step: a crash here leaves the old record or the new one
            self._file = path.open("ab")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}; choose another folder") from error

    def write(self, event: Event) -> None:
        self._file.write(encode_event(event) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard event files, written by tensorboardX (no TensorFlow, no torch)."""

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        """Open a new event file in ``folder``; on resume, TensorBoard is told to hide the later steps of
        older files.

        Raises:
            UserError: tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UserError(
                "TensorBoard output needs the 'tensorboardX' package; install it with: pip install "
                "'fusionllm[train]', or switch the sink off"
            ) from None
        purge_step = None if resume_step is None else resume_step + 1
        try:
            self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=5)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror or error}") from error

    def write(self, event: Event) -> None:
        if isinstance(event, Note):
            self._writer.add_text(event.kind, event.text, event.step)
            return
        for tag, value in _scalars(event):
            self._writer.add_scalar(tag, value, event.step)

    def close(self) -> None:
        self._writer.close()


class Fanout:
    """Several sinks as one; closing closes all of them, whatever one of them raises."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, event: Event) -> None:
        for sink in self._sinks:
            sink.write(event)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)


def _scalars(event: StepMetrics | ValMetrics) -> Iterable[tuple[str, float]]:
    if isinstance(event, ValMetrics):
        yield "val/loss", event.loss
        yield "val/perplexity", event.perplexity
        if event.coded_loss is not None:
            yield "val/coded_loss", event.coded_loss
        if event.accuracy is not None:
            yield "val/accuracy", event.accuracy
        return
    yield "train/loss", event.loss
    yield "train/lr", event.lr
    if event.grad_norm is not None:
        yield "train/grad_norm", event.grad_norm
    yield "speed/tokens_per_s", event.tokens_per_s
    yield "speed/step_s", event.seconds
    for link, num_bytes in event.link_bytes.items():
        yield f"link_bytes/{link.replace('->', '_to_')}", num_bytes
    for link, error in event.link_errors.items():
        yield f"link_errors/{link.replace('->', '_to_').replace(' ', '_')}", error


def read_events(path: Path) -> list[Event]:
    """The events of a metrics.jsonl; a torn last line, left by a killed process, is dropped.

    Raises:
        UserError: the file cannot be read, or another line is not an event; names the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            events.append(decode_event(line))
        except UserError as error:
            if number == len(lines):  # no line end after it: its writer was stopped in the middle
                break
            raise UserError(f"{path}:{number}: {error}") from None
    return events


#: Sink name in the config -> how to open it in a run's folder: ``(folder, resume_step) -> Sink``.
SINKS: dict[str, Callable[[Path, int | None], Sink]] = {
    "jsonl": lambda folder, resume_step: JsonlSink(folder / "metrics.jsonl", resume_step),
    "tensorboard": lambda folder, resume_step: TensorBoardSink(folder / "tb", resume_step),
    "memory": lambda folder, resume_step: MemorySink(),
}


def open_sinks(names: Iterable[str], folder: Path, resume_step: int | None = None) -> Fanout:
    """Open sinks by name in a run's folder. An unknown name raises UserError with the known ones."""
    sinks: list[Sink] = []
    try:
        for name in names:
            if name not in SINKS:
                raise UserError(f"unknown sink {name!r}; {known_names(name, SINKS)}")
            sinks.append(SINKS[name](folder, resume_step))
    except BaseException:
        Fanout(sinks).close()
        raise
    return Fanout(sinks)
