"""Dense codecs: ``identity`` (every bit, no copy) and ``cast`` (a narrower float).

The first is always a legal answer; the second keeps NaN and infinity as they are and clamps a finite value
that the narrower type cannot hold, so that a cast never makes an infinity of a number.
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
    from_bytes_view,
    to_bytes_view,
)
from fusionllm.ir.codec import CodecSpec


def _identity_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    return [to_bytes_view(x)], state.tensors


def _identity_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    return from_bytes_view(payload, shape, TORCH_DTYPES[dtype])


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as ``dtype``; finite values beyond its range become its largest, NaN and infinity stay."""
    limit = torch.finfo(dtype).max
    narrow = x.to(dtype)
    if torch.finfo(x.dtype).max <= limit or not bool(narrow.isinf().any()):
        return narrow
    # bfloat16 cannot hold float16's largest value: clamp in a type that can.
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return torch.where(wide.isfinite(), wide.clamp(-limit, limit), wide).to(dtype)


def _cast_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    return [to_bytes_view(saturating_cast(x, TORCH_DTYPES[state.spec.word("dtype")]))], state.tensors


def _cast_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    narrow = from_bytes_view(payload, shape, TORCH_DTYPES[spec.word("dtype")])
    return saturating_cast(narrow, TORCH_DTYPES[dtype])


IDENTITY_CODEC = Codec(_identity_encode, _identity_decode)
CAST_CODEC = Codec(_cast_encode, _cast_decode)
