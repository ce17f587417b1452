"""One safetensors file: written in a single pass with its hash, read one tensor at a time.

The format is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}},
and the raw bytes. We write and read it ourselves because numpy has no bfloat16, because a node that holds no
tensor framework must be able to check a file, and because the library's framework-free call takes raw
pointers in its newest releases and bytes in the older ones. Any safetensors reader opens what this writes,
and the tests prove it.

A tensor is read into memory of its own, not mapped: a mapped file that is cut short by someone else kills the
process with a bus error. Knows no checkpoint. On the path: **Blob** <-> file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from fusionllm.errors import CheckpointError
from fusionllm.ir.tensor import DTYPES
from fusionllm.store.ranges import ByteSource, FileBytes

#: Our dtype names and those of the file format.
FILE_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_OUR_DTYPES = {theirs: ours for ours, theirs in FILE_DTYPES.items()}

#: The limit of the safetensors library, so that a hostile length cannot make us allocate.
MAX_HEADER_NUM_BYTES = 100_000_000
_CHUNK_NUM_BYTES = 1 << 22


@dataclass(frozen=True)
class Blob:
    """A tensor as dtype, shape and raw little-endian bytes in row-major order, of no framework.

    Attributes:
        dtype: a name of ``ir.tensor.DTYPES``.
        shape: integers, outermost first.
        data: bytes, bytearray, memoryview or a C-contiguous array; ``num_bytes`` long.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype]

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> Blob:
        """A blob over the array's memory (copied only when it is not contiguous)."""
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(array.dtype.name, array.shape, little.reshape(-1).view(np.uint8))

    def numpy(self) -> np.ndarray:
        """An array over the same bytes; bfloat16, which numpy lacks, comes as uint16 of the same bits."""
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        return np.frombuffer(self.data, dtype=dtype).reshape(self.shape)

    def as_dtype(self, dtype: str) -> Blob:
        """The same values, rounded to nearest even, in another floating-point type."""
        if dtype == self.dtype:
            return self
        if self.dtype == "bfloat16":  # numpy has none: the upper half of a float32
            wide = (self.numpy().astype(np.uint32) << 16).view(np.float32)
            return Blob.from_numpy(wide).as_dtype(dtype)
        if dtype != "bfloat16":
            return Blob.from_numpy(self.numpy().astype(dtype))
        bits = self.numpy().astype(np.float32).view(np.uint32)
        short = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        short[np.isnan(bits.view(np.float32))] = 0x7FC0
        return Blob("bfloat16", self.shape, Blob.from_numpy(short).data)


