"""``klt-ec``: transform coding with an entropy coder, ``rate`` bits per element in all but for its basis.

As ``klt``, each row is divided by its rms and turned into the eigenbasis of a running covariance. Here one step
quantises all directions, and what is rare is made cheap by the code (``flags.py``) instead of a number of bits for
each direction. Coefficients of trained models are far from normal, mostly small and now and then large, so that this
takes a fourth to an eighth of the error of ``klt`` at the same rate. The step is found anew for each message by the
entropy it leaves, times what the last message took over its entropy, so that the rate is met on average.

Wire: head (version of the basis, whether one follows, directions in use, step, two offsets of the reconstruction,
largest rms), [the basis, int8 columns with a scale each], rms per row in eighths of an octave, what is taken off the
directions whose mean is not zero, a class per direction, integers. Reference: entropy-coded scalar quantisation,
Sullivan 1996 (dead zone, reconstruction in the centroid).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import numpy as np
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
from fusionllm.compress.flags import MAX_MAGNITUDE, Integers, Reader, classes_of, read_integers, write_integers
from fusionllm.compress.quantise import dequantise, quantise, read_scales, row_rms
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import CodecSpec
from fusionllm.ir.codec_formats import (
    KLT_EC_HEAD_NUM_BYTES,
    klt_ec_budget_bits,
    klt_ec_message_num_bytes,
    rows_and_width,
)

_HEAD = struct.Struct("<IBHffff")
_COUNT = struct.Struct("<H")
assert _HEAD.size == KLT_EC_HEAD_NUM_BYTES
_DECAY = 0.9
#: A young covariance changes fast: refresh at these messages too, then at intervals that grow with the message's age.
_EARLY = (0, 1, 2, 5, 10)
_GROWTH = 1.5
#: Only so many messages before a new basis enter its covariance: the older ones would weigh a tenth of it.
_MEMORY = 22
#: A value is rounded up from this part of a step on; 0.5 would be plain rounding.
_ROUND_UP_FROM = 0.65
#: A direction with fewer nonzeros than this is not worth its column of the basis.
_LEAST_SHARE = 0.004
_STEPS_PER_OCTAVE = 8.0
_ZERO_ROW = 255
_MAX_ATTEMPTS = 40
#: Rows that tell the step of a message.
_SAMPLE_ROWS = 512
#: Codes and the shifts taken off them together stay within what the coder takes.
_MAX_CODE = MAX_MAGNITUDE // 2


def _init(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
    width = rows_and_width(shape)[1]
    return {
        "message": torch.zeros((), dtype=torch.int64),
        "refreshed": torch.zeros((), dtype=torch.int64),
        "version": torch.zeros((), dtype=torch.int64),
        "covariance": torch.zeros(width, width),
        "columns": torch.zeros(width, width, dtype=torch.int8),
        "scales": torch.zeros(width, dtype=torch.bfloat16),
        "step": torch.ones(()),
        "overhead": torch.tensor(1.05),
        "looks": torch.ones((), dtype=torch.int64),
    }


def _due(last: int, refresh: int) -> int:
    """The message that brings a new basis after that of message ``last``."""
    early = next((message for message in _EARLY if message > last), math.inf)
    return math.ceil(min(early, last + refresh, max(_EARLY[-1], last) * _GROWTH))


def _row_scales(rows: Tensor, state: CodecState) -> tuple[float, Tensor, Tensor]:
    """The largest rms, each row's in eighths of an octave below it (uint8), and what that stands for (float32)."""
    peak = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    require_finite(peak, state)
    rms = row_rms(rows, peak)
    top = float(rms.max())
    octaves = (top / rms.double().clamp(min=1e-300)).log2() * _STEPS_PER_OCTAVE
    codes = octaves.round().clamp(0, _ZERO_ROW - 1)
    codes = torch.where(rms > 0, codes, torch.full_like(codes, _ZERO_ROW)).to(torch.uint8)
    return top, codes, _scales_of(top, codes)


def _scales_of(top: float, codes: Tensor) -> Tensor:
    scales = top * torch.exp2(-codes.double() / _STEPS_PER_OCTAVE)
    return torch.where(codes == _ZERO_ROW, torch.zeros_like(scales), scales).float()


def _quantised(coefficients: Tensor, step: float) -> Tensor:
    """Signed codes, whole numbers as float32."""
    return (coefficients.abs() / step + (1 - _ROUND_UP_FROM)).floor_().clamp_(max=_MAX_CODE).copysign_(coefficients)


