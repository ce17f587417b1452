"""Processor time of a stage's forwards and backwards alone, without optimizer, codecs and network."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = FORWARD, BACKWARD = ("forward", "backward")


@dataclass(frozen=True)
class Work:
    """Processor seconds of a stage: of the cheapest microbatch forward and backward, of all those of a step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0


class Meter:
    """Appends what the calling thread used to a file, a line each; nothing without one."""

    def __init__(self, path: str = "") -> None:
        self._path = path

    def around(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, metered as ``kind``."""

        def metered(*args: Any, **options: Any) -> Any:
            before_s = time.thread_time()
            out = call(*args, **options)
            self.note(kind, time.thread_time() - before_s)
            return out

        return metered

    def note(self, kind: str, seconds: float) -> None:
        """What a call took."""
        if self._path:
            with open(self._path, "a") as file:
                file.write(f"{kind} {seconds:.6f}\n")


def read_work(path: Path, num_steps: int, num_microbatches: int) -> Work:
    """Of the last ``num_steps`` steps in a file. Raises ValueError when it does not have as many."""
    lines = [line.split() for line in path.read_text().splitlines()]
    count = num_steps * num_microbatches
    times_s = {kind: [float(seconds) for name, seconds in lines if name == kind][-count:] for kind in KINDS}
    if any(len(found) != count for found in times_s.values()):
        raise ValueError(f"{path} has fewer than {count} microbatches")
    each = [times_s[kind] for kind in KINDS]
    return Work(min(each[0]), min(each[1]), sum(map(sum, each)) / num_steps)
