"""The weights of a model as a folder of safetensors, on a disk or on a server, read one tensor at a time.

A folder holds ``model.safetensors``, or several files and ``model.safetensors.index.json``, which says where each
tensor is; that is how model hubs keep them. Nothing is loaded whole. On the path: files -> **Blob** -> a stage.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from fusionllm.errors import CheckpointError
from fusionllm.ir.tensor import DTYPES
from fusionllm.store.manifest import TensorEntry
from fusionllm.store.ranges import ByteSource, FileBytes, HttpBytes, NoSuchFile
from fusionllm.store.tensorfile import Blob, Reading, TensorFile, write_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_NUM_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")


#: Size of a file of a written folder, as far as its tensors allow.
SHARD_NUM_BYTES = 2 << 30


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class WeightFolder:
    """Tensors of a folder by name.

    Args:
        place: a path, or an http or https address such as ``https://hub/org/model/resolve/main``.

    Raises:
        CheckpointError: there are no weights, or what is there is not whole.
    """

    def __init__(self, place: Path | str) -> None:
        self.place = str(place).rstrip("/")
        self._is_remote = self.place.startswith(("http://", "https://"))
        self._files: dict[str, TensorFile] = {}
        self._file_of = self._find()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of a tensor. Raises CheckpointError when there is none of that name."""
        return self._file(name).spec(name)

    def read(self, name: str) -> Blob:
        """One tensor. Raises CheckpointError."""
        return self._file(name).read(name)

    def _file(self, name: str) -> TensorFile:
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self.place} has no tensor {name!r} among its {len(self._file_of)}")
        return self._open(file)

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile(self._source(file))
        return self._files[file]

    def _source(self, file: str) -> ByteSource:
        return HttpBytes(f"{self.place}/{file}") if self._is_remote else FileBytes(Path(self.place) / file)

    def _find(self) -> dict[str, str]:
        """Tensor -> file."""
        try:
            index = self._read_index()
        except NoSuchFile:
            return dict.fromkeys(self._open(SINGLE).names, SINGLE)
        for name, file in index.items():
            if _FILE_NAME.fullmatch(file) is None:
                raise CheckpointError(f"{self.place}/{INDEX}: {file[:80]!r} is no name of a file beside it")
            if not self._is_remote and not (Path(self.place) / file).is_file():
                raise CheckpointError(f"{self.place}: {file} with {name!r} is missing")
        return index

    def _read_index(self) -> dict[str, str]:
        source = self._source(INDEX)
        if source.num_bytes > MAX_INDEX_NUM_BYTES:
            raise CheckpointError(f"{source.name} has {source.num_bytes} bytes, the limit is {MAX_INDEX_NUM_BYTES}")
        data = bytearray(source.num_bytes)
        source.read_into(0, memoryview(data))
        try:
            return msgspec.json.decode(data, type=_Index).weight_map
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{source.name} is not an index of tensors: {error}") from None


def write_folder(
    folder: Path, specs: Mapping[str, TensorEntry], tensors: Mapping[str, Blob], shard_num_bytes: int = SHARD_NUM_BYTES
) -> None:
    """Write tensors as a hub keeps them, one in memory at a time: one file, or several with their index.

    Args:
        specs: what the tensors are, in the order of the files.

    Raises:
        CheckpointError: the disk failed.
    """
    sizes = {name: math.prod(entry.shape) * DTYPES[entry.dtype] for name, entry in specs.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_num_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)]
    for file, names in zip(files, shards):
        write_tensors(folder / file, Reading(names, tensors.__getitem__), {"format": "pt"})
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)))


def tensor_hash(blob: Blob) -> str:
    """SHA-256 of a tensor's bytes, in hex."""
    return hashlib.sha256(memoryview(blob.data)).hexdigest()
