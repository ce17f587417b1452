"""The allow-list: every operator a graph may name, with the names of its arguments.

What is not in `OPS` is refused at capture and at load, so a graph from outside can execute nothing else. Argument
names are ours and frozen: they equal ATen's at the time of opset 1, and a later rename there changes nothing here.
"""

from __future__ import annotations

from typing import NamedTuple

OPSET = 1


class OpSchema(NamedTuple):
    """Arguments in order; the first ``num_required`` must be given. ``rng``: draws random numbers (when p > 0)."""

    args: tuple[str, ...]
    num_required: int
    rng: bool = False
    opset: int = 1
