"""The codecs' formats: parameters with their ranges, stable wire ids, and sizes as functions of shape and
dtype.

The table behind ``ir.codec``; knows no spec, no tensor and no code of a codec. Sizes are in bytes and
integers throughout, so that two machines never disagree by a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Union

from fusionllm.errors import UserError, known_names
from fusionllm.ir.tensor import DTYPES

Value = Union[int, float, str]  # noqa: UP007  evaluated at run time
Values = Callable[[str], Value]
Shape = tuple[int, ...]

#: Kept values share one scale per this many; 0.8 % of an int8 payload.
VALUES_PER_SCALE = 256
#: Scales are bfloat16: float32's range (gradients reach 1e-9), and a quantiser needs no more precision.
SCALE_NUM_BYTES = 2
VALUE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class Parameter:
    """One parameter: its default gives the type; a number has a range, a word has choices."""

    default: Value
    low: float = 0
    high: float = 0
    choices: tuple[Value, ...] = ()

    def read(self, what: str, value: Value) -> Value:
        """A value of the right type and in range, from text or a number. Raises UserError."""
        kind = type(self.default)
        try:
            read = kind(value)
        except (ValueError, OverflowError):
            raise UserError(f"{what}={value!r} is not a valid {kind.__name__}") from None
        if self.choices:
            if read not in self.choices:
                raise UserError(f"{what}={value} is not known; {known_names(str(value), [*map(str, self.choices)])}")
        elif not (isinstance(read, (int, float)) and self.low <= read <= self.high):
            raise UserError(f"{what}={value} is outside {self.low:g} .. {self.high:g}")
        if isinstance(value, float) and value != read:
            raise UserError(f"{what}={value} must be a whole number")
        return read


@dataclass(frozen=True)
class Format:
    """What the planner and the wire must know of a codec.

    Attributes:
        wire_id: its number in the envelope.
        size: bytes of a payload, exact or (``exact_size`` False) the most; a wrapper's own bytes, without the inner.
        parameters: in the order of the text form.
        wraps: it is made of another codec. lossless: it loses nothing itself.
        needs_reference: its gradient leans on the forward message.
        for_replicas: right only for what is summed over time, as gradients between replicas are.
        expected: bytes to count on average, where ``size`` is only a bound.
    """

    wire_id: int
    size: Callable[[Values, Shape, str], int]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    wraps: bool = False
    lossless: bool = False
    exact_size: bool = True
    needs_reference: bool = False
    for_replicas: bool = False
    expected: Callable[[Values, Shape], float] | None = None


def ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


def rows_and_width(shape: Shape) -> tuple[int, int]:
    """A tensor as rows (tokens) of the last axis (channels); a 0-d tensor is one row of one."""
    width = shape[-1] if shape else 1
    return math.prod(shape[:-1]), width


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """A tensor as the matrix that a low-rank codec factors: first axis by all the others."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape[1:])


def kept_count(ratio: float, scope: str, shape: Shape) -> int:
    """Elements that a sparse codec keeps: one in ``ratio``, at least one of a non-empty tensor (or row)."""
    rows, width = rows_and_width(shape)
    if scope == "row":
        return rows * min(width, max(1, round(width / ratio)))
    numel = rows * width
    return min(numel, max(1, round(numel / ratio)))


def values_num_bytes(count: int, values: str) -> int:
    """Bytes of ``count`` kept values, with a scale per ``VALUES_PER_SCALE`` for the integer ones."""
    bits = VALUE_BITS[values]
    scales = SCALE_NUM_BYTES * ceil_div(count, VALUES_PER_SCALE) if bits <= 8 else 0
    return scales + ceil_div(count * bits, 8)


def rice_num_bytes_at_most(count: int, numel: int, low_bits: int) -> int:
    """Rice-coded gaps: the gaps sum to at most ``numel - count``, which bounds the unary part."""
    return ceil_div(count + ((numel - count) >> low_bits), 8) + low_bits * ceil_div(count, 8)


