"""Positions of kept elements as bytes: ``rice``, ``gaps``, ``bitmap`` or ``int32``, and the choice of the smallest.

Numpy only, no loop over elements. Rice coding of the gaps with the unary part and each of the low bits in a
stream of its own: the same size as the interleaved code (within 3 % of the entropy of a random mask), but
every step is a vector operation, so it needs no compiler. ``gaps`` are bytes under zstd, which finds what repeats:
the same channels in every row. Everything read is hostile: the result is strictly increasing, in range and of the
expected count, or an error.

Elias-Fano's code is not among them because it is never the smallest: both spend ``n`` bits on ends and ``n l`` on low
bits, and besides it ``numel >> l``, where Rice spends the sum of ``gap >> l``, which is at most that.
Reference: Rice 1979; the split streams are Elias-Fano's layout on gaps instead of positions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zstandard

from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec_formats import ceil_div, rice_low_bits

Positions = npt.NDArray[np.int64]
_MODES = ("int32", "bitmap", "rice", "gaps")
#: A gap of this or more is written apart, in four bytes.
_LONG_GAP = 255
_MAX_LOW_BITS = 40


def encode_positions(positions: Positions, numel: int, index: str) -> tuple[int, int, bytes]:
    """Strictly increasing positions below ``numel`` -> (mode, low bits, bytes). ``index``.

    A mode or ``auto``.
    """
    count = positions.size
    gaps = np.diff(positions, prepend=-1) - 1
    low_bits, rice_size = _best_low_bits(gaps, numel)
    packed = _gaps_encode(gaps) if index in ("auto", "gaps") else b""
    sizes = {"int32": 4 * count, "bitmap": ceil_div(numel, 8), "rice": rice_size, "gaps": len(packed)}
    mode = min(_MODES, key=lambda m: sizes[m]) if index == "auto" else index
    if mode == "gaps":
        return 3, 0, packed
    if mode == "int32":
        return 0, 0, positions.astype("<i4").tobytes()
    if mode == "bitmap":
        mask = np.zeros(numel, np.uint8)
        mask[positions] = 1
        return 1, 0, np.packbits(mask, bitorder="little").tobytes()
    return 2, low_bits, _rice_encode(gaps, low_bits)


def decode_positions(mode: int, low_bits: int, data: memoryview, count: int, numel: int) -> Positions:
    """The inverse.

    Raises RemoteProtocolError unless exactly ``count`` increasing positions below ``numel`` come out.
    """
    if mode >= len(_MODES) or low_bits > _MAX_LOW_BITS or (low_bits and _MODES[mode] != "rice"):
        raise RemoteProtocolError(f"position code {mode} with {low_bits} low bits does not exist")
    raw = np.frombuffer(data, np.uint8)
    if mode == 0:
        _require_size(raw.size, 4 * count)
        positions = raw.view("<i4").astype(np.int64)
    elif mode == 1:
        _require_size(raw.size, ceil_div(numel, 8))
        positions = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
    elif mode == 3:
        positions = _gaps_decode(data, count)
    else:
        positions = _rice_decode(raw, low_bits, count, numel)
    return check_positions(positions, count, numel)


def check_positions(positions: Positions, count: int, numel: int) -> Positions:
    """Refuse positions that are not ``count`` strictly increasing numbers in [0, numel)."""
    if positions.size != count:
        raise RemoteProtocolError(f"{positions.size} positions came where {count} were due")
    # Compared, not subtracted: a difference of hostile numbers may wrap around.
    rising = bool((positions[1:] > positions[:-1]).all())
    if count and (positions[0] < 0 or positions[-1] >= numel or not rising):
        raise RemoteProtocolError(f"positions are not strictly increasing within [0, {numel})")
    return positions


def _gaps_encode(gaps: Positions) -> bytes:
    """A byte per gap, the long ones in four more after all the bytes, under zstd."""
    short = np.minimum(gaps, _LONG_GAP).astype(np.uint8)
    long = gaps[gaps >= _LONG_GAP].astype("<u4")
    return zstandard.ZstdCompressor(level=1).compress(short.tobytes() + long.tobytes())


def _gaps_decode(data: memoryview, count: int) -> Positions:
    raw = np.frombuffer(decompress(data, 5 * count), np.uint8)
    if raw.size < count:
        raise RemoteProtocolError(f"{raw.size} bytes cannot be {count} gaps")
    gaps = raw[:count].astype(np.int64)
    long = np.flatnonzero(gaps == _LONG_GAP)
    _require_size(raw.size, count + 4 * long.size)
    gaps[long] = raw[count:].view("<u4") if long.size else 0
    return np.cumsum(gaps + 1) - 1


def decompress(data: memoryview, limit: int) -> bytes:
    """A zstd frame from outside that declares at most ``limit`` bytes. Raises RemoteProtocolError."""
    try:
        declared = zstandard.frame_content_size(data)
        if not 0 <= declared <= limit:
            raise RemoteProtocolError(f"a zstd frame declares {declared} bytes; at most {limit} can follow")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"broken zstd frame: {error}") from None


def _require_size(have: int, want: int) -> None:
    if have != want:
        raise RemoteProtocolError(f"positions take {want} bytes but {have} came")


def _rice_size(gaps: Positions, low_bits: int) -> int:
    return ceil_div(gaps.size + int((gaps >> low_bits).sum()), 8) + low_bits * ceil_div(gaps.size, 8)


def _best_low_bits(gaps: Positions, numel: int) -> tuple[int, int]:
    """The number of low bits that makes the shortest code, counted exactly, and its size in bytes."""
    sizes = {low_bits: _rice_size(gaps, low_bits) for low_bits in rice_low_bits(gaps.size, numel)}
    best = min(sizes, key=lambda low_bits: sizes[low_bits])
    return best, sizes[best]


def _rice_encode(gaps: Positions, low_bits: int) -> bytes:
    if gaps.size == 0:
        return b""
    stops = np.cumsum((gaps >> low_bits) + 1) - 1
    unary = np.zeros(int(stops[-1]) + 1, np.uint8)
    unary[stops] = 1
    planes = [np.packbits(((gaps >> bit) & 1).astype(np.uint8), bitorder="little") for bit in range(low_bits)]
    return b"".join(part.tobytes() for part in (*planes, np.packbits(unary, bitorder="little")))


def _rice_decode(raw: npt.NDArray[np.uint8], low_bits: int, count: int, numel: int) -> Positions:
    """Low-bit planes first (their size is known), then the unary stream, which takes the rest."""
    plane = ceil_div(count, 8)
    if raw.size < low_bits * plane:
        raise RemoteProtocolError(f"{raw.size} bytes cannot hold {low_bits} bit planes of {count} positions")
    gaps = np.zeros(count, np.int64)
    for bit in range(low_bits):
        bits = np.unpackbits(raw[bit * plane : (bit + 1) * plane], count=count, bitorder="little")
        gaps |= bits.astype(np.int64) << bit
    unary = np.unpackbits(raw[low_bits * plane :], bitorder="little")
    stops = np.flatnonzero(unary)
    if stops.size != count or unary.size - (int(stops[-1]) + 1 if count else 0) >= 8:
        raise RemoteProtocolError(f"the unary stream holds {stops.size} positions, not {count}, or does not end there")
    gaps += (np.diff(stops, prepend=-1) - 1) << low_bits
    return np.cumsum(gaps + 1) - 1
