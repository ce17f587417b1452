"""Rotation codecs: ``hadamard`` (rotate, then 8, 4, 2 or 1 bits) and ``outlier`` (some channels dense).

A rotation spreads outliers over a group of channels, so that a coarse uniform quantiser sees near-normal
values. The residual stream of a trained language model holds half its energy in a few channels: ``outlier``
sends those in bfloat16 and rotates the rest, which is what makes 4 bits usable for a pretrained model. Which
channels is part of every payload (4 bytes each), chosen by a running mean of their share of the rows' energy:
the codec's only state.

Rows never mix, so no token learns of a later one. Differs from the usual padded Hadamard: a width that is no
power of two is rotated by Hadamard x DCT on groups of at most 256 channels, and nothing is padded on the
wire.

Reference: QuaRot (2404.00456), TAH-Quant (2506.01352).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

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
from fusionllm.compress.quantise import dequantise, pack_codes, quantise, read_scales, row_rms, unpack_codes
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import CodecSpec
from fusionllm.ir.codec_formats import SCALE_NUM_BYTES, ceil_div, rows_and_width

_MAX_GROUP = 256
_MIN_GROUP = 16
#: Half-life of about seven messages: the outlier channels of a model move over thousands.
_ENERGY_DECAY = 0.9


def group_width(width: int) -> int:
    """Channels rotated together.

    The largest divisor of the width up to 256, or the width itself if that is tiny.
    """
    group = next(g for g in range(min(width, _MAX_GROUP), 0, -1) if width % g == 0)
    return width if group < _MIN_GROUP and width <= 4 * _MAX_GROUP else group


@lru_cache(maxsize=32)
def rotation(group: int) -> Tensor:
    """Orthogonal float32 [group, group].

    Random signs x (Hadamard of the power of two, DCT of the odd rest).
    """
    power = group & -group
    odd = group // power
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < power:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)], 0)
    k = torch.arange(odd, dtype=torch.float64)
    dct = torch.cos(math.pi / odd * (k[None] + 0.5) * k[:, None]) * math.sqrt(2 / odd)
    dct[0] /= math.sqrt(2)
    # Knuth's multiplicative hash: the same signs on every machine and in every version of every library.
    hashed = (torch.arange(1, group + 1, dtype=torch.int64) * 2654435761) >> 16
    signs = (hashed & 1).double() * 2 - 1
    return (signs[:, None] * torch.kron(hadamard / math.sqrt(power), dct)).float()


def rotate(rows: Tensor, *, back: bool = False) -> Tensor:
    """float32 [rows, width] -> rotated, or ``back``."""
    group = group_width(rows.shape[1])
    matrix = rotation(group).to(rows.device)
    return (rows.reshape(-1, group) @ (matrix.t() if back else matrix)).view(rows.shape)


def _encode_rows(rows: Tensor, bits: int, state: CodecState) -> Payload:
    scale, codes = quantise(rotate(rows), bits, clip=True)
    require_finite(scale, state)
    return [to_bytes_view(scale), to_bytes_view(pack_codes(codes, bits))]


def _decode_rows(data: memoryview, num_rows: int, width: int, bits: int) -> Tensor:
    cut = SCALE_NUM_BYTES * num_rows
    scales = read_scales(data[:cut], num_rows)
    packed = from_bytes_view(data[cut:], (ceil_div(num_rows * width * bits, 8),), torch.uint8)
    codes = unpack_codes(packed, bits, num_rows * width).view(num_rows, width)
    return rotate(dequantise(scales, codes, bits), back=True)


def _finite(rows: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    limit = torch.finfo(torch.float32).max
    return saturating_cast(rows.nan_to_num_(nan=0.0, posinf=limit, neginf=-limit).view(shape), TORCH_DTYPES[dtype])


def _hadamard_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    if x.numel() == 0:
        return [], state.tensors
    rows = x.reshape(rows_and_width(state.shape)).float()
    return _encode_rows(rows, state.spec.integer("bits"), state), state.tensors


def _hadamard_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    num_rows, width = rows_and_width(shape)
    if num_rows * width == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return _finite(_decode_rows(payload, num_rows, width, spec.integer("bits")), shape, dtype)


def _outlier_init(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
    return {"energy": torch.zeros(rows_and_width(shape)[1])}


def _outlier_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    if x.numel() == 0:
        return [], state.tensors
    rows = x.reshape(rows_and_width(state.shape)).float()
    peak = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    require_finite(peak, state)
    rms = row_rms(rows, peak)
    share = (rows / torch.where(rms > 0, rms, torch.ones_like(rms))[:, None]).square().mean(0)
    energy = state.tensors["energy"].to(x.device)
    energy = torch.where(energy.sum() > 0, _ENERGY_DECAY * energy + (1 - _ENERGY_DECAY) * share, share)
    # A stable sort breaks ties by position, on every device alike.
    order = energy.sort(descending=True, stable=True).indices
    channels = order[: state.spec.integer("channels")].sort().values
    aside = saturating_cast(rows[:, channels], torch.bfloat16)
    rest = rows.index_fill(1, channels, 0.0)
    head = [to_bytes_view(channels.to(torch.int32)), to_bytes_view(aside)]
    return head + _encode_rows(rest, state.spec.integer("bits"), state), {"energy": energy}


def _outlier_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    num_rows, width = rows_and_width(shape)
    if num_rows * width == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    count = min(spec.integer("channels"), width)
    cut = 4 * count + 2 * count * num_rows
    channels = from_bytes_view(payload[: 4 * count], (count,), torch.int32).long()
    if not bool(((channels >= 0) & (channels < width)).all() and (channels.diff() > 0).all()):
        raise RemoteProtocolError(f"outlier channels are not {count} increasing numbers below {width}")
    aside = from_bytes_view(payload[4 * count : cut], (num_rows, count), torch.bfloat16)
    if not bool(aside.isfinite().all()):
        raise RemoteProtocolError("an outlier channel holds NaN or infinity, which no sender makes")
    rows = _decode_rows(payload[cut:], num_rows, width, spec.integer("bits"))
    return _finite(rows.index_copy_(1, channels, aside.float()), shape, dtype)


HADAMARD_CODEC = Codec(_hadamard_encode, _hadamard_decode)
OUTLIER_CODEC = Codec(_outlier_encode, _outlier_decode, _outlier_init)