class Reading(Mapping[str, Blob]):
    """Tensors by name that are read when they are looked at."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Blob]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Blob:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Written:
    """What a written file is: its size in bytes and the xxh3-128 hash of all of them, in hex."""

    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class _Place:
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def write_tensors(path: Path, tensors: Mapping[str, Blob], metadata: Mapping[str, str] | None = None) -> Written:
    """Write a new safetensors file and flush it to the disk.

    Args:
        tensors: looked at one after the other and twice, so that those read when asked for need the memory of one.
        metadata: texts for the header, e.g. ``{"format": "pt"}``, which some readers want.

    Raises:
        CheckpointError: a blob's bytes do not fit its dtype and shape, or the disk failed.
    """
    # Wide dtypes first, then by name: every tensor is aligned, and equal tensors give equal files.
    specs = {name: (blob.dtype, tuple(blob.shape)) for name, blob in tensors.items()}
    names = sorted(tensors, key=lambda name: (-DTYPES.get(specs[name][0], 0), name))

    def parts() -> Iterator[memoryview]:
        yield memoryview(_header(specs, names, metadata))
        for name in names:
            yield _bytes_of(name, tensors[name])

    digest = xxhash.xxh3_128()
    num_bytes = 0
    try:
        with path.open("xb") as file:
            for part in parts():
                file.write(part)
                digest.update(part)
                num_bytes += len(part)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        ) from error
    return Written(num_bytes, digest.hexdigest())


def _header(
    specs: Mapping[str, tuple[str, tuple[int, ...]]], names: list[str], metadata: Mapping[str, str] | None
) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name in names:
        dtype, shape = specs[name]
        if dtype not in DTYPES or name == "__metadata__":
            raise CheckpointError(f"tensor {name!r} of dtype {dtype!r} cannot be stored")
        end = offset + math.prod(shape) * DTYPES[dtype]
        entries[name] = {"dtype": FILE_DTYPES[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(name: str, blob: Blob) -> memoryview:
    view = memoryview(blob.data)
    if view.nbytes != blob.num_bytes or not view.c_contiguous:
        raise CheckpointError(
            f"tensor {name!r} is {blob.dtype}{list(blob.shape)}, so {blob.num_bytes} bytes, but "
            f"{view.nbytes} were given"
        )
    return view.cast("B") if view.nbytes else memoryview(b"")


class TensorFile:
    """A safetensors file opened for reading; the header is checked in full, the tensors are read when asked
    for.

    Attributes:
        path: the file's name, for messages.
        names: its tensors, sorted.
    """

    def __init__(self, path: Path | ByteSource) -> None:
        """Read and check the header.

        Raises:
            CheckpointError: missing, cut short, or not a safetensors file.
        """
        self._source = FileBytes(path) if isinstance(path, Path) else path
        self.path = self._source.name
        self._places, self._data_start = _read_header(self._source)
        self.names = tuple(sorted(self._places))

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of a tensor. Raises CheckpointError when there is none of that name."""
        place = self._place(name)
        return place.dtype, place.shape

    def read(self, name: str) -> Blob:
        """One tensor, in memory of its own that may be written to.

        Raises:
            CheckpointError: no tensor of that name, or the file changed since it was opened.
        """
        place = self._place(name)
        data = bytearray(place.num_bytes)
        self._source.read_into(self._data_start + place.start, memoryview(data))
        return Blob(place.dtype, place.shape, data)

    def _place(self, name: str) -> _Place:
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{self.path}: no tensor {name!r} among its {len(self._places)}")
        return place


def _read_header(source: ByteSource) -> tuple[dict[str, _Place], int]:
    size, path = source.num_bytes, source.name
    prefix = bytearray(min(size, 8))
    source.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_NUM_BYTES):
        raise CheckpointError(f"{path}: {size} bytes with a header of {length}: cut short or not a safetensors file")
    header = bytearray(length)
    source.read_into(8, memoryview(header))
    try:
        entries = msgspec.json.decode(header, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON: {error}") from None
    entries.pop("__metadata__", None)
    places = {name: _read_place(path, name, entry) for name, entry in entries.items()}
    end = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if place.start != end:
            raise CheckpointError(f"{path}: tensor {name!r} starts at byte {place.start}, the one before ends at {end}")
        end += place.num_bytes
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path}: {size} bytes, but its header describes {8 + length + end}; it was cut or changed"
        )
    return places, 8 + length


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_place(path: str, name: str, raw: Any) -> _Place:
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: header entry of {name!r}: {error}") from None
    dtype = _OUR_DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {entry.dtype!r}; known: {', '.join(_OUR_DTYPES)}")
    start, end = entry.data_offsets
    num_bytes = math.prod(entry.shape) * DTYPES[dtype]
    if start < 0 or min(entry.shape, default=0) < 0 or end - start != num_bytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} is {dtype}{list(entry.shape)}, so {num_bytes} bytes, but has bytes "
            f"{start} to {end}"
        )
    return _Place(dtype, entry.shape, start, num_bytes)


def hash_file(path: Path) -> Written:
    """Size and hash of a file. Raises CheckpointError when it cannot be read."""
    digest = xxhash.xxh3_128()
    num_bytes = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_NUM_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return Written(num_bytes, digest.hexdigest())