def rice_low_bits(count: int, numel: int) -> range:
    """The numbers of low bits worth trying: the best lies beside log2 of the mean gap."""
    guess = (numel // max(1, count)).bit_length() - 1
    return range(max(0, guess - 2), max(0, guess + 1) + 1)


def index_num_bytes_at_most(index: str, count: int, numel: int) -> int:
    """Most bytes that the positions of ``count`` of ``numel`` elements can take."""
    sizes = {
        "int32": 4 * count,
        "bitmap": ceil_div(numel, 8),
        "gaps": _zstd_num_bytes_at_most(count + 4 * min(count, numel // 256)),
        "rice": min(rice_num_bytes_at_most(count, numel, low_bits) for low_bits in rice_low_bits(count, numel)),
    }
    return min(sizes.values()) if index == "auto" else sizes[index]


def _zstd_num_bytes_at_most(num_bytes: int) -> int:
    """zstd's own bound, a little wider for small ones."""
    return num_bytes + (num_bytes >> 8) + 80


def sparse_expected_num_bytes(value: Values, shape: Shape) -> float:
    """Expected bytes of ``topk``: the entropy of its mask, 3 % for the code, and the values."""
    numel = math.prod(shape)
    count = kept_count(float(value("ratio")), str(value("scope")), shape)
    if str(value("index")) not in ("auto", "rice") or count in (0, numel):
        return _topk(value, shape, "")
    share = count / numel
    entropy_bits = -numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    return 2 + 1.03 * entropy_bits / 8 + values_num_bytes(count, str(value("values")))


def _identity(value: Values, shape: Shape, dtype: str) -> int:
    return math.prod(shape) * DTYPES[dtype]


def _cast(value: Values, shape: Shape, dtype: str) -> int:
    return math.prod(shape) * DTYPES[str(value("dtype"))]


def _blocks(bits: int) -> Callable[[Values, Shape, str], int]:
    def size(value: Values, shape: Shape, dtype: str) -> int:
        numel = math.prod(shape)
        block = int(value("block")) or max(1, rows_and_width(shape)[1])
        return SCALE_NUM_BYTES * ceil_div(numel, block) + ceil_div(numel * bits, 8)

    return size


def _hadamard(value: Values, shape: Shape, dtype: str) -> int:
    rows, width = rows_and_width(shape)
    return 0 if rows * width == 0 else SCALE_NUM_BYTES * rows + ceil_div(rows * width * int(value("bits")), 8)


def _outlier(value: Values, shape: Shape, dtype: str) -> int:
    rows, width = rows_and_width(shape)
    channels = min(int(value("channels")), width)
    return 0 if rows * width == 0 else 4 * channels + 2 * channels * rows + _hadamard(value, shape, dtype)


def _topk(value: Values, shape: Shape, dtype: str) -> int:
    numel = math.prod(shape)
    count = kept_count(float(value("ratio")), str(value("scope")), shape)
    index = index_num_bytes_at_most(str(value("index")), count, numel)
    return 2 + index + values_num_bytes(count, str(value("values")))


def _topk_paper(value: Values, shape: Shape, dtype: str) -> int:
    return 12 * kept_count(float(value("ratio")), "tensor", shape)


def _same_mask(value: Values, shape: Shape, dtype: str) -> int:
    return values_num_bytes(kept_count(float(value("ratio")), str(value("scope")), shape), str(value("values")))


def _randomk(value: Values, shape: Shape, dtype: str) -> int:
    return 8 + values_num_bytes(kept_count(float(value("ratio")), "tensor", shape), str(value("values")))


def _powersgd(value: Values, shape: Shape, dtype: str) -> int:
    rows, width = matrix_shape(shape)
    return 2 * min(int(value("rank")), rows, width) * (rows + width)


def _tangent(value: Values, shape: Shape, dtype: str) -> int:
    return 4 + int(value("bits")) // 8 * rows_and_width(shape)[0]


def klt_bits_per_row(rate: float, width: int) -> int:
    """Bits that the transform codec spends on each row."""
    return min(8 * width, max(1, round(rate * width)))


def _klt_parts(value: Values, shape: Shape) -> tuple[int, int]:
    """Bytes of a message, and of the basis that some messages carry besides."""
    rows, width = rows_and_width(shape)
    if rows * width == 0:
        return 0, 0
    bits = klt_bits_per_row(float(value("rate")), width)
    return 5 + 2 * rows + ceil_div(rows * bits, 8), 3 * width + 2 * width * min(width, bits)


def _klt(value: Values, shape: Shape, dtype: str) -> int:
    return sum(_klt_parts(value, shape))


def _klt_expected(value: Values, shape: Shape) -> float:
    message, basis = _klt_parts(value, shape)
    return message + basis / int(value("refresh"))


#: Version, whether a basis follows, directions, step, two offsets, scale.
KLT_EC_HEAD_NUM_BYTES = 23
#: The most that heads of streams take: up to 12 and 7 classes of them, and a class of scales and of shifts.
_KLT_EC_STREAMS_NUM_BYTES = (12 + 7 + 2 + 2) * 16


def klt_ec_budget_bits(value: Values, shape: Shape, scales_num_bytes: int) -> float:
    """Bits for the coefficients of a message: its rate without head and scales."""
    return max(0.0, float(value("rate")) * math.prod(shape) - 8 * (KLT_EC_HEAD_NUM_BYTES + scales_num_bytes))


def klt_ec_message_num_bytes(value: Values, shape: Shape) -> int:
    """Most bytes of a message without its basis."""
    rows, width = rows_and_width(shape)
    if rows * width == 0:
        return 0
    least = KLT_EC_HEAD_NUM_BYTES + rows + 4 + 4 * width + _KLT_EC_STREAMS_NUM_BYTES
    return least + math.ceil(float(value("rate")) * rows * width / 8)


def _klt_ec(value: Values, shape: Shape, dtype: str) -> int:
    width = rows_and_width(shape)[1]
    message = klt_ec_message_num_bytes(value, shape)
    return message + (width * (width + SCALE_NUM_BYTES) if message else 0)


def _klt_ec_expected(value: Values, shape: Shape) -> float:
    """The rate, and the basis spread over its refresh; at a low rate few directions are in use."""
    rows, width = rows_and_width(shape)
    rate = float(value("rate"))
    basis = width * width * min(1.0, rate)
    return rate * rows * width / 8 + basis / int(value("refresh"))


_RATIO = Parameter(10.0, 1, 1e9)
_SCOPE = Parameter("tensor", choices=("tensor", "row"))
_VALUES = Parameter("int8", choices=tuple(VALUE_BITS))
_BLOCK = Parameter(0, 0, 1 << 20)
_BITS = Parameter(4, choices=(1, 2, 4, 6, 8))

#: name -> format. A wire id, once given, is never given again.
FORMATS: dict[str, Format] = {
    "identity": Format(0, _identity, lossless=True),
    "cast": Format(1, _cast, {"dtype": Parameter("bfloat16", choices=("float32", "bfloat16", "float16"))}),
    "int8": Format(2, _blocks(8), {"block": _BLOCK}),
    "int4": Format(3, _blocks(4), {"block": _BLOCK}),
    "fp8": Format(4, _blocks(8), {"block": _BLOCK}),
    "hadamard": Format(5, _hadamard, {"bits": _BITS}),
    "outlier": Format(6, _outlier, {"channels": Parameter(8, 1, 4096), "bits": _BITS}),
    "topk": Format(
        7,
        _topk,
        {
            "ratio": _RATIO,
            "scope": _SCOPE,
            "values": _VALUES,
            "index": Parameter("auto", choices=("auto", "rice", "gaps", "bitmap", "int32")),
        },
        exact_size=False,
        expected=sparse_expected_num_bytes,
    ),
    "topk-paper": Format(8, _topk_paper, {"ratio": _RATIO}),
    "same-mask": Format(9, _same_mask, {"ratio": _RATIO, "scope": _SCOPE, "values": _VALUES}, needs_reference=True),
    "randomk": Format(10, _randomk, {"ratio": _RATIO, "values": _VALUES}),
    "powersgd": Format(11, _powersgd, {"rank": Parameter(4, 1, 4096)}, for_replicas=True),
    "ef": Format(12, lambda value, shape, dtype: 0, wraps=True, for_replicas=True),
    "zstd": Format(
        13,
        lambda value, shape, dtype: 1,
        {"level": Parameter(1, 1, 19)},
        wraps=True,
        lossless=True,
        exact_size=False,
    ),
    "tangent": Format(
        14,
        _tangent,
        {"centre": Parameter(0, choices=(0, 1)), "bits": Parameter(16, choices=(16, 8))},
        wraps=True,
        needs_reference=True,
    ),
    "klt": Format(
        15,
        _klt,
        {"rate": Parameter(1.0, 0.01, 8), "refresh": Parameter(20, 1, 1 << 20)},
        exact_size=False,
        expected=_klt_expected,
    ),
    "klt-ec": Format(
        16,
        _klt_ec,
        {"rate": Parameter(1.0, 0.01, 8), "refresh": Parameter(100, 1, 1 << 20)},
        exact_size=False,
        expected=_klt_ec_expected,
    ),
}


def format_of(name: str) -> Format:
    """Raises UserError that lists the known codecs."""
    found = FORMATS.get(name)
    if found is None:
        raise UserError(f"unknown codec {name!r}; {known_names(name, FORMATS)}")
    return found
