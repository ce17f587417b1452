"""Rows of flags as bytes, near their entropy: the entropy coder of ``klt-ec``. Numpy only, no loop over elements.

Flags that are set with about the same probability are coded together, as the Rice-coded gaps between the rarer kind
(``positions.py``): within a few percent of the entropy of independent flags. Integers become three such rows: whether
each is zero, its sign, and its magnitude in unary, which is optimal for the geometric tail that quantised
coefficients have.

Some rows (tokens) are busier than others, in neighbouring columns alike. So a flag's probability is its column's,
moved up or down by what the columns before held in that row; both sides know that when they come to it. It saves a
fifth of the flags' bits. Everything read is hostile: what is allocated is in proportion to the bytes that came and
the integers that are due.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fusionllm.compress.positions import Positions, decode_positions, encode_positions
from fusionllm.errors import RemoteProtocolError

Integers = npt.NDArray[np.signedinteger[Any]]
Flags = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.float64]
Classes = npt.NDArray[np.uint8]
#: Edges between classes of probability, of a nonzero and of a magnitude going on. A class costs some bytes in each
#: message, and flags of different probability in one class cost bits: these lose under 2 % of either.
NONZERO_EDGES = np.array([0.006, 0.015, 0.03, 0.06, 0.11, 0.18, 0.28, 0.4, 0.6, 0.75, 0.88])
LONGER_EDGES = np.array([0.1, 0.25, 0.42, 0.6, 0.78, 0.9])
#: Per class of nonzeros, how many of 1024 are; the geometric middle between its edges.
_NONZEROS_OF_1024 = np.array([2, 10, 22, 44, 84, 145, 233, 346, 512, 692, 834, 968])
#: A row's recent nonzeros in percent of what its columns' classes let expect: each of these moves the class by one.
_BUSY_PERCENT = np.array([50, 70, 90, 112, 140, 190])
#: Columns count by 3/4 less for each further one; half a nonzero is believed before any is seen.
_FORGET_SHIFT, _PRIOR = 2, 512
#: Magnitudes above are the sender's to clip.
MAX_MAGNITUDE = 1 << 12
_MAX_NUMBER_BYTES = 6


class Reader:
    """Takes numbers and bytes off a buffer from outside. Raises RemoteProtocolError at its end."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, num_bytes: int) -> memoryview:
        part = self._data[self._at : self._at + num_bytes]
        if part.nbytes != num_bytes:
            raise RemoteProtocolError(f"a part of {num_bytes} bytes begins {part.nbytes} bytes before the end")
        self._at += num_bytes
        return part

    def number(self, limit: int) -> int:
        """A number in 0 .. limit."""
        number = 0
        for place in range(_MAX_NUMBER_BYTES):
            byte = self.take(1)[0]
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                break
        else:
            raise RemoteProtocolError(f"a number goes on after {_MAX_NUMBER_BYTES} bytes")
        if number > limit:
            raise RemoteProtocolError(f"a number is {number} where at most {limit} can be")
        return number

    def end(self) -> None:
        if self._at != self._data.nbytes:
            raise RemoteProtocolError(f"{self._data.nbytes - self._at} bytes follow the end of the payload")


