"""``klt``: transform coding of the residual stream, ``rate`` bits per element, down to fractions of a bit.

Each row is divided by its rms and turned into the eigenbasis of a running covariance; the bits of a row go
where they remove most error (reverse water-filling), many directions getting none; each direction has a
uniform quantiser for a normal value. The basis travels with the message after each refresh; the others only
name its version, so the receiver remembers it (``compress.remember``). Both ends use the basis as it was
rounded for the wire.

Wire: version, whether a basis follows, [bits per direction, deviation per direction, active directions as
columns], rms per row, bit planes. Differs from the textbook by the common scale per row, which keeps outlier
tokens apart. Reference: reverse water-filling, Cover & Thomas 10.3.3; quantiser steps, Max 1960, table II.
"""

from __future__ import annotations

import struct
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
from fusionllm.compress.quantise import pack_codes, read_scales, row_rms, unpack_codes
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import CodecSpec
from fusionllm.ir.codec_formats import ceil_div, klt_bits_per_row, rows_and_width

_HEAD = struct.Struct("<IB")
_DECAY = 0.9
#: A young covariance changes fast: refresh at these messages too.
_EARLY = (0, 1, 2, 5, 10)
#: Error of the best uniform quantiser of a unit normal with 0 .. 8 bits, and its step with 1 .. 8.
_ERROR = torch.tensor([1, 0.3634, 0.1188, 0.0374, 0.01154, 0.0035, 0.00104, 0.0003, 0.00008])
_STEP = torch.tensor([0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308])
_MAX_BITS = 8


