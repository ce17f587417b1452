"""`philox.keep_mask` compiled by numba, for a CPU: ten times faster than torch draws. Needs the extra ``fast``."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from fusionllm.compute.philox import MULTIPLY, ROUNDS, WEYL, threshold

_MULTIPLY0, _MULTIPLY1 = (np.uint64(m) for m in MULTIPLY)
_WEYL0, _WEYL1 = (np.uint32(w) for w in WEYL)
_HALF = np.uint64(32)


@njit(cache=True, nogil=True)
def _fill(low: Any, high: Any, stream: Any, least: Any, out: Any) -> None:
    for block in range(out.shape[0] // 4):
        a, b, c, d = np.uint32(block & 0xFFFFFFFF), np.uint32(block >> 32), stream, np.uint32(0)
        k0, k1 = low, high
        for _ in range(ROUNDS):
            first, second = np.uint64(a) * _MULTIPLY0, np.uint64(c) * _MULTIPLY1
            a, b = np.uint32(second >> _HALF) ^ b ^ k0, np.uint32(second)
            c, d = np.uint32(first >> _HALF) ^ d ^ k1, np.uint32(first)
            k0, k1 = np.uint32(k0 + _WEYL0), np.uint32(k1 + _WEYL1)
        out[4 * block] = a >= least
        out[4 * block + 1] = b >= least
        out[4 * block + 2] = c >= least
        out[4 * block + 3] = d >= least


def keep_mask(key: int, count: int, p: float, stream: int = 0) -> npt.NDArray[np.bool_]:
    """As `philox.keep_mask`."""
    out = np.empty(-(-count // 4) * 4, np.bool_)
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    _fill(low, high, np.uint32(stream), np.uint32(threshold(p)), out)
    return out[:count]