def write_number(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def _complement(positions: Positions, total: int) -> Positions:
    return np.flatnonzero(_mask(positions, total) == 0)


def _mask(positions: Positions, total: int) -> Flags:
    mask = np.zeros(total, np.uint8)
    mask[positions] = 1
    return mask


def _write_flags(positions: Positions, total: int) -> bytes:
    """``total`` flags by the positions of the set ones."""
    swap = 2 * positions.size > total
    rare = _complement(positions, total) if swap else positions
    mode, low_bits, data = encode_positions(rare, total, "auto")
    return bytes((mode | swap << 7, low_bits)) + write_number(rare.size) + write_number(len(data)) + data


def _read_flags(reader: Reader, total: int) -> Positions:
    """The inverse of ``_write_flags``; allocates ``total`` bytes at most."""
    head = reader.take(2)
    count, num_bytes = reader.number(total), reader.number(8 * total + 8)
    rare = decode_positions(head[0] & 0x7F, head[1], reader.take(num_bytes), count, total)
    return _complement(rare, total) if head[0] & 0x80 else rare


def _write_magnitudes(magnitudes: Integers) -> bytes:
    """Numbers from 1 on, in unary: the positions of the ends."""
    ends = np.cumsum(magnitudes) - 1
    total = int(ends[-1]) + 1 if ends.size else 0
    return write_number(total) + _write_flags(ends, total)


def _read_magnitudes(reader: Reader, count: int) -> Integers:
    total = reader.number(count * MAX_MAGNITUDE)
    head = reader.take(2)
    if head[0] & 0x80:  # only where ends are the larger part is their complement written
        if total > 2 * count:
            raise RemoteProtocolError(f"{count} magnitudes of {total} in all are written the long way round")
        others, num_bytes = reader.number(total), reader.number(8 * total + 8)
        rare = decode_positions(head[0] & 0x7F, head[1], reader.take(num_bytes), others, total)
        ends = _complement(rare, total)
    else:
        same, num_bytes = reader.number(count), reader.number(8 * total + 8)
        ends = decode_positions(head[0], head[1], reader.take(num_bytes), same, total)
    if ends.size != count or (count and ends[-1] != total - 1):
        raise RemoteProtocolError(f"{ends.size} magnitudes came where {count} were due, or they do not end at {total}")
    return np.diff(ends, prepend=-1)


class _Context:
    """Classes of the next column's flags, row by row, from the flags of the columns before. Integers throughout.

    Where ``looks`` is 0, they are the column's, whatever was before: better where all rows are alike.
    """

    def __init__(self, num_rows: int, looks: int) -> None:
        self._seen = np.zeros(num_rows, np.int64)
        self._expected, self._looks = 0, looks

    def classes(self, column_class: int) -> Classes:
        if not self._looks:
            return np.full(self._seen.shape, column_class, np.uint8)
        edges = _BUSY_PERCENT * (self._expected + _PRIOR)
        moved = np.searchsorted(edges, 100 * (self._seen + _PRIOR), side="right") - _BUSY_PERCENT.size // 2
        return (moved + column_class).clip(0, NONZERO_EDGES.size).astype(np.uint8)

    def add(self, flags: Flags, column_class: int) -> None:
        self._seen += (flags.astype(np.int64) << 10) - (self._seen >> _FORGET_SHIFT)
        self._expected += int(_NONZEROS_OF_1024[column_class]) - (self._expected >> _FORGET_SHIFT)


def _write_nonzeros(flags: Flags, column_classes: Classes, looks: int) -> bytes:
    """Flags [columns, rows]: per class, how many there are and themselves, column after column."""
    context, classes = _Context(flags.shape[1], looks), np.empty(flags.shape, np.uint8)
    for column, kind in enumerate(column_classes.tolist()):
        classes[column] = context.classes(kind)
        context.add(flags[column], kind)
    out = [bytes((looks,))]
    for kind in range(NONZERO_EDGES.size + 1):
        those = flags[classes == kind]
        out.append(write_number(those.size) + (_write_flags(np.flatnonzero(those), those.size) if those.size else b""))
    return b"".join(out)


def _read_nonzeros(reader: Reader, num_rows: int, column_classes: Classes) -> Flags:
    looks, left, streams = reader.take(1)[0], num_rows * column_classes.size, []
    if looks > 1:
        raise RemoteProtocolError(f"flags are coded in a way {looks} that does not exist")
    for _ in range(NONZERO_EDGES.size + 1):
        total = reader.number(left)
        left -= total
        streams.append(_mask(_read_flags(reader, total), total) if total else np.zeros(0, np.uint8))
    context, flags = _Context(num_rows, looks), np.empty((column_classes.size, num_rows), np.uint8)
    starts = [0] * len(streams)
    for column, kind in enumerate(column_classes.tolist()):
        classes = context.classes(kind)
        for of in np.flatnonzero(np.bincount(classes)).tolist():
            rows = np.flatnonzero(classes == of)
            part = streams[of][starts[of] : starts[of] + rows.size]
            if part.size != rows.size:
                raise RemoteProtocolError(f"the flags of class {of} end in column {column} of {column_classes.size}")
            flags[column, rows] = part
            starts[of] += rows.size
        context.add(flags[column], kind)
    if left:
        raise RemoteProtocolError(f"{left} flags of {flags.size} are missing")
    return flags


def classes_of(
    nonzeros: npt.NDArray[np.float64], sums: npt.NDArray[np.float64], num_rows: int
) -> npt.NDArray[np.uint8]:
    """Of each column, by its count of nonzeros and its sum of magnitudes: one byte that names both its classes."""
    longer = np.where(sums > 0, 1 - nonzeros / np.maximum(sums, 1), 0)
    low = np.searchsorted(NONZERO_EDGES, nonzeros / num_rows)
    return (low | np.searchsorted(LONGER_EDGES, longer) << 4).astype(np.uint8)


def write_integers(codes: Integers, classes: Classes, looks: int | None = None) -> bytes:
    """Codes [rows, columns] of magnitude up to ``MAX_MAGNITUDE`` and the class of each column -> bytes.

    Args:
        looks: 1 where a row's flags tell of its next ones, 0 where not; None: what takes less. The first byte says it.
    """
    columns = np.ascontiguousarray(codes.T)
    flags = (columns != 0).astype(np.uint8)
    low = (classes & 15).astype(np.uint8)
    ways = (0, 1) if looks is None else (looks,)
    parts = [min((_write_nonzeros(flags, low, way) for way in ways), key=len)]
    for kind in np.unique(classes >> 4):
        flat = columns[classes >> 4 == kind].reshape(-1)
        parts.append(_write_magnitudes(np.abs(flat[flat != 0])))
    flat = columns.reshape(-1)
    parts.append(np.packbits(flat[flat != 0] < 0).tobytes())
    return b"".join(parts)


def read_integers(reader: Reader, num_rows: int, classes: Classes) -> Integers:
    """The inverse of ``write_integers``. Raises RemoteProtocolError."""
    low = (classes & 15).astype(np.uint8)
    if low.size and int(low.max()) > NONZERO_EDGES.size:
        raise RemoteProtocolError(f"a column is of class {int(low.max())}; {NONZERO_EDGES.size} is the last")
    columns = _read_nonzeros(reader, num_rows, low).astype(np.int16)
    for kind in np.unique(classes >> 4):
        block = columns[classes >> 4 == kind].reshape(-1)
        block[block != 0] = _read_magnitudes(reader, int(np.count_nonzero(block)))
        columns[classes >> 4 == kind] = block.reshape(columns[classes >> 4 == kind].shape)
    flat = columns.reshape(-1)
    there = np.flatnonzero(flat)
    signs = np.frombuffer(reader.take(-(-there.size // 8)), np.uint8)
    flat[there] *= 1 - 2 * np.unpackbits(signs, count=there.size).astype(np.int16)
    return np.ascontiguousarray(flat.reshape(columns.shape).T)