def _shifts(means: Tensor, step: float) -> Tensor:
    """What to take off the codes of each direction: its mean, large for the few that hold a model's offsets."""
    return (means / step).round().clamp(-_MAX_CODE, _MAX_CODE)


def _entropy_bits(nonzeros: Tensor, sums: Tensor, num_rows: int) -> float:
    """Bits that columns of such counts will take: the flags' entropy, and the signs."""

    def entropy(count: Tensor, total: Tensor) -> Tensor:
        share = count / total.clamp(min=1)
        bits: Tensor = total * (torch.special.entr(share) + torch.special.entr(1 - share)) / math.log(2)
        return bits

    rows = torch.full_like(nonzeros, num_rows)
    return float((entropy(nonzeros, rows) + nonzeros + entropy(nonzeros, sums)).sum())


def _next_step(step: float, excess: float, too_fine: float, enough: float) -> float:
    """Bits fall about as the step grows; the bracket of steps known to be too fine and coarse enough catches the rest.

    Args:
        excess: bits of ``step`` over those wanted.
    """
    guess: float = step * min(2.0, max(0.5, excess**0.8))
    if too_fine * 1.001 < guess < enough / 1.001:
        return guess
    if too_fine and enough < math.inf:
        return math.sqrt(too_fine * enough)
    return step * (2.0 if too_fine else 0.5)


