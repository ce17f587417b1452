"""``ef(inner)``: what the inner codec lost is added to the next message.

For gradients that are summed over time, as between data-parallel replicas: there the lost part arrives later
and the sum stays right. Not for activations: two messages on a link belong to different samples. The residual
is float32 and is the codec's state, so a resumed run loses nothing.

Reference: error feedback, Karimireddy et al. (1901.09847).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fusionllm.compress.codec import (
    TORCH_DTYPES,
    Codec,
    CodecState,
    Payload,
    Reference,
    inner_spec,
    inner_tensors,
)
from fusionllm.compress.dense import saturating_cast
from fusionllm.errors import UserError
from fusionllm.ir.codec import CodecSpec


def error_feedback(inner: Codec) -> Codec:
    """Wrap a codec; ``encode`` costs one decode more.

    Raises UserError for a codec whose payloads lean on others.
    """
    if inner.remember is not None:
        raise UserError("ef cannot wrap a codec whose payloads need a memory of earlier ones, as klt's do")

    def init(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
        residual = torch.zeros(shape, dtype=torch.float32)
        return {"residual": residual, **inner_tensors(inner.init(inner_spec(spec), shape, dtype))}

    def encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
        wanted = x.float() + state.tensors["residual"].to(x.device)
        narrow = saturating_cast(wanted, TORCH_DTYPES[state.dtype])
        payload, tensors = inner.encode(narrow, state.for_inner(), reference)
        data = memoryview(b"".join(payload))
        sent = inner.decode(data, inner_spec(state.spec), state.shape, state.dtype, reference)
        residual = wanted - sent.to(x.device).float()
        return [data], {"residual": residual, **inner_tensors(tensors)}

    def decode(
        payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
    ) -> Tensor:
        return inner.decode(payload, inner_spec(spec), shape, dtype, reference)

    if inner.support is None:
        return Codec(encode, decode, init)
    find = inner.support
    return Codec(encode, decode, init, lambda payload, spec, shape: find(payload, inner_spec(spec), shape))
