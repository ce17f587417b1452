"""Block quantisers: ``int8``, ``int4`` and ``fp8``, one bfloat16 scale per block or per row.

Also the scalar quantisers (8, 6, 4, 2 or 1 bit) that the rotation and sparse codecs build on. Wire: scales, then
codes, packed little end first. A scale is rounded up, so a value never clips and the error of an element is
at most half a step: ``max|block| / 127 / 2`` for int8, ``/ 7 / 2`` for int4, 1/16 of the element for fp8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

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
from fusionllm.ir.codec_formats import SCALE_NUM_BYTES, ceil_div, rows_and_width

_LEVELS = {8: 127, 6: 31, 4: 7}
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
#: Clip points in rms units that minimise the squared error of a rotated, near-normal row.
_CLIP_RMS = {6: 3.5, 4: 2.8}


def as_blocks(x: Tensor, block: int) -> Tensor:
    """Any tensor as float32 [blocks, block], the last block padded with zeros."""
    flat = x.reshape(-1).float()
    missing = -flat.numel() % block
    return (functional.pad(flat, (0, missing)) if missing else flat).view(-1, block)


def ceil_bfloat16(x: Tensor) -> Tensor:
    """Non-negative float32 -> bfloat16, rounded up."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def row_rms(rows: Tensor, peak: Tensor) -> Tensor:
    """Root mean square of each row, safe from over- and underflow. ``peak``: the row's largest magnitude."""
    if peak.numel() and bool((peak.max() < 1e15) & (peak.min() > 1e-15)):
        length: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return length / math.sqrt(rows.shape[1])
    safe = torch.where(peak > 0, peak, torch.ones_like(peak))
    return peak * (rows / safe[:, None]).square().mean(1).sqrt()


def _divisor(scale: Tensor) -> Tensor:
    wide = scale.float()
    return torch.where(wide > 0, wide, torch.ones_like(wide))[:, None]


def quantise(rows: Tensor, bits: int, *, clip: bool = False) -> tuple[Tensor, Tensor]:
    """float32 [blocks, block] -> (bfloat16 scales [blocks], uint8 codes [blocks, block]).

    8, 6 and 4 bits: uniform and symmetric, zero kept; 2 bits: four mid-rise levels one rms apart; 1 bit: the
    sign. ``clip`` trades the tail of a near-normal row for a finer step. A NaN or infinity shows in the
    scales.
    """
    peak = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    if bits in _LEVELS:
        levels = _LEVELS[bits]
        top = torch.minimum(peak, _CLIP_RMS[bits] * row_rms(rows, peak)) if clip and bits in _CLIP_RMS else peak
        scale = ceil_bfloat16(top / levels)
        codes = (rows / _divisor(scale)).round_()
        codes = (codes.clamp_(-levels, levels) if clip else codes).to(torch.int8)
        return scale, codes.view(torch.uint8) if bits == 8 else (codes + (levels + 1)).view(torch.uint8)
    if bits == 2:
        scale = row_rms(rows, peak).to(torch.bfloat16)
        return scale, (rows / _divisor(scale)).floor_().clamp_(-2, 1).add_(2).to(torch.uint8)
    scale = rows.abs().mean(1).to(torch.bfloat16)
    return scale, (rows >= 0).to(torch.uint8)


