"""A checkpoint is whole or not there: round trips, every kind of damage, and interruption at every file "
f"operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionllm.errors import CheckpointError
from fusionllm.store.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from fusionllm.store.manifest import MANIFEST_FILE, OPTIMIZER_FILE, WEIGHTS_FILE, CheckpointMeta
from fusionllm.store.tensorfile import FILE_DTYPES, Blob, TensorFile, hash_file, write_tensors

META = CheckpointMeta(graph_hash="abc", seed=3, data_step=5, aliases={"lm_head.weight": "wte.weight"}, extra={"t": 5})


def blobs(value: int) -> tuple[dict[str, Blob], dict[str, Blob]]:
    weights = {
        "wte.weight": Blob.from_numpy(np.full((4, 3), value, np.float32)),
        "scale": Blob("bfloat16", (3,), bytes([value % 256] * 6)),
        "step": Blob.from_numpy(np.array(value, np.int64)),
        "empty": Blob.from_numpy(np.zeros((0, 7), np.float16)),
    }
    return weights, {"exp_avg/wte.weight": Blob.from_numpy(np.full((4, 3), -value, np.float32))}


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save(folder: Path, step: int, **options: int) -> Path:
    return save_checkpoint(folder, step, *blobs(step), META, **options)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Blob]:
    names = draw(st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=6))
    found = {}
    for name in names:
        dtype = draw(st.sampled_from(sorted(FILE_DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        blob = Blob(dtype, shape, b"")
        data = draw(st.binary(min_size=blob.num_bytes, max_size=blob.num_bytes))
        found[name] = Blob(dtype, shape, data if dtype != "bool" else bytes(b & 1 for b in data))
    return found


@settings(max_examples=60)
@given(tensors())
def test_any_tensors_round_trip_and_the_library_agrees(tmp_path_factory, found):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path_factory.mktemp("file") / "t.safetensors"
    written = write_tensors(path, found)
    assert hash_file(path) == written
    file = TensorFile(path)
    assert file.names == tuple(sorted(found))
    for name, blob in found.items():
        read = file.read(name)
        assert (read.dtype, read.shape, bytes(read.data)) == (blob.dtype, blob.shape, bytes(blob.data))
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert {n: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in theirs.items()} == {
        n: (FILE_DTYPES[b.dtype], b.shape, bytes(b.data)) for n, b in found.items()
    }


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_file_is_refused_or_reads_as_itself(tmp_path_factory, data):
    """Cut anywhere, or with any byte of the header changed: CheckpointError or a consistent file, nothing "
    f"else."""
    path = tmp_path_factory.mktemp("file") / "t.safetensors"
    write_tensors(path, blobs(7)[0])
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
        path.write_bytes(raw)
        with pytest.raises(CheckpointError):
            TensorFile(path)
        return
    header = 8 + int.from_bytes(raw[:8], "little")
    raw[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        file = TensorFile(path)
        for name in file.names:
            assert len(file.read(name).data) == file.read(name).num_bytes
    except CheckpointError:
        pass


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [99999999999], "data_offsets": [0, 399999999996]}}',
        b'{"a": [1]}',
        b"[" * 50000,
    ],
)
def test_hostile_headers(tmp_path, header):
    (tmp_path / "t").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(CheckpointError):
        TensorFile(tmp_path / "t")


def test_a_hostile_length_allocates_nothing(tmp_path):
    (tmp_path / "t").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="cut short or not a safetensors file"):
        TensorFile(tmp_path / "t")


def test_save_and_load(tmp_path):
    path = save(tmp_path, 5)
    assert path == tmp_path / "step-00000005"
    for opened in (load_checkpoint(tmp_path), load_checkpoint(path), load_checkpoint(tmp_path, step=5)):
        assert opened.manifest.step == 5
        assert opened.manifest.meta == META
        assert (opened.read_weight("wte.weight").numpy() == 5).all()
        assert opened.read_weight("lm_head.weight").shape == (4, 3)  # tied: the alias reads the stored one
        assert opened.read_weight("scale").numpy().dtype == np.uint16
        assert opened.read_weight("step").numpy() == 5
        assert opened.read_weight("empty").shape == (0, 7)
        array = opened.read_optimizer("exp_avg/wte.weight").numpy()
        array += 1  # memory of its own
        opened.verify()
        opened.require(graph_hash="abc", data_fingerprint="")
    assert listing(path) == sorted([MANIFEST_FILE, OPTIMIZER_FILE, WEIGHTS_FILE])


def test_equal_states_give_equal_files(tmp_path):
    first, second = save(tmp_path / "a", 5), save(tmp_path / "b", 5)
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in listing(first))


def test_the_last_few_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep_last=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3, 10]
    save(tmp_path, 4, keep_last=1)  # after a rewind the newly saved one stays
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4]


def test_saving_a_step_again_makes_a_revision(tmp_path):
    save(tmp_path, 5)
    weights, optimizer = blobs(99)
    path = save_checkpoint(tmp_path, 5, weights, optimizer, META)
    assert path.name == "step-00000005-r2"
    assert (load_checkpoint(tmp_path).read_weight("wte.weight").numpy() == 99).all()
    assert listing(tmp_path) == ["step-00000005-r2"]


