"""Weights by range: from a folder and from a server, sharded or not, through broken connections."""

from __future__ import annotations

import json
import weakref

import numpy as np
import pytest
from tests.kits.range_server import serving

from fusionllm.errors import CheckpointError
from fusionllm.store import ranges
from fusionllm.store.manifest import TensorEntry
from fusionllm.store.ranges import HttpBytes
from fusionllm.store.tensorfile import Blob, Reading, write_tensors
from fusionllm.store.weights import INDEX, SINGLE, WeightFolder, tensor_hash, write_folder

ARRAYS = {f"layer.{i}": np.arange(i, i + 5000, dtype=np.float32).reshape(50, 100) for i in range(4)}


@pytest.fixture(params=["single", "sharded"])
def folder(tmp_path, request):
    blobs = {name: Blob.from_numpy(array) for name, array in ARRAYS.items()}
    if request.param == "single":
        write_tensors(tmp_path / SINGLE, blobs)
        return tmp_path
    names = [*blobs]
    files = {f"model-{k + 1:05d}-of-00002.safetensors": names[2 * k : 2 * k + 2] for k in range(2)}
    for file, own in files.items():
        write_tensors(tmp_path / file, {n: blobs[n] for n in own})
    index = {"metadata": {"total_size": 1}, "weight_map": {n: f for f, own in files.items() for n in own}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(ranges, "FIRST_PAUSE_S", 0.0)


def same(found: WeightFolder) -> None:
    assert set(found.names) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert found.spec(name) == ("float32", (50, 100))
        assert np.array_equal(found.read(name).numpy(), array)
        assert tensor_hash(found.read(name)) == tensor_hash(Blob.from_numpy(array))


def test_a_folder_on_disk(folder):
    same(WeightFolder(folder))


def test_a_folder_on_a_server(folder):
    with serving(folder) as server:
        same(WeightFolder(server.url))


def test_only_the_tensors_asked_for_cross_the_wire(folder):
    with serving(folder) as server:
        WeightFolder(server.url).read("layer.1")
        assert 20_000 <= server.num_bytes < 22_000  # one tensor and headers


def test_a_broken_download_goes_on_where_it_broke(folder):
    with serving(folder) as server:
        server.break_after = 7_000
        found = WeightFolder(server.url)
        assert np.array_equal(found.read("layer.2").numpy(), ARRAYS["layer.2"])
        assert server.num_bytes < 22_000  # nothing was sent twice
        starts = [start for _, start, _ in server.requests[-3:]]
        assert starts[1] - starts[0] == starts[2] - starts[1] == 7_000


def test_a_busy_server_is_asked_again(folder):
    with serving(folder) as server:
        found = WeightFolder(server.url)
        server.fail_next = 3
        assert np.array_equal(found.read("layer.0").numpy(), ARRAYS["layer.0"])
        server.fail_next = 50
        with pytest.raises(CheckpointError, match="after 5 tries: 503"):
            found.read("layer.0")


def test_a_file_that_changes_meanwhile_is_refused(folder):
    with serving(folder) as server:
        found = WeightFolder(server.url)
        name = next(name for name in ("layer.0", SINGLE) if name in found.names)
        found.spec(name)
        for path in folder.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        with pytest.raises(CheckpointError, match="changed on the server"):
            found.read(name)


def test_a_server_without_ranges_is_refused(folder):
    with serving(folder) as server:
        server.ignore_ranges = True
        with pytest.raises(CheckpointError, match="does not send ranges"):
            WeightFolder(server.url)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "x.bin", "a/b.safetensors"])
def test_an_index_names_files_beside_it_only(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="no name of a file beside it"):
        WeightFolder(tmp_path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=SINGLE):
        WeightFolder(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(CheckpointError, match="is missing"):
        WeightFolder(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="not an index"):
        WeightFolder(tmp_path)
    with pytest.raises(CheckpointError, match="not an http"):
        HttpBytes("file:///etc/passwd")


@pytest.mark.parametrize("limit", [1, 45_000, 1 << 30])
def test_a_folder_is_written_with_one_tensor_in_memory(tmp_path, limit):
    alive: list[weakref.ref] = []
    most = 0

    def read(name: str) -> Blob:
        nonlocal most
        array = ARRAYS[name].copy()
        alive.append(weakref.ref(array))
        most = max(most, sum(one() is not None for one in alive))
        return Blob("float32", array.shape, array)

    specs = {name: TensorEntry(dtype="float32", shape=array.shape, file="") for name, array in ARRAYS.items()}
    write_folder(tmp_path, specs, Reading(specs, read), limit)
    assert most <= 2  # the one before goes when this one is written
    found = WeightFolder(tmp_path)
    assert len({path.name for path in tmp_path.glob("*.safetensors")}) == {1: 4, 45_000: 2, 1 << 30: 1}[limit]
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.read(name).numpy(), array)
