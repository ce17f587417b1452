"""What is timed to know a device, and how: sizes per kind of operator, calls in a row. Knows no framework.

A backend's ``calibrate`` says what an operator of each kind is, and what calls one, forward and backward, and waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from fusionllm.ir.cluster import BACKWARD_OVER_FORWARD, OpKind, Sample

#: Shape of the operand of an operator of each kind, larger and larger. Matrix products are of it with itself; attention
#: is causal, [rows, heads, positions, width]; convolutions have 3 x 3 weights, as many channels out as in, padding 1;
#: ``memory`` is what stands between products: an activation, a product by elements and a sum, ``gelu(y) * x + x``.
SHAPES: dict[OpKind, list[tuple[int, ...]]] = {
    "matmul": [(size, size) for size in (32, 128, 256, 512, 1024, 2048, 4096, 8192)],
    "attention": [(rows, 8, 128, 64) for rows in (1, 4, 16, 64, 256)],
    "convolution": [(rows, 64, 28, 28) for rows in (1, 4, 16, 64)],
    "memory": [(size,) for size in (1 << 10, 1 << 20, 1 << 22, 1 << 24, 1 << 26)],
}
#: FLOPs per element of the operand, and how many times its bytes are moved.
_WORK: dict[OpKind, tuple[Callable[[tuple[int, ...]], float], float]] = {
    "matmul": (lambda shape: 2.0 * shape[1], 3.0),
    "attention": (lambda shape: 4.0 * shape[2], 4.0),
    "convolution": (lambda shape: 2.0 * shape[1] * 9, 2.0),
    "memory": (lambda shape: 1.0, 8.0),
}
#: A size is the last of its kind when both ways take this long, and some times what the smallest did, which is launch.
_LONG_S = 0.01
_TIMES = 2.0
#: So many short ones are called one on the result of the other, as in a stage, where all have one backward.
_CHAIN = 8
_SHORT_S = 0.001
_REPEATS = 3
#: Some slices of a shared processor.
_ROW_S = 0.2

Function = TypeVar("Function")


def time_kinds(
    functions: Mapping[OpKind, Function],
    prepare: Callable[[Function, tuple[int, ...], int], Callable[[], object]],
    item_bytes: int,
) -> tuple[Sample, ...]:
    """Time an operator of each kind at `SHAPES`, until it takes long enough.

    Args:
        functions: an operator per kind, of its operand. Kinds that a backend has none of are left out.
        prepare: makes of an operator, its operand's shape and a number of times, each on the last one's result, a call
            that waits for the result and its gradients. It is timed whole, as training does it: gradients may be far
            from twice a forward.
        item_bytes: of an element.
    """
    samples: list[Sample] = []
    for kind, function in functions.items():
        flops, moves = _WORK[kind]
        shortest_s, chain = math.inf, _CHAIN
        for shape in SHAPES[kind]:
            count = math.prod(shape)
            call = prepare(function, shape, chain)
            pass_s = sustained_s(call) / chain
            if _is_last(pass_s, shortest_s):  # or a pause of a shared machine, after which sizes would be too small
                pass_s = sustained_s(call) / chain
            seconds = pass_s / (1 + BACKWARD_OVER_FORWARD)
            samples.append(
                Sample(
                    kind=kind, flops=flops(shape) * count, moved_bytes=moves * count * item_bytes, seconds=seconds
                )
            )  # fmt: skip
            if _is_last(pass_s, shortest_s):
                break
            shortest_s, chain = min(shortest_s, pass_s), _CHAIN if seconds < _SHORT_S else 1
    return tuple(samples)


def _is_last(pass_s: float, shortest_s: float) -> bool:
    """Whether a size takes long enough for its rate to be seen."""
    return _LONG_S < pass_s > _TIMES * shortest_s


def sustained_s(call: Callable[[], object]) -> float:
    """Seconds of a call, which waits for its result, in a row of them, long enough to show the pauses of its device.

    A processor share is handed out in slices (5 of every 20 ms, 25 of every 100); a short call alone fits in one.
    """
    call()  # the first warms up and does not count
    started, count = time.perf_counter(), 0
    while count < _REPEATS or time.perf_counter() < started + _ROW_S:
        call()
        count += 1
    return max((time.perf_counter() - started) / count, 1e-9)
