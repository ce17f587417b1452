"""``zstd(inner)``: the inner codec's bytes, compressed without loss when that makes them fewer.

Over dense floats the bytes are first split into planes (all first bytes, all second bytes ...): exponents
repeat, mantissas do not. One byte says whether what follows is compressed, so the payload is never more than
one byte larger. The inner bound is checked before anything is decompressed, so a small payload cannot ask for
a large allocation.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import zstandard
from torch import Tensor

from fusionllm.compress.codec import Codec, CodecState, Payload, Reference, inner_spec, inner_tensors
from fusionllm.compress.positions import decompress
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import CodecSpec, wire_num_bytes
from fusionllm.ir.tensor import DTYPES

_RAW, _COMPRESSED = 0, 1


def _plane_count(inner: CodecSpec, dtype: str) -> int:
    """Bytes per element of a dense payload; 1 leaves the order alone."""
    if inner.name == "identity":
        return DTYPES[dtype]
    return DTYPES[inner.word("dtype")] if inner.name == "cast" else 1


def _split(data: bytes, planes: int) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(-1, planes).T.tobytes() if planes > 1 else data


def _merge(data: bytes, planes: int) -> bytes:
    if planes == 1:
        return data
    if len(data) % planes:
        raise RemoteProtocolError(f"{len(data)} bytes are no {planes} planes of equal length")
    return np.frombuffer(data, np.uint8).reshape(planes, -1).T.tobytes()


def zstandard_over(inner: Codec) -> Codec:
    """Wrap a codec."""

    def init(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
        return inner_tensors(inner.init(inner_spec(spec), shape, dtype))

    def encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
        payload, tensors = inner.encode(x, state.for_inner(), reference)
        raw = b"".join(payload)
        planes = _plane_count(inner_spec(state.spec), state.dtype)
        packed = zstandard.ZstdCompressor(level=state.spec.integer("level")).compress(_split(raw, planes))
        mode, body = (_COMPRESSED, packed) if len(packed) < len(raw) else (_RAW, raw)
        return [memoryview(bytes((mode,))), memoryview(body)], inner_tensors(tensors)

    def unwrap(payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> memoryview:
        under = inner_spec(spec)
        limit = wire_num_bytes(under, shape, dtype)
        if payload.nbytes == 0 or payload[0] not in (_RAW, _COMPRESSED):
            raise RemoteProtocolError(f"a payload of {spec} must begin with {_RAW} or {_COMPRESSED}")
        body = payload[1:]
        if payload[0] == _COMPRESSED:
            body = memoryview(_merge(decompress(body, limit), _plane_count(under, dtype)))
        if body.nbytes > limit or (under.is_exact and body.nbytes != limit):
            raise RemoteProtocolError(f"{body.nbytes} bytes under {spec} where {under} takes {limit}")
        return body

    def decode(
        payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
    ) -> Tensor:
        return inner.decode(unwrap(payload, spec, shape, dtype), inner_spec(spec), shape, dtype, reference)

    def support(payload: memoryview, spec: CodecSpec, shape: tuple[int, ...]) -> Tensor:
        assert inner.support is not None
        return inner.support(unwrap(payload, spec, shape, "float32"), inner_spec(spec), shape)

    def remember(
        payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, memory: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        assert inner.remember is not None
        return inner.remember(unwrap(payload, spec, shape, dtype), inner_spec(spec), shape, dtype, memory)

    return Codec(
        encode,
        decode,
        init,
        support=None if inner.support is None else support,
        remember=None if inner.remember is None else remember,
    )
