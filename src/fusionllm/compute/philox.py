"""Random bits by counter: Philox 4x32 with 10 rounds, as the IR fixes it for every backend.

Bits are a function of where in the run a draw is and of nothing else, so any partition, recompute or backend has the
same masks. Key: `seed_of` the place, low word first. Counter of elements ``4 b`` to ``4 b + 3`` of a tensor laid flat:
``(b mod 2^32, b div 2^32, stream, 0)``. An element is dropped when its word is below ``threshold(p)``.
This is the reference in numpy; `philox_fast` (numba), `philox_torch` and `compute.jax` give the same bits.

Reference: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 10
MULTIPLY = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1


def seed_of(seed: int, step: int, microbatch_index: int, rng: int) -> int:
    """Key of one random operator in one microbatch: splitmix64 over the four numbers, 63 bits.

    Reference: Steele et al., Fast splittable pseudorandom number generators, 2014.
    """
    state = 0
    for number in (seed, step, microbatch_index, rng):
        state = (state + (number & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state >> 1


def round_keys(key: int) -> list[tuple[int, int]]:
    """The two words of the key in each round."""
    return [tuple((key >> 32 * i) + r * WEYL[i] & _MASK32 for i in (0, 1)) for r in range(ROUNDS)]  # type: ignore[misc]


def threshold(p: float) -> int:
    """Words below it are dropped: ``p`` of 2^32, rounded to the nearest."""
    return min(round(p * 2.0**32), _MASK32)


def philox(counter: npt.NDArray[np.uint32], key: int) -> npt.NDArray[np.uint32]:
    """Blocks of four words, shape [n, 4], from counters of the same shape."""
    a, b, c, d = (counter[:, i].astype(np.uint64) for i in range(4))
    mask, half = np.uint64(_MASK32), np.uint64(32)
    for k0, k1 in round_keys(key):
        first, second = a * np.uint64(MULTIPLY[0]), c * np.uint64(MULTIPLY[1])
        a, b, c, d = (
            (second >> half) ^ b ^ np.uint64(k0),
            second & mask,
            (first >> half) ^ d ^ np.uint64(k1),
            first & mask,
        )
    return np.stack([a, b, c, d], 1).astype(np.uint32)


def words(key: int, count: int, stream: int = 0) -> npt.NDArray[np.uint32]:
    """The first ``count`` words of a stream, one per element of a tensor laid flat."""
    block = np.arange(-(-count // 4), dtype=np.uint64)
    counter = np.zeros((len(block), 4), np.uint32)
    counter[:, 0], counter[:, 1] = block & np.uint64(_MASK32), block >> np.uint64(32)
    counter[:, 2] = stream
    return philox(counter, key).reshape(-1)[:count]


def keep_mask(key: int, count: int, p: float, stream: int = 0) -> npt.NDArray[np.bool_]:
    """Which elements a dropout of probability ``p`` keeps."""
    return words(key, count, stream) >= np.uint32(threshold(p))
