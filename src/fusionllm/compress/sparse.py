"""Sparse codecs: ``topk``, ``topk-paper``, ``randomk``, and ``same-mask`` for their gradients.

``topk`` keeps the largest magnitudes of the tensor (or of each row) exactly, codes the positions
(``positions.py``) and the values (float32 .. int4). ``topk-paper`` is the paper's operator with its naive
wire: int64 positions and float32 values, 12 bytes per kept element, here for comparison. ``randomk`` sends a
seed instead of positions: one element of each of k equal strata. All three are projections onto a mask, so
the exact adjoint is the gradient on that same mask: ``same-mask`` sends its values only, the mask being known
from the forward payload (``Reference.support``).

Wire of ``topk``: mode, low bits (one byte each), positions, values. Reference: FusionLLM section 5 (AdaTopK).
"""

from __future__ import annotations

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
from fusionllm.compress.positions import check_positions, decode_positions, encode_positions
from fusionllm.compress.quantise import decode_blocks, encode_blocks
from fusionllm.compress.select import largest, largest_per_row
from fusionllm.errors import LocalProtocolError, RemoteProtocolError
from fusionllm.ir.codec import CodecSpec
from fusionllm.ir.codec_formats import (
    VALUE_BITS,
    VALUES_PER_SCALE,
    kept_count,
    rows_and_width,
    values_num_bytes,
)

_SEED_NUM_BYTES = 8


def _count(spec: CodecSpec, shape: tuple[int, ...]) -> int:
    scope = spec.word("scope") if "scope" in spec.format.parameters else "tensor"
    return kept_count(spec.number("ratio"), scope, shape)


def encode_values(values: Tensor, kind: str, state: CodecState) -> Payload:
    """Kept values [k] of any float dtype as ``kind``."""
    if VALUE_BITS[kind] <= 8:
        return encode_blocks(values, VALUES_PER_SCALE, VALUE_BITS[kind], state)
    return [to_bytes_view(saturating_cast(values, TORCH_DTYPES[kind]))]


def decode_values(data: memoryview, kind: str, count: int) -> Tensor:
    """The inverse: float32 [k], finite."""
    if VALUE_BITS[kind] <= 8:
        return decode_blocks(data, count, VALUES_PER_SCALE, VALUE_BITS[kind])
    values = from_bytes_view(data, (count,), TORCH_DTYPES[kind]).float()
    if not bool(values.isfinite().all()):
        raise RemoteProtocolError(f"NaN or infinity among {count} sparse values, which no sender makes")
    return values


