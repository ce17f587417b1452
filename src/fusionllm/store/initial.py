"""Initial values of a parameter as a pure function of (seed, name): the same on any machine and in any partition.

Element i comes from the i-th 64-bit number of numpy's Philox stream keyed on the seed and a hash of the name, which
numpy promises never to change, and from additions, multiplications, divisions and square roots only, which IEEE 754
rounds alike everywhere; so logarithm and inverse error function are written out here. No torch.
"""

from __future__ import annotations

import math

import numpy as np
import xxhash

from fusionllm.ir.init import Init, verify_init
from fusionllm.store.tensorfile import Blob

_CHUNK = 1 << 18
_MASK_64 = (1 << 64) - 1
#: Giles, Approximating the erfinv function, 2010, single precision: relative error below 4e-7.
_CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


def initial_values(init: Init, seed: int, name: str, shape: tuple[int, ...]) -> Blob:
    """A parameter's first values, float32. Raises GraphError for steps that mean nothing."""
    verify_init(init)
    numel = math.prod(shape)
    out = np.empty(numel, np.float32)
    key = np.array([seed & _MASK_64, xxhash.xxh3_64_intdigest(name.encode())], dtype=np.uint64)
    stream = np.random.Philox(key=key)
    for start in range(0, numel, _CHUNK):
        end = min(start + _CHUNK, numel)
        out[start:end] = _values(init, stream, end - start)
    rows = out.reshape(shape)
    for row in init.zero_rows:
        if 0 <= row < (shape[0] if shape else 0):
            rows[row] = 0
    return Blob.from_numpy(rows)


def _values(init: Init, stream: np.random.Philox, count: int) -> np.ndarray:
    (fill, numbers), *rest = init.steps
    if fill == "constant":
        x = np.full(count, numbers[0])
    else:
        # 53 bits in the middle of their interval: never 0, never 1
        x = ((stream.random_raw(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        if fill == "normal":
            x = numbers[0] + numbers[1] * (math.sqrt(2.0) * erfinv(2.0 * x - 1.0))
        else:
            x = numbers[0] + (numbers[1] - numbers[0]) * x
    for name, given in rest:
        if name == "erfinv":
            x = erfinv(x)
        elif name == "mul":
            x = x * given[0]
        elif name == "add":
            x = x + given[0]
        else:
            x = np.minimum(np.maximum(x, given[0]), given[1])
    return x


def erfinv(x: np.ndarray) -> np.ndarray:
    """Inverse error function of float64 in (-1, 1); the ends give the largest finite values here."""
    inside = np.clip((1.0 - x) * (1.0 + x), 1e-300, 1.0)
    w = -_log(inside)
    central, tail = w - 2.5, np.sqrt(np.maximum(w, 5.0)) - 3.0
    value: np.ndarray = np.where(w < 5.0, _horner(_CENTRAL, central), _horner(_TAIL, tail)) * x
    return value


def _horner(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive float64, to a few units in the last place: ln m = 2 artanh((m-1) / (m+1))."""
    m, exponent = np.frexp(x)
    small = m < math.sqrt(0.5)
    m, exponent = np.where(small, m * 2.0, m), exponent - small
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    total = np.zeros_like(s)
    for k in range(23, 0, -2):
        total = total * square + 1.0 / k
    value: np.ndarray = 2.0 * s * total + exponent * math.log(2.0)
    return value
