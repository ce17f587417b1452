"""``tangent(inner)``: a lossy gradient whose component along the activation is exact, for 2 bytes a token.

The residual stream of a pre-norm model is nearly scale-invariant, so the true gradient g of an activation h
obeys <g, h> ~ 0. A lossy codec breaks that, the norm of the stream drifts up without bound and the stages'
gradients vanish. The sender adds t = <g, h'> per token (h': the activation as it was decoded); the receiver,
who still holds h, sets

    g' = g^ + (t - <g^, h>) / <h, h> * h          (g^: what the inner codec made of g)

``centre=1`` also removes the mean of g^ over the channels, right only where the next operator is a LayerNorm
(not an RMSNorm). No state. Wire: one float32 scale, per row its share of that, then the inner payload. A share is a
float16, or with ``bits=8`` a sign and eighths of an octave below 1: 5 % of t, which is small next to what a codec of
a fraction of a bit per element does to the rest.
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
    inner_spec,
    inner_tensors,
    require_finite,
    to_bytes_view,
)
from fusionllm.compress.dense import saturating_cast
from fusionllm.errors import LocalProtocolError, RemoteProtocolError
from fusionllm.ir.codec import CodecSpec
from fusionllm.ir.codec_formats import rows_and_width


def _activation_rows(spec: CodecSpec, shape: tuple[int, ...], reference: Reference) -> Tensor:
    if reference.activation is None:
        raise LocalProtocolError(f"codec {spec} needs the forward activation as its reference")
    rows = reference.activation.reshape(rows_and_width(shape)).float()
    return rows - rows.mean(1, keepdim=True) if spec.integer("centre") and rows.numel() else rows


def radial_parts(gradient: Tensor, activation: Tensor) -> Tensor:
    """<g, h> of each row: float32 [rows, width] x 2 -> [rows]."""
    return (gradient * activation).sum(1)


def corrected(gradient: Tensor, activation: Tensor, radial: Tensor) -> Tensor:
    """The gradient [rows, width] with <g, h> of each row set to ``radial`` [rows].

    Rows of zero activation stay.
    """
    power = activation.square().sum(1)
    step = (radial - radial_parts(gradient, activation)) / power
    step = torch.where((power > 0) & step.isfinite(), step, torch.zeros_like(step))
    return gradient + step[:, None] * activation


_STEPS_PER_OCTAVE = 8.0


def _own_num_bytes(spec: CodecSpec, num_rows: int) -> int:
    return 4 + spec.integer("bits") // 8 * num_rows


def _write_shares(share: Tensor, bits: int) -> Tensor:
    """Shares in -1 .. 1 [rows] -> float16, or uint8 of a sign and 7 bits of logarithm, 0 for what is too small."""
    if bits == 16:
        return share.half()
    level = (127 + _STEPS_PER_OCTAVE * share.abs().double().clamp(min=1e-30).log2()).round().clamp(0, 127)
    return (level + 128.0 * (share < 0)).to(torch.uint8)


def _read_shares(data: memoryview, num_rows: int, bits: int) -> Tensor:
    if bits == 16:
        return from_bytes_view(data, (num_rows,), torch.float16).float()
    codes = from_bytes_view(data, (num_rows,), torch.uint8)
    level = (codes & 127).float()
    size = torch.where(level > 0, torch.exp2((level - 127) / _STEPS_PER_OCTAVE), torch.zeros_like(level))
    return torch.where(codes >= 128, -size, size)


def tangent_over(inner: Codec) -> Codec:
    """Wrap a gradient codec."""

    def init(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
        return inner_tensors(inner.init(inner_spec(spec), shape, dtype))

    def encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
        activation = _activation_rows(state.spec, state.shape, reference).to(x.device)
        radial = radial_parts(x.reshape(rows_and_width(state.shape)).float(), activation)
        require_finite(radial, state)
        peak = radial.abs().max() if radial.numel() else radial.new_zeros(())
        share = radial / torch.where(peak > 0, peak, torch.ones_like(peak))
        payload, tensors = inner.encode(x, state.for_inner(), reference)
        return [
            to_bytes_view(peak),
            to_bytes_view(_write_shares(share, state.spec.integer("bits"))),
            *payload,
        ], inner_tensors(tensors)

    def decode(
        payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
    ) -> Tensor:
        num_rows, width = rows_and_width(shape)
        cut = _own_num_bytes(spec, num_rows)
        peak = from_bytes_view(payload[:4], (), torch.float32)
        share = _read_shares(payload[4:cut], num_rows, spec.integer("bits"))
        if not (bool(peak.isfinite()) and bool(peak >= 0) and bool((share.abs() <= 1).all())):
            raise RemoteProtocolError(f"the radial parts of {num_rows} rows are not finite shares of a scale")
        gradient = inner.decode(payload[cut:], inner_spec(spec), shape, dtype, reference)
        rows = gradient.reshape(num_rows, width).float()
        if spec.integer("centre") and rows.numel():
            rows = rows - rows.mean(1, keepdim=True)
        activation = _activation_rows(spec, shape, reference).cpu()
        return saturating_cast(corrected(rows, activation, share * peak).view(shape), TORCH_DTYPES[dtype])

    if inner.remember is None:
        return Codec(encode, decode, init)
    keep = inner.remember

    def remember(
        payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, memory: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        return keep(payload[_own_num_bytes(spec, rows_and_width(shape)[0]) :], inner_spec(spec), shape, dtype, memory)

    return Codec(encode, decode, init, remember=remember)
