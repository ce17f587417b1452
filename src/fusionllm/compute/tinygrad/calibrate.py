"""`compute.calibrate` for tinygrad: the same kinds of operators and sizes, but for convolutions, of which it has none.

A call begins and ends with numpy's arrays and is scheduled anew, as in `backend`: that is what a launch costs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from fusionllm.compute.timing import time_kinds
from fusionllm.compute.tinygrad.backend import run_alone, run_backward
from fusionllm.compute.tinygrad.operators import TABLE
from fusionllm.errors import UserError
from fusionllm.ir.cluster import NodeProfile, OpKind

_FUNCTIONS: dict[OpKind, Callable[[Any, Any], Any]] = {
    "matmul": TABLE["aten.linear.default"],
    "attention": lambda y, x: TABLE["aten.scaled_dot_product_attention.default"](None, y, x, x, is_causal=True),
    "memory": lambda y, x: TABLE["aten.silu.default"](y) * x + x,
}


def calibrate(device: str, precision: str = "float32") -> NodeProfile:
    """Time matrix products, attention and plain movements on ``device`` in float32, forward and backward.

    Raises:
        UserError: another precision.
    """
    if precision != "float32":
        raise UserError(f"precision {precision!r} is not of tinygrad's here; it has float32")

    def prepare(function: Callable[[Any, Any], Any], shape: tuple[int, ...], count: int) -> Callable[[], object]:
        def forward(x: Any) -> Any:
            y = x
            for _ in range(count):
                y = function(y, x)
            return y

        operand = np.full(shape, 1 / shape[-1], np.float32)
        return lambda: (run_alone(device, forward, operand), run_backward(device, forward, operand))

    samples = time_kinds(_FUNCTIONS, prepare, np.dtype(np.float32).itemsize)
    free = float(psutil.virtual_memory().available)
    return NodeProfile(device=f"{device} (tinygrad)", memory_bytes=free, samples=samples)
