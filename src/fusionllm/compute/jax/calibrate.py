"""`compute.calibrate` for JAX: the same kinds of operators and sizes, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from fusionllm.compute.jax.backend import find_device
from fusionllm.compute.jax.operators import TABLE, lowered
from fusionllm.compute.timing import time_kinds
from fusionllm.errors import UserError
from fusionllm.ir.cluster import NodeProfile, OpKind

_linear, _conv, _attention = (
    TABLE[f"aten.{name}.default"] for name in ("linear", "conv2d", "scaled_dot_product_attention")
)


def calibrate(device: str, precision: str = "float32") -> NodeProfile:
    """Time matrix products, attention, convolution and plain movements on ``device``, forward and backward.

    Args:
        precision: operators are timed as a stage computes them in it.

    Raises:
        UserError: a precision that is neither float32 nor bfloat16.
    """
    if precision not in ("float32", "bfloat16"):
        raise UserError(f"precision {precision!r} is for torch; jax has float32 and bfloat16")
    own, lower = find_device(device), partial(lowered, dtype=getattr(jnp, precision))
    weight = np.full((64, 64, 3, 3), 1 / (64 * 9), np.float32)
    functions: dict[OpKind, Callable[[Any, Any, Any], Any]] = {
        "matmul": lambda y, x, _: _linear(lower(y), lower(x)),
        "attention": lambda y, x, _: _attention(None, lower(y), lower(x), lower(x), is_causal=True),
        "convolution": lambda y, _, w: _conv(lower(y), lower(w), padding=1),
        "memory": lambda y, x, _: jax.nn.gelu(y, approximate=False) * x + x,
    }

    def prepare(function: Callable[[Any, Any, Any], Any], shape: tuple[int, ...], count: int) -> Callable[[], object]:
        def forward(x: Any, w: Any) -> Any:
            y = x
            for _ in range(count):
                y = function(y, x, w)
            return y

        def both(*operands: Any) -> Any:
            y, reverse = jax.vjp(forward, *operands)
            return y, reverse(y)

        call, operands = jax.jit(both), (jnp.full(shape, 1 / shape[-1], jnp.float32), jnp.array(weight))
        return lambda: jax.block_until_ready(call(*operands))

    with jax.default_device(own):
        samples = time_kinds(functions, prepare, weight.itemsize)
    stats = own.memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else psutil.virtual_memory().available
    return NodeProfile(device=f"{own.device_kind} (jax)", memory_bytes=float(free), samples=samples)
