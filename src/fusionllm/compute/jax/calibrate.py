"""`compute.calibrate` for JAX: the same kinds of operators and sizes, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from fusionllm.compute.jax.backend import find_device
from fusionllm.compute.jax.operators import TABLE
from fusionllm.compute.timing import LONG_S, sustained_s
from fusionllm.ir.cluster import NodeProfile, OpKind, Sample

_Case = tuple[OpKind, float, float, Callable[..., Any], tuple[Any, ...]]
_Ones = Callable[..., Any]


def calibrate(device: str, precision: str = "float32") -> NodeProfile:
    """Time matrix products, attention, convolution and plain movements on ``device``, float32 or bfloat16, forward."""
    own = find_device(device)
    samples: list[Sample] = []
    ones = partial(jnp.ones, dtype=getattr(jnp, precision))
    with jax.default_device(own):
        for cases in (_matmul(ones), _attention(ones), _convolution(ones), _memory(ones)):
            for kind, flops, moved_bytes, function, args in cases:
                compiled = jax.jit(function)
                seconds = sustained_s(lambda c=compiled, a=args: c(*a).block_until_ready())  # type: ignore[misc]
                samples.append(Sample(kind=kind, flops=flops, moved_bytes=moved_bytes, seconds=seconds))
                if seconds > LONG_S:
                    break
    stats = own.memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else psutil.virtual_memory().available
    return NodeProfile(device=f"{own.device_kind} (jax)", memory_bytes=float(free), samples=tuple(samples))


def _matmul(ones: _Ones) -> Iterator[_Case]:
    linear = TABLE["aten.linear.default"]
    for size in (32, 128, 256, 512, 1024, 2048, 4096, 8192):
        a = ones((size, size))
        yield "matmul", 2.0 * size**3, 3.0 * a.nbytes, lambda a, b: linear(a, b), (a, a)


def _attention(ones: _Ones) -> Iterator[_Case]:
    attention = TABLE["aten.scaled_dot_product_attention.default"]
    for rows in (1, 4, 16, 64, 256):
        q = ones((rows, 8, 128, 64))
        call = lambda q: attention(None, q, q, q, is_causal=True)  # noqa: E731
        yield "attention", 4.0 * rows * 8 * 128 * 128 * 64, 4.0 * q.nbytes, call, (q,)


def _convolution(ones: _Ones) -> Iterator[_Case]:
    conv, weight = TABLE["aten.conv2d.default"], ones((64, 64, 3, 3))
    for rows in (1, 4, 16, 64):
        x = ones((rows, 64, 28, 28))
        yield "convolution", 2.0 * x.size * 64 * 9, 2.0 * x.nbytes, lambda x, w: conv(x, w, padding=1), (x, weight)


def _memory(ones: _Ones) -> Iterator[_Case]:
    for size in (1 << 10, 1 << 20, 1 << 22, 1 << 24, 1 << 26):
        x = ones(size)
        yield "memory", float(size), 2.0 * x.nbytes, lambda x: jax.nn.gelu(x, approximate=False), (x,)
