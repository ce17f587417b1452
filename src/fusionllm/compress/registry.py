"""The codecs by name, and the three verbs that every caller uses: ``init``, ``encode``, ``decode``.

The only door of the room: it checks types, shapes and lengths, of what goes in and of what comes from outside; values
(NaN, scales that no encoder makes) are the codec's own to check. A new codec is one ``Codec`` and one line in
``CODECS``, beside its line in ``ir.codec_formats.FORMATS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
from fusionllm.compress.feedback import error_feedback
from fusionllm.compress.klt import KLT_CODEC
from fusionllm.compress.klt_ec import KLT_EC_CODEC
from fusionllm.compress.lossless import zstandard_over
from fusionllm.compress.lowrank import POWERSGD_CODEC
from fusionllm.compress.quantise import FP8_CODEC, INT4_CODEC, INT8_CODEC
from fusionllm.compress.rotate import HADAMARD_CODEC, OUTLIER_CODEC
from fusionllm.compress.sparse import RANDOMK_CODEC, SAME_MASK_CODEC, TOPK_CODEC, TOPK_PAPER_CODEC
from fusionllm.compress.tangent import tangent_over
from fusionllm.errors import LocalProtocolError, RemoteProtocolError, UserError, known_names
from fusionllm.ir.codec import IDENTITY, CodecSpec, verify_codec, wire_num_bytes
from fusionllm.ir.tensor import FLOATS

CODECS: dict[str, Codec] = {
    "identity": IDENTITY_CODEC,
    "cast": CAST_CODEC,
    "int8": INT8_CODEC,
    "int4": INT4_CODEC,
    "fp8": FP8_CODEC,
    "hadamard": HADAMARD_CODEC,
    "outlier": OUTLIER_CODEC,
    "topk": TOPK_CODEC,
    "topk-paper": TOPK_PAPER_CODEC,
    "same-mask": SAME_MASK_CODEC,
    "randomk": RANDOMK_CODEC,
    "powersgd": POWERSGD_CODEC,
    "klt": KLT_CODEC,
    "klt-ec": KLT_EC_CODEC,
}

#: Codecs made of another one: name -> function from the inner codec to the whole.
WRAPPERS: dict[str, Callable[[Codec], Codec]] = {
    "ef": error_feedback,
    "zstd": zstandard_over,
    "tangent": tangent_over,
}

_NO_REFERENCE = Reference()


def codec_of(spec: CodecSpec) -> Codec:
    """A codec's code. Raises UserError that lists the known ones."""
    if spec.inner is not None and spec.name in WRAPPERS:
        return WRAPPERS[spec.name](codec_of(spec.inner))
    found = CODECS.get(spec.name)
    if found is None:
        raise UserError(f"codec {spec.name!r} has no code here; {known_names(spec.name, [*CODECS, *WRAPPERS])}")
    return found


def _check_dtype(spec: CodecSpec, dtype: str) -> None:
    if not spec.is_lossless and dtype not in FLOATS:
        raise UserError(f"codec {spec} is lossy and takes floats, not {dtype}; ask ir.codec.fit_codec what travels")


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
            a view of its memory: write the payload before changing the tensor.
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
    # Contiguous, so that the same values give the same bytes however they lay in memory.
    dense = x.detach().contiguous()
    try:
        payload, tensors = codec_of(state.spec).encode(dense, state, reference or _NO_REFERENCE)
    except UserError as error:
        raise UserError(f"{error}{_first_nonfinite(dense)}") from None
    return payload, state.with_tensors(tensors)


def _first_nonfinite(x: Tensor) -> str:
    """Where the trouble begins, for the message of a refusal."""
    bad = (~x.isfinite()).nonzero()
    return f"; {bad.shape[0]} such elements, the first at {bad[0].tolist()}" if bad.numel() else ""


def encode_or_dense(
    x: Tensor, state: CodecState, *, reference: Reference | None = None
) -> tuple[CodecSpec, Payload, CodecState]:
    """``encode``, or identity for a message that holds NaN or infinity; the envelope tells which.

    Returns:
        The spec that made the payload, the payload, and the state, unchanged where identity stepped in.
    """
    try:
        return (state.spec, *encode(x, state, reference=reference))
    except UserError:  # encode raises it for nothing else
        payload, _ = encode(x, CodecState(IDENTITY, state.shape, state.dtype))
        return IDENTITY, payload, state


@torch.no_grad()
def decode(
    payload: bytes | bytearray | memoryview | Payload,
    spec: CodecSpec,
    shape: Sequence[int],
    dtype: str,
    *,
    reference: Reference | None = None,
) -> Tensor:
    """Payload -> tensor of ``shape`` and ``dtype`` on the CPU; allocates by ``shape``, whatever comes.

    Raises:
        RemoteProtocolError: the payload is not one that ``spec`` could have made; close the wire.
        LocalProtocolError: a reference missing.
    """
    data = _joined(payload)
    _check_dtype(spec, dtype)
    _check_reference(spec, tuple(shape), reference)
    check_num_bytes(data.nbytes, spec, shape, dtype)
    return codec_of(spec).decode(data, spec, tuple(shape), dtype, reference or _NO_REFERENCE)


def support(payload: bytes | bytearray | memoryview | Payload, spec: CodecSpec, shape: Sequence[int]) -> Tensor | None:
    """Flat positions (int64, increasing) that a sparse payload kept, or None where the codec keeps them all.

    Both ends of a link call it on the forward payload and give it to ``encode``/``decode`` of the gradient as
    ``Reference(support=...)``. Raises RemoteProtocolError as ``decode`` does.
    """
    find, data = codec_of(spec).support, _joined(payload)
    if find is None:
        return None
    # No sparse codec's size depends on the dtype of the tensor.
    check_num_bytes(data.nbytes, spec, shape, "float32")
    return find(data, spec, tuple(shape))


@torch.no_grad()
def remember(
    payload: bytes | bytearray | memoryview | Payload,
    spec: CodecSpec,
    shape: Sequence[int],
    dtype: str,
    memory: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    """The receiver's memory of a link after a payload; ``{}`` before the first. Belongs in the checkpoint.

    Needed for ``klt``, whose basis travels with some messages only; other codecs give the memory back. Call
    it before ``decode`` and pass ``Reference(memory=...)``. Raises RemoteProtocolError as ``decode`` does.
    """
    keep = codec_of(spec).remember
    if keep is None:
        return memory
    data = _joined(payload)
    check_num_bytes(data.nbytes, spec, shape, dtype)
    return keep(data, spec, tuple(shape), dtype, memory)


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
