"""Codecs as data: a name, its parameters, a text form that parses back, and the exact bytes on the wire.

The ground of the IR: knows no tensor framework and no codec's code. The planner prices links with the sizes
below, the sender obeys them, and the receiver refuses a payload that breaks them before decoding a single
byte of it.

Text form: ``name``, ``name:key=value,key=value`` or, for a wrapper, ``name:key=value(inner)``::

    identity    int8:block=64    topk:ratio=100,values=int8    ef(topk:ratio=100)    zstd(cast:dtype=bfloat16)

A new codec is one line in ``FORMATS`` (its parameters and size) and one in ``compress.CODECS`` (its code).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Union

import msgspec

from fusionllm.errors import UserError, known_names
from fusionllm.ir.codec_formats import FORMATS, Format, Value, format_of
from fusionllm.ir.tensor import DTYPES, FLOATS

#: Bytes that ``compress.envelope`` puts before a payload: magic, version, id, fingerprint, length, checksum.
HEADER_NUM_BYTES = 24

_MAX_TEXT_CHARS = 200
_MAX_DEPTH = 3
_TEXT = re.compile(r"([a-z][a-z0-9-]*)(?::([a-z0-9_.+,=-]*))?(?:\((.*)\))?", re.DOTALL)


class CodecSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which codec a link uses. Make one with ``codec_spec`` or ``parse_codec``, which check it.

    Attributes:
        name: a key of ``FORMATS``.
        parameters: ``(key, value)`` pairs that differ from the defaults, in the declared order.
        inner: the codec that a wrapper (``ef``, ``zstd``, ``tangent``) wraps; None for the others.
    """

    name: str
    parameters: tuple[tuple[str, Union[int, float, str]], ...] = ()  # noqa: UP007  msgspec reads it on 3.10
    inner: Union[CodecSpec, None] = None  # noqa: UP007

    @property
    def format(self) -> Format:
        return format_of(self.name)

    def value(self, key: str) -> Value:
        """A parameter, or its default. Raises KeyError for one this codec has not: our bug."""
        for known, value in self.parameters:
            if known == key:
                return value
        return self.format.parameters[key].default

    def integer(self, key: str) -> int:
        return int(self.value(key))

    def number(self, key: str) -> float:
        return float(self.value(key))

    def word(self, key: str) -> str:
        return str(self.value(key))

    @property
    def is_lossless(self) -> bool:
        """True when every bit comes back, whatever the dtype."""
        return self.format.lossless and (self.inner is None or self.inner.is_lossless)

    @property
    def is_exact(self) -> bool:
        """True when ``wire_num_bytes`` is the size of every payload; False when it is an upper bound."""
        return self.format.exact_size and (self.inner is None or self.inner.is_exact)

    @property
    def needs_reference(self) -> bool:
        """True for a gradient codec that leans on the forward message both ends hold."""
        return self.format.needs_reference or (self.inner is not None and self.inner.needs_reference)

    @property
    def for_replicas(self) -> bool:
        """True for a codec of sums over time, wrong for what crosses a cut."""
        return self.format.for_replicas or (self.inner is not None and self.inner.for_replicas)

    @property
    def core(self) -> CodecSpec:
        """The innermost codec: what the wrappers wrap."""
        return self if self.inner is None else self.inner.core

    def __str__(self) -> str:
        text = self.name
        if self.parameters:
            text += ":" + ",".join(f"{key}={_write(value)}" for key, value in self.parameters)
        return text if self.inner is None else f"{text}({self.inner})"


class CodecSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a codec takes on one node, measured by ``compress.measure_speed``.

    Attributes:
        encode_s_per_element: seconds per element of the dense tensor.
        decode_s_per_element: the same for decoding.
        overhead_s: seconds per call besides.
    """

    encode_s_per_element: float
    decode_s_per_element: float
    overhead_s: float

    def encode_s(self, numel: int) -> float:
        """Seconds to encode a tensor of ``numel`` elements."""
        return self.overhead_s + self.encode_s_per_element * numel

    def decode_s(self, numel: int) -> float:
        """Seconds to decode one."""
        return self.overhead_s + self.decode_s_per_element * numel


def _write(value: Value) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def codec_spec(name: str, parameters: Mapping[str, Value] | None = None, inner: CodecSpec | None = None) -> CodecSpec:
    """Build a checked, normalised spec: defaults left out, parameters in declared order.

    Raises:
        UserError: unknown codec or parameter, a value out of range, or an inner codec where none belongs.
    """
    known = format_of(name).parameters
    given = dict(parameters or {})
    for key in given:
        if key not in known:
            raise UserError(f"codec {name!r} has no parameter {key!r}; {known_names(key, known or ('none',))}")
    pairs = [(key, p.read(f"codec {name!r}: {key}", given[key])) for key, p in known.items() if key in given]
    if format_of(name).wraps and inner is None:
        inner = IDENTITY
    spec = CodecSpec(name, tuple((k, v) for k, v in pairs if v != known[k].default), inner)
    verify_codec(spec)
    return spec


@lru_cache(maxsize=512)
def parse_codec(text: str) -> CodecSpec:
    """Read the text form; ``str`` writes it back. Raises UserError that says what is wrong.

    Remembered: every message on a link names its codec.
    """
    if len(text) > _MAX_TEXT_CHARS:
        raise UserError(f"codec text of {len(text)} characters; the limit is {_MAX_TEXT_CHARS}")
    return _parse(text.strip(), 1)


def _parse(text: str, depth: int) -> CodecSpec:
    if depth > _MAX_DEPTH:
        raise UserError(f"codecs nested deeper than {_MAX_DEPTH}: {text!r}")
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a codec; write it like 'int8:block=64' or 'ef(topk:ratio=100)'")
    name, parameters, inner = match.groups()
    pairs: dict[str, Value] = {}
    for part in parameters.split(",") if parameters else ():
        key, equals, value = part.partition("=")
        if not equals or key in pairs:
            raise UserError(f"codec {name!r}: {part!r} is not one key=value, or its key is given twice")
        pairs[key] = value
    return codec_spec(name, pairs, None if inner is None else _parse(inner.strip(), depth + 1))


def verify_codec(spec: CodecSpec) -> None:
    """Check a spec that came from a file or a peer: known, in range, normalised. Raises UserError."""
    depth, level = 1, spec
    while True:
        known = level.format.parameters
        order = [key for key, _ in level.parameters]
        if order != [key for key in known if key in order]:
            raise UserError(
                f"codec {level.name!r}: parameters {order} are not among {list(known)}, each once, in order"
            )
        for key, value in level.parameters:
            read = known[key].read(f"codec {level.name!r}: {key}", value)
            if read != value or type(read) is not type(value) or read == known[key].default:
                raise UserError(f"codec {level.name!r}: {key}={value!r} is the default or not the normal form {read!r}")
        if level.format.wraps != (level.inner is not None):
            wants = "wraps another codec" if level.format.wraps else "wraps no other codec"
            raise UserError(
                f"codec {level.name!r} {wants}; write it {'name(inner)' if level.format.wraps else 'alone'}"
            )
        if level.inner is None:
            return
        depth, level = depth + 1, level.inner
        if depth > _MAX_DEPTH:
            raise UserError(f"codecs nested deeper than {_MAX_DEPTH}")


def dense_num_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of the tensor as it lies in memory."""
    return math.prod(shape) * DTYPES[dtype]


def wire_num_bytes(spec: CodecSpec, shape: Sequence[int], dtype: str) -> int:
    """Bytes of one payload: exact where ``spec.is_exact``, else the most there can be. Without the envelope.

    Args:
        spec: a verified spec.
        shape: of the tensor, integers.
        dtype: a key of ``ir.tensor.DTYPES``.
    """
    inner = 0 if spec.inner is None else wire_num_bytes(spec.inner, shape, dtype)
    return inner + spec.format.size(spec.value, tuple(shape), dtype)


def expected_num_bytes(spec: CodecSpec, shape: Sequence[int], dtype: str) -> float:
    """What the planner should count: exact where the size is, the average where it is bounded."""
    bound = wire_num_bytes(spec, shape, dtype)
    core = spec.core
    if core.format.expected is None:
        return bound
    most = core.format.size(core.value, tuple(shape), dtype)
    return bound - max(0.0, most - core.format.expected(core.value, tuple(shape)))


def fit_codec(spec: CodecSpec, shape: Sequence[int], dtype: str) -> CodecSpec:
    """What really travels: dense for integers and booleans, and wherever the codec would not make it smaller.

    Both ends compute it from the same facts, so nothing is agreed on the wire. A wrapped spec is kept or
    dropped whole; ``tangent`` is kept only around a lossy codec that pays for itself.
    """
    if spec.is_lossless:
        return spec if wire_num_bytes(spec, shape, dtype) <= dense_num_bytes(shape, dtype) + 1 else IDENTITY
    if dtype not in FLOATS or wire_num_bytes(spec, shape, dtype) >= dense_num_bytes(shape, dtype):
        return IDENTITY
    return spec


def adjoint_codec(spec: CodecSpec) -> CodecSpec | None:
    """The gradient's codec that makes the backward the exact adjoint of ``spec``, or None.

    Top-K and random-k project onto a mask, so the gradient travels on that same mask without indices;
    identity is its own adjoint and so, up to rounding, is a cast. Quantisers are straight-through: choose
    their backward freely.
    """
    if spec.name in ("identity", "cast"):
        return spec
    if spec.name == "zstd" and spec.inner is not None:
        return adjoint_codec(spec.inner)
    if spec.name in ("topk", "topk-paper", "randomk"):
        shared = {key: spec.value(key) for key in ("ratio", "scope", "values") if key in spec.format.parameters}
        return codec_spec("same-mask", {"values": "float32", **shared})
    return None


#: Dense: always a legal answer.
IDENTITY = CodecSpec("identity")

__all__ = [
    "FORMATS", "HEADER_NUM_BYTES", "IDENTITY", "CodecSpec", "CodecSpeed", "adjoint_codec", "codec_spec",
    "dense_num_bytes", "expected_num_bytes", "fit_codec", "parse_codec", "verify_codec", "wire_num_bytes",
]  # fmt: skip
