"""`compute.calibrate` for JAX: the same kinds of operators and sizes, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from fusionllm.compute.jax.backend import find_device
from fusionllm.compute.jax.operators import TABLE
from fusionllm.compute.timing import time_kinds
from fusionllm.ir.cluster import NodeProfile, OpKind

_linear, _conv, _attention = (
    TABLE[f"aten.{name}.default"] for name in ("linear", "conv2d", "scaled_dot_product_attention")
)


def calibrate(device: str, precision: str = "float32") -> NodeProfile:
    """Time matrix products, attention, convolution and plain movements on ``device``, float32 or bfloat16, forward."""
    own = find_device(device)
    ones = partial(jnp.ones, dtype=getattr(jnp, precision))
    with jax.default_device(own):
        weight = ones((64, 64, 3, 3))
        functions: dict[OpKind, Callable[[Any], Any]] = {
            "matmul": lambda x: _linear(x, x),
            "attention": lambda x: _attention(None, x, x, x, is_causal=True),
            "convolution": lambda x: _conv(x, weight, padding=1),
            "memory": lambda x: jax.nn.gelu(x, approximate=False),
        }
        samples = time_kinds(functions, lambda f, shape: partial(_waited, jax.jit(f), ones(shape)), weight.itemsize)
    stats = own.memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else psutil.virtual_memory().available
    return NodeProfile(device=f"{own.device_kind} (jax)", memory_bytes=float(free), samples=samples)


def _waited(function: Callable[[Any], Any], x: Any) -> None:
    function(x).block_until_ready()