def scatter(positions: Tensor, values: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Zeros of ``shape`` with ``values`` at flat ``positions``."""
    flat = torch.zeros(torch.Size(shape).numel(), dtype=TORCH_DTYPES[dtype])
    flat[positions] = saturating_cast(values, flat.dtype)
    return flat.view(shape)


def _topk_positions(x: Tensor, state: CodecState) -> Tensor:
    magnitude = x.abs().float()
    require_finite(magnitude.sum() if x.numel() == 0 else magnitude.max(), state)
    count = _count(state.spec, state.shape)
    if "scope" in state.spec.format.parameters and state.spec.word("scope") == "row":
        rows, width = rows_and_width(state.shape)
        return largest_per_row(magnitude.reshape(rows, width), count // max(1, rows))
    return largest(magnitude.reshape(-1), count)


def _topk_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    positions = _topk_positions(x, state)
    values = encode_values(x.reshape(-1)[positions], state.spec.word("values"), state)
    mode, low_bits, index = encode_positions(positions.cpu().numpy(), x.numel(), state.spec.word("index"))
    return [memoryview(bytes((mode, low_bits))), memoryview(index), *values], state.tensors


def _topk_support(payload: memoryview, spec: CodecSpec, shape: tuple[int, ...]) -> Tensor:
    count = _count(spec, shape)
    cut = payload.nbytes - values_num_bytes(count, spec.word("values"))
    if cut < 2:
        raise RemoteProtocolError(f"payload of {payload.nbytes} bytes is too short for {count} values of {spec}")
    numel = torch.Size(shape).numel()
    return torch.from_numpy(decode_positions(payload[0], payload[1], payload[2:cut], count, numel))


def _topk_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    positions = _topk_support(payload, spec, shape)
    kind = spec.word("values")
    cut = payload.nbytes - values_num_bytes(positions.numel(), kind)
    return scatter(positions, decode_values(payload[cut:], kind, positions.numel()), shape, dtype)


def _paper_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    positions = _topk_positions(x, state)
    values = encode_values(x.reshape(-1)[positions], "float32", state)
    return [to_bytes_view(positions), *values], state.tensors


def _paper_support(payload: memoryview, spec: CodecSpec, shape: tuple[int, ...]) -> Tensor:
    count = _count(spec, shape)
    raw = from_bytes_view(payload[: 8 * count], (count,), torch.int64)
    return torch.from_numpy(check_positions(raw.numpy(), count, torch.Size(shape).numel()))


def _paper_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    positions = _paper_support(payload, spec, shape)
    values = decode_values(payload[8 * positions.numel() :], "float32", positions.numel())
    return scatter(positions, values, shape, dtype)


def stratified(seed: int, count: int, numel: int) -> Tensor:
    """One position in each of ``count`` equal strata of [0, numel), drawn by splitmix64.

    The same everywhere.
    """
    edges = np.arange(count + 1, dtype=np.uint64) * np.uint64(numel) // np.uint64(max(1, count))
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return torch.from_numpy((edges[:-1] + z % np.maximum(np.diff(edges), np.uint64(1))).astype(np.int64))


def _randomk_init(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
    return {"message": torch.zeros((), dtype=torch.int64)}


def _randomk_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    message = int(state.tensors["message"])
    positions = stratified(message, _count(state.spec, state.shape), x.numel()).to(x.device)
    kept = x.reshape(-1)[positions]
    require_finite(kept, state)
    values = encode_values(kept, state.spec.word("values"), state)
    seed = memoryview(message.to_bytes(_SEED_NUM_BYTES, "little"))
    return [seed, *values], {"message": torch.tensor(message + 1, dtype=torch.int64)}


def _randomk_support(payload: memoryview, spec: CodecSpec, shape: tuple[int, ...]) -> Tensor:
    seed = int.from_bytes(payload[:_SEED_NUM_BYTES], "little")
    return stratified(seed, _count(spec, shape), torch.Size(shape).numel())


def _randomk_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    positions = _randomk_support(payload, spec, shape)
    values = decode_values(payload[_SEED_NUM_BYTES:], spec.word("values"), positions.numel())
    return scatter(positions, values, shape, dtype)


def _mask(spec: CodecSpec, shape: tuple[int, ...], reference: Reference) -> Tensor:
    positions, count = reference.support, _count(spec, shape)
    if positions is None or positions.numel() != count:
        have = "none" if positions is None else str(positions.numel())
        raise LocalProtocolError(f"codec {spec} needs the forward payload's {count} positions, got {have}")
    return positions


def _same_mask_encode(x: Tensor, state: CodecState, reference: Reference) -> tuple[Payload, Mapping[str, Tensor]]:
    kept = x.reshape(-1)[_mask(state.spec, state.shape, reference).to(x.device)]
    require_finite(kept, state)
    return encode_values(kept, state.spec.word("values"), state), state.tensors


def _same_mask_decode(
    payload: memoryview, spec: CodecSpec, shape: tuple[int, ...], dtype: str, reference: Reference
) -> Tensor:
    positions = _mask(spec, shape, reference).cpu()
    return scatter(positions, decode_values(payload, spec.word("values"), positions.numel()), shape, dtype)


TOPK_CODEC = Codec(_topk_encode, _topk_decode, support=_topk_support)
TOPK_PAPER_CODEC = Codec(_paper_encode, _paper_decode, support=_paper_support)
RANDOMK_CODEC = Codec(_randomk_encode, _randomk_decode, _randomk_init, _randomk_support)
SAME_MASK_CODEC = Codec(_same_mask_encode, _same_mask_decode)