def dequantise(scale: Tensor, codes: Tensor, bits: int) -> Tensor:
    """The inverse of ``quantise``: float32 [blocks, block]."""
    if bits == 8:
        values = codes.view(torch.int8).float()
    elif bits in _LEVELS:
        values = codes.float().sub_(_LEVELS[bits] + 1)
    elif bits == 2:
        values = codes.float().sub_(1.5)
    else:
        values = codes.float().mul_(2).sub_(1)
    return values.mul_(scale.float()[:, None])


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes (any shape, each below 2**bits) -> uint8 [ceil(count * bits / 8)]."""
    flat = codes.reshape(-1)
    if bits == 8:
        return flat
    per_group = 8 // math.gcd(8, bits)
    missing = -flat.numel() % per_group
    lanes = (functional.pad(flat, (0, missing)) if missing else flat).view(-1, per_group)
    if bits == 6:  # four codes in three bytes
        a, b, c, d = lanes.unbind(1)
        packed = torch.stack((a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2), 1).view(-1)
        return packed[: ceil_div(flat.numel() * bits, 8)]
    packed = lanes[:, 0].clone()
    for lane in range(1, per_group):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of ``pack_codes``: uint8 [count]."""
    if bits == 8:
        return packed
    if bits == 6:
        a, b, c = functional.pad(packed, (0, -packed.numel() % 3)).view(-1, 3).unbind(1)
        lanes = [a & 63, a >> 6 | (b & 15) << 2, b >> 4 | (c & 3) << 4, c >> 2]
    else:
        lanes = [(packed >> (lane * bits)) & ((1 << bits) - 1) for lane in range(8 // bits)]
    return torch.stack(lanes, 1).reshape(-1)[:count]


def read_scales(data: memoryview, count: int) -> Tensor:
    """bfloat16 [count] from outside. Raises RemoteProtocolError for a negative, NaN or too large one."""
    scales = from_bytes_view(data, (count,), torch.bfloat16)
    wide = scales.float()
    if not bool(((wide >= 0) & (wide * _FP8_MAX).isfinite()).all()):
        raise RemoteProtocolError(f"a scale among {count} is negative, not finite or beyond float32's range")
    return scales


def encode_blocks(x: Tensor, block: int, bits: int, state: CodecState) -> Payload:
    """Quantise a flat tensor in blocks: [scales, packed codes of exactly ``x.numel()`` elements]."""
    scale, codes = quantise(as_blocks(x, block), bits)
    require_finite(scale, state)
    return [to_bytes_view(scale), to_bytes_view(pack_codes(codes.view(-1)[: x.numel()], bits))]


def decode_blocks(data: memoryview, numel: int, block: int, bits: int) -> Tensor:
    """The inverse: float32 [numel]."""
    num_blocks = ceil_div(numel, block)
    cut = SCALE_NUM_BYTES * num_blocks
    scales = read_scales(data[:cut], num_blocks)
    packed = from_bytes_view(data[cut:], (ceil_div(numel * bits, 8),), torch.uint8)
    codes = unpack_codes(packed, bits, numel)
    padded = functional.pad(codes, (0, num_blocks * block - numel))
    return dequantise(scales, padded.view(num_blocks, block), bits).view(-1)[:numel]


def _block_of(spec: CodecSpec, shape: tuple[int, ...]) -> int:
    return spec.integer("block") or max(1, rows_and_width(shape)[1])


def _int_codec(bits: int) -> Codec:
    def encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
        return encode_blocks(x, _block_of(state.spec, state.shape), bits, state), state.tensors

    def decode(
        payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
    ) -> Tensor:
        flat = decode_blocks(payload, torch.Size(shape).numel(), _block_of(spec, shape), bits)
        return saturating_cast(flat.view(shape), TORCH_DTYPES[dtype])

    return Codec(encode, decode)


def _fp8_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    rows = as_blocks(x, _block_of(state.spec, state.shape))
    scale = ceil_bfloat16(torch.linalg.vector_norm(rows, ord=torch.inf, dim=1) / _FP8_MAX)
    require_finite(scale, state)
    codes = (rows / _divisor(scale)).to(_FP8).view(torch.uint8)
    return [to_bytes_view(scale), to_bytes_view(codes.view(-1)[: x.numel()])], state.tensors


def _fp8_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    numel, block = torch.Size(shape).numel(), _block_of(spec, shape)
    num_blocks = ceil_div(numel, block)
    scales = read_scales(payload[: SCALE_NUM_BYTES * num_blocks], num_blocks)
    codes = from_bytes_view(payload[SCALE_NUM_BYTES * num_blocks :], (numel,), torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise RemoteProtocolError("an fp8 payload holds NaN codes, which no sender makes")
    rows = functional.pad(codes, (0, num_blocks * block - numel)).view(_FP8).float().view(num_blocks, block)
    flat = rows.mul_(scales.float()[:, None]).view(-1)[:numel]
    return saturating_cast(flat.view(shape), TORCH_DTYPES[dtype])


INT8_CODEC = _int_codec(8)
INT4_CODEC = _int_codec(4)
FP8_CODEC = Codec(_fp8_encode, _fp8_decode)