def _init(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
    width = rows_and_width(shape)[1]
    return {
        "message": torch.zeros((), dtype=torch.int64),
        "version": torch.zeros((), dtype=torch.int64),
        "covariance": torch.zeros(width, width),
        "bits": torch.zeros(width, dtype=torch.uint8),
        "deviation": torch.zeros(width, dtype=torch.bfloat16),
        "basis": torch.zeros(width, width, dtype=torch.bfloat16),
    }


def allocate_bits(variance: Tensor, total: int) -> Tensor:
    """Variance per direction [d] -> uint8 bits [d], ``total`` in all, each where it gains most."""
    gain = (variance[:, None] * (_ERROR[:-1] - _ERROR[1:]).to(variance.device)).reshape(-1)
    # Stable, and gains fall with every further bit of a direction, so a prefix of each direction's bits is
    # taken.
    chosen = gain.sort(descending=True, stable=True).indices[:total] // _MAX_BITS
    return torch.bincount(chosen, minlength=variance.numel()).to(torch.uint8)


def _refreshed(tensors: Mapping[str, Tensor], covariance: Tensor, total: int) -> dict[str, Tensor]:
    """A new basis from the covariance, on the CPU so that every device finds the same."""
    variance, vectors = torch.linalg.eigh(covariance.double().cpu())
    variance = variance.clamp(min=1e-12).float()
    bits = allocate_bits(variance, total)
    basis = torch.where(bits > 0, vectors.float(), torch.zeros(())).bfloat16()
    return {
        "version": tensors["version"] + 1,
        "bits": bits,
        "deviation": variance.sqrt().bfloat16(),
        "basis": basis,
    }


def _steps(bits: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Step and number of levels per active direction, float32."""
    return _STEP.to(bits.device)[bits.long()] * deviation.float(), 2.0 ** bits.float()


def _encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    if x.numel() == 0:
        return [], state.tensors
    width = rows_and_width(state.shape)[1]
    rows = x.reshape(-1, width).float()
    peak = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    require_finite(peak, state)
    rms = row_rms(rows, peak).bfloat16()
    unit = rows / torch.where(rms > 0, rms.float(), torch.ones_like(peak))[:, None]
    message = int(state.tensors["message"])
    fresh = unit.t() @ unit / unit.shape[0]
    old = state.tensors["covariance"].to(x.device)
    tensors = {**state.tensors, "message": torch.tensor(message + 1)}
    tensors["covariance"] = _DECAY * old + (1 - _DECAY) * fresh if message else fresh
    refresh = message in _EARLY or message % state.spec.integer("refresh") == 0
    if refresh:
        total = klt_bits_per_row(state.spec.number("rate"), width)
        tensors.update(_refreshed(tensors, tensors["covariance"], total))
    active = (tensors["bits"] > 0).nonzero().view(-1)
    head: Payload = [memoryview(_HEAD.pack(int(tensors["version"]) & 0xFFFFFFFF, refresh))]
    if refresh:
        head += [to_bytes_view(tensors[n]) for n in ("bits", "deviation")]
        head.append(to_bytes_view(tensors["basis"][:, active]))
    planes = _quantised_planes(unit, tensors, active)
    return [*head, to_bytes_view(rms), to_bytes_view(pack_codes(planes, 1))], tensors


def _quantised_planes(unit: Tensor, tensors: Mapping[str, Tensor], active: Tensor) -> Tensor:
    """Bit planes of the quantised coefficients, lowest first.

    Uint8 [rows x bits per row] of zeros and ones.
    """
    basis = tensors["basis"][:, active].float().to(unit.device)
    bits = tensors["bits"][active].to(unit.device)
    step, levels = _steps(bits, tensors["deviation"][active].to(unit.device))
    index = ((unit @ basis) / step).floor_() + levels / 2
    codes = torch.minimum(index.clamp_(min=0), levels - 1).to(torch.uint8)
    return torch.cat([((codes[:, bits > p] >> p) & 1).reshape(-1) for p in range(_MAX_BITS)])


def _read_basis(data: memoryview, width: int, total: int) -> tuple[dict[str, Tensor], int]:
    """Bits, deviations and basis from outside, and the bytes they took."""
    cut = 3 * width
    if data.nbytes < cut:
        raise RemoteProtocolError(f"{data.nbytes} bytes are too short for a basis of {width} directions")
    bits = from_bytes_view(data[:width], (width,), torch.uint8)
    deviation = read_scales(data[width:cut], width)
    if int(bits.long().sum()) != total or int(bits.max()) > _MAX_BITS:
        raise RemoteProtocolError(f"the directions' bits are not {total} in all, at most {_MAX_BITS} each")
    active = (bits > 0).nonzero().view(-1)
    end = cut + 2 * width * active.numel()
    columns = from_bytes_view(data[cut:end], (width, active.numel()), torch.bfloat16)
    if not bool((columns.float().abs() <= 1.01).all()):
        raise RemoteProtocolError("a basis of unit vectors holds an element beyond 1, or NaN")
    basis = torch.zeros(width, width, dtype=torch.bfloat16).index_copy_(1, active, columns)
    return {"bits": bits, "deviation": deviation, "basis": basis}, end


def _open(
    payload: memoryview, spec: CodecSpec, width: int, memory: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], memoryview]:
    """The basis that a payload is coded in (its own or the remembered one) and the rest of the payload."""
    if payload.nbytes < _HEAD.size:
        raise RemoteProtocolError(f"{payload.nbytes} bytes are too short for a payload of {spec}")
    version, carries = _HEAD.unpack_from(payload)
    body = payload[_HEAD.size :]
    if carries == 1:
        basis, end = _read_basis(body, width, klt_bits_per_row(spec.number("rate"), width))
        return {"version": torch.tensor(version), **basis}, body[end:]
    if carries or not memory or int(memory["version"]) != version:
        have = int(memory["version"]) if memory else "none"
        raise RemoteProtocolError(f"payload of {spec} is coded in basis {version}, but this side holds {have}")
    return memory, body


def _remember(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, memory: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    num_rows, width = rows_and_width(shape)
    return memory if num_rows * width == 0 else _open(payload, spec, width, memory)[0]


def _decode(payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference) -> Tensor:
    num_rows, width = rows_and_width(shape)
    if num_rows * width == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    tensors, body = _open(payload, spec, width, reference.memory)
    total = klt_bits_per_row(spec.number("rate"), width)
    rms = read_scales(body[: 2 * num_rows], num_rows).float()
    packed = from_bytes_view(body[2 * num_rows :], (ceil_div(num_rows * total, 8),), torch.uint8)
    planes = unpack_codes(packed, 1, num_rows * total)
    active = (tensors["bits"] > 0).nonzero().view(-1)
    bits = tensors["bits"][active]
    codes = torch.zeros(num_rows, active.numel(), dtype=torch.uint8)
    start = 0
    for p in range(_MAX_BITS):
        columns = (bits > p).nonzero().view(-1)
        end = start + num_rows * columns.numel()
        codes[:, columns] |= planes[start:end].view(num_rows, -1) << p
        start = end
    step, levels = _steps(bits, tensors["deviation"][active])
    unit = ((codes.float() + 0.5 - levels / 2) * step) @ tensors["basis"][:, active].float().t()
    limit = torch.finfo(torch.float32).max
    rows = (unit * rms[:, None]).nan_to_num_(nan=0.0, posinf=limit, neginf=-limit)
    return saturating_cast(rows.view(shape), TORCH_DTYPES[dtype])


KLT_CODEC = Codec(_encode, _decode, _init, remember=_remember)
