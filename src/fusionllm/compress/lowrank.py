"""``powersgd``: the gradient of a replica as a product of two thin matrices, one power iteration a message.

For data-parallel gradients of parameters, inside ``ef(...)``. The first axis by all others is the matrix;
both factors travel in bfloat16. The right factor of the last message starts the next: the codec's state. Not
for activations: the factors mix tokens, so a token would learn of later ones.

Reference: PowerSGD (1905.13727).
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
    require_finite,
    to_bytes_view,
)
from fusionllm.compress.dense import saturating_cast
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import CodecSpec
from fusionllm.ir.codec_formats import matrix_shape


def _rank(spec: CodecSpec, shape: tuple[int, ...]) -> int:
    return min(spec.integer("rank"), *matrix_shape(shape))


def _init(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
    """A right factor that any machine would start from.

    Columns of the DCT under hashed signs (see rotate.py).
    """
    width, rank = matrix_shape(shape)[1], _rank(spec, shape)
    row = torch.arange(width, dtype=torch.float64)[:, None]
    column = torch.arange(rank, dtype=torch.float64)[None]
    signs = (((torch.arange(1, width + 1) * 2654435761) >> 16) & 1).double()[:, None] * 2 - 1
    return {"right": (signs * torch.cos(torch.pi / max(1, width) * (row + 0.5) * column)).float()}


def _encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    if x.numel() == 0:
        return [], state.tensors
    matrix = x.reshape(matrix_shape(state.shape)).float()
    peak = matrix.abs().max()
    require_finite(peak, state)
    unit = matrix / torch.where(peak > 0, peak, torch.ones_like(peak))
    left, _ = torch.linalg.qr(unit @ state.tensors["right"].to(x.device))
    right = unit.t() @ left
    # A zero matrix must not freeze the iteration at zero.
    kept = right if bool(peak > 0) else state.tensors["right"]
    return [to_bytes_view(left.bfloat16()), to_bytes_view((right * peak).bfloat16())], {"right": kept}


def _decode(payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference) -> Tensor:
    if torch.Size(shape).numel() == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    (rows, width), rank = matrix_shape(shape), _rank(spec, shape)
    cut = 2 * rows * rank
    left = from_bytes_view(payload[:cut], (rows, rank), torch.bfloat16).float()
    right = from_bytes_view(payload[cut:], (width, rank), torch.bfloat16).float()
    product = left @ right.t()
    if not bool(product.isfinite().all()):
        raise RemoteProtocolError("the low-rank factors hold or make NaN or infinity, which no sender's do")
    return saturating_cast(product.view(shape), TORCH_DTYPES[dtype])


POWERSGD_CODEC = Codec(_encode, _decode, _init)
