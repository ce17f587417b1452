"""`philox.keep_mask` on torch: by numba on a CPU where that is installed, else in torch's own integer arithmetic."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec

import torch

from fusionllm.compute.philox import MULTIPLY, round_keys, threshold

_MASK32 = (1 << 32) - 1
#: Blocks at a time on a CPU, so that the ten rounds stay in its cache; measured, 8k to 32k are alike.
_CHUNK = 16384


@lru_cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def keep_mask(key: int, shape: torch.Size, p: float, device: torch.device, stream: int = 0) -> torch.Tensor:
    """Which elements of a tensor of ``shape`` a dropout of probability ``p`` keeps, bool."""
    count = math.prod(shape)
    if device.type == "cpu" and _has_numba():
        from fusionllm.compute import philox_fast

        return torch.from_numpy(philox_fast.keep_mask(key, count, p, stream)).reshape(shape)
    return torch_mask(key, count, p, device, stream).reshape(shape)


def torch_mask(key: int, count: int, p: float, device: torch.device, stream: int = 0) -> torch.Tensor:
    """The mask of a flat tensor, computed on its device in int64: torch multiplies no unsigned 32-bit numbers."""
    num_blocks, least = -(-count // 4), threshold(p)
    chunk = _CHUNK if device.type == "cpu" else max(1, num_blocks)
    out = torch.empty(num_blocks, 4, dtype=torch.bool, device=device)
    for start in range(0, num_blocks, chunk):
        block = torch.arange(start, min(start + chunk, num_blocks), device=device)
        for index, word in enumerate(_blocks(block, key, stream)):
            torch.ge(word, least, out=out[start : start + chunk, index])
    return out.reshape(-1)[:count]


def _blocks(block: torch.Tensor, key: int, stream: int) -> list[torch.Tensor]:
    """The four words of each block, as int64 from 0 to 2^32 - 1."""
    a, b, c, d = block & _MASK32, block >> 32, torch.full_like(block, stream), torch.zeros_like(block)
    first, second = torch.empty_like(a), torch.empty_like(a)
    for k0, k1 in round_keys(key):
        # a product of 64 bits may read as negative; its upper half is right once masked
        torch.mul(a, MULTIPLY[0], out=first)
        torch.mul(c, MULTIPLY[1], out=second)
        torch.bitwise_right_shift(second, 32, out=a).bitwise_and_(_MASK32).bitwise_xor_(b).bitwise_xor_(k0)
        torch.bitwise_and(second, _MASK32, out=b)
        torch.bitwise_right_shift(first, 32, out=c).bitwise_and_(_MASK32).bitwise_xor_(d).bitwise_xor_(k1)
        torch.bitwise_and(first, _MASK32, out=d)
    return [a, b, c, d]