KILLER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from fusionllm.store.checkpoint import save_checkpoint
from fusionllm.store.manifest import CheckpointMeta
from fusionllm.store.tensorfile import Blob

WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

def save(folder, step, die_at):
    count = 0
    def audit(event, args):
        nonlocal count
        count += event in WATCHED
        if event in WATCHED and count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(audit)
    blob = Blob.from_numpy(np.full(8, step, np.float32))
    save_checkpoint(folder, step, {"w": blob}, {"m/w": blob}, CheckpointMeta(graph_hash="", seed=0,
    data_step=0), keep_last=1)

for die_at in range(1, 60):
    for step, limit in ((1, 0), (2, die_at)):
        child = os.fork()
        if child == 0:
            save(Path(sys.argv[1]) / str(die_at), step, limit)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
    if status == 0:
        break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_save_killed_at_any_file_operation_damages_nothing(tmp_path):
    """Each folder had step 1 saved whole, then step 2 killed before its n-th file operation."""
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path)], check=True, timeout=120)
    folders = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    steps = []
    for folder in folders:
        opened = load_checkpoint(folder)
        opened.verify()
        steps.append(opened.manifest.step)
        assert (opened.read_weight("w").numpy() == opened.manifest.step).all()
        save(folder, 3, keep_last=1)
        assert listing(folder) == ["step-00000003"]  # what the killed save left behind is gone
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
    assert len(steps) > 10


def test_missing(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_checkpoint(tmp_path / "none")
    save(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6 in .*; there are those of step 5"):
        load_checkpoint(tmp_path, step=6)
    opened = load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no weight 'nope' among its 4"):
        opened.read_weight("nope")
    with pytest.raises(CheckpointError, match="no optimizer tensor 'exp_avg/nope'"):
        opened.read_optimizer("exp_avg/nope")


def test_another_model_or_other_data(tmp_path):
    save(tmp_path, 5)
    opened = load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another model: its graph is abc, this run's is xyz"):
        opened.require(graph_hash="xyz")
    with pytest.raises(CheckpointError, match="made with other data"):
        opened.require(graph_hash="abc", data_fingerprint="other")


def test_damage_names_the_file_and_the_way_out(tmp_path):
    save(tmp_path, 4)
    path = save(tmp_path, 5)
    weights = path / WEIGHTS_FILE
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"weights.safetensors was damaged.*another of step 4: export it"):
        load_checkpoint(tmp_path).verify()
    weights.write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match=r"weights.safetensors has .* bytes, the manifest says"):
        load_checkpoint(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"weights.safetensors is missing"):
        load_checkpoint(tmp_path)


def test_weights_alone_are_read_beside_a_damaged_file_of_the_optimizer(tmp_path, caplog):
    path = save(tmp_path, 5)
    with (path / OPTIMIZER_FILE).open("r+b") as file:
        file.truncate(9)
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors has 9 bytes"):
        load_checkpoint(tmp_path)
    assert not caplog.records
    opened = load_checkpoint(tmp_path, weights_only=True)
    assert "optimizer.safetensors has 9 bytes" in caplog.text
    assert (opened.read_weight("wte.weight").numpy() == 5).all()
    opened.verify()
    (path / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"weights.safetensors is missing"):
        load_checkpoint(tmp_path, weights_only=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "is of format .*2.*this release reads"),
        ({"format": "other"}, "is of format .*other"),
        ({"step": "five"}, "torn or not a checkpoint's manifest"),
        ({"files": {"../../etc/passwd": {"num_bytes": 1, "xxh3_128": ""}}}, "lists files of other names"),
        (
            {"weights": {"w": {"dtype": "float32", "shape": [1], "file": "/etc/passwd"}}},
            "a file it does not list",
        ),
        ({"weights": {"step": {"dtype": "int64", "shape": [1], "file": WEIGHTS_FILE}}}, "the manifest says"),
    ],
)
def test_hostile_manifests(tmp_path, change, message):
    manifest = save(tmp_path, 5) / MANIFEST_FILE
    manifest.write_bytes(msgspec.json.encode({**msgspec.json.decode(manifest.read_bytes()), **change}))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_torn_manifest(tmp_path):
    manifest = save(tmp_path, 5) / MANIFEST_FILE
    for raw in (manifest.read_bytes()[:50], b"", b"[]", b"[" * 100000):
        manifest.write_bytes(raw)
        with pytest.raises(CheckpointError, match="manifest"):
            load_checkpoint(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_bad_tensors_are_refused_and_leave_nothing(tmp_path):
    for blob in (Blob("float32", (2,), b"1234"), Blob("complex64", (1,), b"12345678")):
        with pytest.raises(CheckpointError, match="tensor 'w'"):
            save_checkpoint(tmp_path, 1, {"w": blob}, {}, META)
    assert listing(tmp_path) == []
