"""`philox.keep_mask` in jax.numpy: the same bits, within a compiled function."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from fusionllm.compute.philox import MULTIPLY, ROUNDS, WEYL, threshold


def keep_mask(key: Any, shape: tuple[int, ...], p: float, stream: int = 0) -> Any:
    """Which elements a dropout keeps, bool. ``key``: uint32[2], low word first."""
    count = math.prod(shape)
    block = jnp.arange(-(-count // 4), dtype=jnp.uint64)
    a, b = block.astype(jnp.uint32), (block >> 32).astype(jnp.uint32)
    c, d = jnp.full_like(a, stream), jnp.zeros_like(a)
    k0, k1 = key[0], key[1]
    for _ in range(ROUNDS):
        first, second = (x.astype(jnp.uint64) * jnp.uint64(m) for x, m in zip((a, c), MULTIPLY))
        a, b = (second >> 32).astype(jnp.uint32) ^ b ^ k0, second.astype(jnp.uint32)
        c, d = (first >> 32).astype(jnp.uint32) ^ d ^ k1, first.astype(jnp.uint32)
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    words = jnp.stack([a, b, c, d], 1).reshape(-1)[:count]
    return (words >= jnp.uint32(threshold(p))).reshape(shape)


def dropout(x: Any, p: float, key: Any, stream: int = 0) -> Any:
    """Zero elements with probability ``p`` and scale the rest by 1 / (1 - p)."""
    return x * keep_mask(key, x.shape, p, stream) / (1 - p)
