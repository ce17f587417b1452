"""The codecs by name, and the three verbs that every caller uses: ``init``, ``encode``, ``decode``.

The only door of the room: it checks what goes in and what comes from outside, so that a codec's own code
need not. A new codec is one ``Codec`` and one line in ``CODECS``, beside its line in ``ir.codec.FORMATS``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusionllm.compress.codec import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    Codec,
    CodecState,
    Payload,
    Reference,
    check_tensor,
)
from fusionllm.compress.dense import CAST_CODEC, IDENTITY_CODEC
from fusionllm.errors import LocalProtocolError, RemoteProtocolError, UserError
from fusionllm.ir.codec import CodecSpec, verify_codec, wire_num_bytes
from fusionllm.ir.tensor import FLOATS

CODECS: dict[str, Codec] = {
    "identity": IDENTITY_CODEC,
    "cast": CAST_CODEC,
}

_NO_REFERENCE = Reference()


def codec_of(spec: CodecSpec) -> Codec:
    """A codec's code. Raises UserError that lists the known ones."""
    found = CODECS.get(spec.name)
    if found is None:
        raise UserError(f"codec {spec.name!r} has no code here; known: {', '.join(CODECS)}")
    return found


def _check_dtype(spec: CodecSpec, dtype: str) -> None:
    if not spec.is_lossless and dtype not in FLOATS:
        raise UserError(
            f"codec {spec} is lossy and takes floats, not {dtype}; ask ir.codec.fit_codec what travels"
        )


def init(spec: CodecSpec, shape: Sequence[int], dtype: str) -> CodecState:
    """Set a codec up for one direction of one link.

    Args:
        spec: the codec; ``ir.codec.fit_codec`` first turns it into identity where it could not help.
        shape: of every tensor that will go through, integers.
        dtype: a key of ``ir.tensor.DTYPES``.

    Raises:
        UserError: a lossy codec for integers, or an invalid spec.
    """
    verify_codec(spec)
    _check_dtype(spec, dtype)
    return CodecState(spec, tuple(shape), dtype, codec_of(spec).init(spec, tuple(shape), dtype))


@torch.no_grad()
def encode(x: Tensor, state: CodecState, *, reference: Reference | None = None) -> tuple[Payload, CodecState]:
    """Tensor -> payload.

    Args:
        x: tensor of ``state.shape`` and ``state.dtype`` on any device; never changed. An identity payload is
        a view
            of its memory: write the payload before changing the tensor.
        state: from ``init`` or the last ``encode``.
        reference: what is held of the forward message, for the gradient codecs that need it.

    Returns:
        Buffers of exactly ``wire_num_bytes`` in all (at most, where the size depends on the data), and the
        new state.

    Raises:
        UserError: NaN or infinity in front of a codec that cannot carry them.
        LocalProtocolError: another shape or dtype than the state's, or a reference missing.
    """
    check_tensor(x, state)
    _check_reference(state.spec, state.shape, reference)
    payload, tensors = codec_of(state.spec).encode(x.detach(), state, reference or _NO_REFERENCE)
    return payload, state.with_tensors(tensors)


@torch.no_grad()
def decode(
    payload: bytes | bytearray | memoryview | Payload,
    spec: CodecSpec,
    shape: Sequence[int],
    dtype: str,
    *,
    reference: Reference | None = None,
) -> Tensor:
    """Payload -> tensor of ``shape`` and ``dtype`` on the CPU. Allocates in proportion to ``shape``,
    whatever comes.

    Raises:
        RemoteProtocolError: the payload is not one that ``spec`` could have made; close the wire to that
        peer.
        LocalProtocolError: a reference missing.
    """
    data = _joined(payload)
    _check_dtype(spec, dtype)
    _check_reference(spec, tuple(shape), reference)
    check_num_bytes(data.nbytes, spec, shape, dtype)
    return codec_of(spec).decode(data, spec, tuple(shape), dtype, reference or _NO_REFERENCE)


def support(
    payload: bytes | bytearray | memoryview | Payload, spec: CodecSpec, shape: Sequence[int]
) -> Tensor | None:
    """Flat positions (int64, increasing) that a sparse payload kept, or None where the codec keeps them all.

    Both ends of a link call it on the forward payload and give it to ``encode``/``decode`` of the gradient as
    ``Reference(support=...)``. Raises RemoteProtocolError as ``decode`` does.
    """
    core, data = spec, _joined(payload)
    find = codec_of(core).support
    return None if find is None else find(data, core, tuple(shape))


def check_num_bytes(num_bytes: int, spec: CodecSpec, shape: Sequence[int], dtype: str) -> None:
    """Refuse a payload by its length alone, before a byte of it is kept. Raises RemoteProtocolError."""
    limit = wire_num_bytes(spec, shape, dtype)
    if num_bytes > limit or (spec.is_exact and num_bytes != limit):
        need = "exactly" if spec.is_exact else "at most"
        raise RemoteProtocolError(
            f"payload of {num_bytes} bytes for {spec} of {dtype}{list(shape)}; it takes {need} {limit}"
        )


def _check_reference(spec: CodecSpec, shape: tuple[int, ...], reference: Reference | None) -> None:
    if not spec.needs_reference:
        return
    activation = None if reference is None else reference.activation
    if reference is None or (activation is not None and tuple(activation.shape) != shape):
        raise LocalProtocolError(f"codec {spec} for {list(shape)} needs the forward message as its reference")


def _joined(payload: bytes | bytearray | memoryview | Payload) -> memoryview:
    if not isinstance(payload, list):
        return memoryview(payload).cast("B")
    if len(payload) == 1:
        return payload[0].cast("B")
    return memoryview(b"".join(payload))


def dtype_name(x: Tensor) -> str:
    """The IR's name of a tensor's dtype. Raises UserError for one that the IR does not know."""
    name = DTYPE_NAMES.get(x.dtype)
    if name is None:
        raise UserError(f"a tensor of {x.dtype} cannot travel; known: {', '.join(TORCH_DTYPES)}")
    return name