def _counts(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Per direction, how many codes are not zero and the sum of their magnitudes, float64."""
    return torch.count_nonzero(codes, 0).double(), codes.abs().sum(0, dtype=torch.float64)


def find_step(coefficients: Tensor, budget_bits: float, start: float) -> float:
    """The step that spends the budget on coefficients [rows, directions], to 2 % of a sample of the rows."""
    stride = max(1, coefficients.shape[0] // _SAMPLE_ROWS)
    sample, budget_bits = coefficients[::stride], budget_bits / stride
    least = max(float(coefficients.abs().max()) / (_MAX_CODE - 1), 1e-30) if coefficients.numel() else 1.0
    step, too_fine, enough = max(start, least), 0.0, math.inf
    for _ in range(_MAX_ATTEMPTS):
        codes = _quantised(sample, step).sub_(_shifts(sample.mean(0), step))
        bits = _entropy_bits(*_counts(codes), sample.shape[0])
        if bits <= budget_bits and (bits >= 0.98 * budget_bits or step == least or enough <= 1.005 * too_fine):
            break
        if bits > budget_bits:
            too_fine = step
        else:
            enough = step
        step = max(least, _next_step(step, bits / max(0.99 * budget_bits, 1.0), too_fine, enough))
    return step


def _refreshed(tensors: dict[str, Tensor], unit: Tensor, budget_bits: float) -> dict[str, Tensor]:
    """A new basis from the covariance, found on the CPU so that every device finds the same."""
    vectors = torch.linalg.eigh(tensors["covariance"].double().cpu()).eigenvectors.flip(1).float()
    coefficients = unit @ vectors.to(unit.device)
    used = (_quantised(coefficients, find_step(coefficients, budget_bits, float(tensors["step"]))) != 0).sum(0).cpu()
    wanted = (used >= _LEAST_SHARE * unit.shape[0]).nonzero().view(-1)
    count = int(wanted[-1]) + 1 if wanted.numel() else 1
    scales, codes = quantise(vectors.t()[:count].contiguous(), 8)
    columns, all_scales = torch.zeros_like(tensors["columns"]), torch.zeros_like(tensors["scales"])
    columns[:count], all_scales[:count] = codes.view(torch.int8), scales
    return {
        "version": tensors["version"] + 1, "refreshed": tensors["message"].clone(), "columns": columns,
        "scales": all_scales,
    }  # fmt: skip


def _basis(tensors: Mapping[str, Tensor]) -> Tensor:
    """The directions in use, float32 [directions, width]."""
    count = int((tensors["scales"].float() > 0).sum())
    return dequantise(tensors["scales"][:count], tensors["columns"][:count].view(torch.uint8), 8)


def _offsets(coefficients: Tensor, quantised: Tensor, step: float) -> tuple[float, float]:
    """How far, in steps, the mean coefficient of magnitude 1 and of the others lies from its magnitude."""
    there = quantised != 0
    magnitudes = quantised[there].abs_()
    away, is_one = coefficients[there].abs_().div_(step).sub_(magnitudes).double(), magnitudes == 1
    sums, counts = (float(away[is_one].sum()), float(away.sum())), (int(is_one.sum()), is_one.numel())
    near, far = sums[0] / max(1, counts[0]), (sums[1] - sums[0]) / max(1, counts[1] - counts[0])
    return min(0.5, max(-0.5, near)), min(0.5, max(-0.5, far))


def _encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    if x.numel() == 0:
        return [], state.tensors
    rows = x.reshape(rows_and_width(state.shape)).float()
    top, row_codes, scales = _row_scales(rows, state)
    unit = torch.where(scales > 0, rows.t() / scales, torch.zeros(())).t()
    row_scales = _write_row_scales(row_codes)
    wanted_bits = klt_ec_budget_bits(state.spec.value, state.shape, len(row_scales))
    budget_bits = wanted_bits / float(state.tensors["overhead"])
    tensors, refresh = _advanced(state, unit, budget_bits)
    basis = _basis(tensors)
    count = basis.shape[0]
    coefficients = unit @ basis.t().to(x.device)
    limit = klt_ec_message_num_bytes(state.spec.value, state.shape) - _HEAD.size - len(row_scales)
    step = find_step(coefficients, budget_bits, float(tensors["step"]))
    means, looks = coefficients.mean(0), None if refresh else int(tensors["looks"])
    body, quantised, entropy_bits, looks = _body(coefficients, means, step, looks)
    while len(body) > limit:
        step *= 1.25
        body, quantised, entropy_bits, looks = _body(coefficients, means, step, looks)
    overhead = min(2.0, max(0.5, 8 * len(body) / entropy_bits)) if entropy_bits else float(tensors["overhead"])
    tensors |= {"step": torch.tensor(step), "overhead": torch.tensor(overhead), "looks": torch.tensor(looks)}
    offsets = _offsets(coefficients, quantised, step)
    head = _HEAD.pack(int(tensors["version"]) & 0xFFFFFFFF, refresh, count, step, *offsets, top)
    sent = [to_bytes_view(tensors["scales"][:count]), to_bytes_view(tensors["columns"][:count])] if refresh else []
    return [memoryview(head), *sent, memoryview(row_scales + body)], tensors


def _advanced(state: CodecState, unit: Tensor, budget_bits: float) -> tuple[dict[str, Tensor], bool]:
    """The state after one more message of rows of unit rms, and whether its basis is new."""
    tensors, message = dict(state.tensors), int(state.tensors["message"])
    due = _due(int(tensors["refreshed"]), state.spec.integer("refresh")) if message else 0
    if message > due - _MEMORY:
        old, fresh = tensors["covariance"].to(unit.device), unit.t() @ unit / unit.shape[0]
        tensors["covariance"] = _DECAY * old + (1 - _DECAY) * fresh if message else fresh
    refresh = message >= due
    if refresh:
        tensors.update(_refreshed(tensors, unit, budget_bits))
    tensors["message"] = torch.tensor(message + 1)
    return tensors, refresh


def _write_column(codes: Integers) -> bytes:
    """Integers of one kind [n]: their class and themselves."""
    nonzeros, total = np.array([np.count_nonzero(codes)], float), np.array([np.abs(codes).sum()], float)
    classes = classes_of(nonzeros, total, max(1, codes.size))
    return classes.tobytes() + write_integers(codes[:, None], classes)


def _read_column(reader: Reader, count: int) -> Integers:
    return read_integers(reader, count, np.frombuffer(reader.take(1), np.uint8))[:, 0]


def _write_row_scales(codes: Tensor) -> bytes:
    """Scales [rows] as a byte each, or by how far they are from the middle one where that is less."""
    plain = codes.cpu().numpy()
    middle = int(np.median(plain))
    coded = bytes((1, middle)) + _write_column(plain.astype(np.int16) - middle)
    return coded if len(coded) <= plain.size else b"\0" + plain.tobytes()


def _read_row_scales(reader: Reader, num_rows: int) -> Tensor:
    kind = reader.take(1)[0]
    if kind == 0:
        return from_bytes_view(reader.take(num_rows), (num_rows,), torch.uint8)
    codes = reader.take(1)[0] + _read_column(reader, num_rows)
    if kind > 1 or codes.min() < 0 or codes.max() > _ZERO_ROW:
        raise RemoteProtocolError(f"the scales of {num_rows} rows are not between 0 and {_ZERO_ROW}")
    return torch.from_numpy(codes.astype(np.uint8))


def _body(coefficients: Tensor, means: Tensor, step: float, looks: int | None) -> tuple[bytes, Tensor, float, int]:
    """Directions' shifts and classes, and the integers; the coefficients in whole steps; the integers' entropy in bits,
    by direction; how they are coded, which ``looks`` asks for."""
    quantised, shifts = _quantised(coefficients, step), _shifts(means, step)
    codes = quantised - shifts
    nonzeros, sums = _counts(codes)
    used = np.flatnonzero((nonzeros.cpu() > 0) | (shifts.cpu() != 0))
    count = int(used[-1]) + 1 if used.size else 0
    classes = classes_of(nonzeros.cpu().numpy()[:count], sums.cpu().numpy()[:count], codes.shape[0])
    integers = write_integers(codes[:, :count].to(torch.int16).cpu().numpy(), classes, looks)
    head = _COUNT.pack(count) + _write_column(shifts.cpu().numpy()[:count].astype(np.int16))
    entropy_bits = _entropy_bits(nonzeros, sums, codes.shape[0])
    return b"".join((head, classes.tobytes(), integers)), quantised, entropy_bits, integers[0]


def _read_basis(data: Reader, width: int, count: int) -> dict[str, Tensor]:
    """Scales and columns from outside."""
    scales, columns = torch.zeros(width, dtype=torch.bfloat16), torch.zeros(width, width, dtype=torch.int8)
    scales[:count] = read_scales(data.take(2 * count), count)
    columns[:count] = from_bytes_view(data.take(width * count), (count, width), torch.int8)
    if not bool(((scales[:count] > 0) & (scales[:count] <= 1)).all()):
        raise RemoteProtocolError(f"a basis of {count} unit vectors has a scale that is not in 0 .. 1")
    return {"scales": scales, "columns": columns}


def _open(
    payload: memoryview, spec: CodecSpec, width: int, memory: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], tuple[float, float, float, float], Reader]:
    """The basis a payload is coded in (its own or the remembered one), its step, offsets and top, and the rest."""
    reader = Reader(payload)
    version, carries, count, *numbers = _HEAD.unpack(reader.take(_HEAD.size))
    step, near, far, top = numbers
    if not (np.isfinite(numbers).all() and step > 0 and top >= 0 and max(abs(near), abs(far)) <= 0.5):
        raise RemoteProtocolError(f"payload of {spec} has step {step}, offsets {near} and {far}, scale {top}")
    if carries > 1 or not 0 < count <= width:
        raise RemoteProtocolError(f"payload of {spec} is coded in {count} directions of {width}")
    if carries:
        basis = _read_basis(reader, width, count)
        return {"version": torch.tensor(version), **basis}, (step, near, far, top), reader
    if not memory or int(memory["version"]) != version:
        have = int(memory["version"]) if memory else "none"
        raise RemoteProtocolError(f"payload of {spec} is coded in basis {version}, but this side holds {have}")
    return memory, (step, near, far, top), reader


def _remember(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, memory: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    num_rows, width = rows_and_width(shape)
    return memory if num_rows * width == 0 else _open(payload, spec, width, memory)[0]


def _decode(payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference) -> Tensor:
    num_rows, width = rows_and_width(shape)
    if num_rows * width == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    tensors, (step, near, far, top), reader = _open(payload, spec, width, reference.memory)
    basis = _basis(tensors)
    scales = _scales_of(top, _read_row_scales(reader, num_rows))
    (count,) = _COUNT.unpack(reader.take(_COUNT.size))
    if count > basis.shape[0]:
        raise RemoteProtocolError(f"payload of {spec} uses {count} directions of {basis.shape[0]}")
    shifts = _read_column(reader, count)
    classes = np.frombuffer(reader.take(count), np.uint8)
    codes = torch.from_numpy(read_integers(reader, num_rows, classes) + shifts).float()
    reader.end()
    offset = torch.where(codes.abs() > 1, far, near)
    coefficients = (codes + offset * codes.sign()) * step
    limit = torch.finfo(torch.float32).max
    unit = coefficients @ basis[:count]
    rows = (unit * scales[:, None]).nan_to_num_(nan=0.0, posinf=limit, neginf=-limit)
    return saturating_cast(rows.view(shape), TORCH_DTYPES[dtype])


KLT_EC_CODEC = Codec(_encode, _decode, _init, remember=_remember)
