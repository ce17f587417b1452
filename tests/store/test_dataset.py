"""The order of the data is a pure function; nothing is lost, doubled or shared between the splits."""

from __future__ import annotations

import hashlib
import math
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionllm.errors import UserError
from fusionllm.ir.tensor import TensorSpec
from fusionllm.store.dataset import DataConfig, Dataset, epoch_order, num_val_rows, open_dataset
from fusionllm.store.tokens import open_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "data"


def numbered(num_rows: int, *, seed: int = 0, val_fraction: float = 0.0) -> Dataset:
    """A dataset whose row i holds the number i."""
    rows = [{"x": np.array([i, i], dtype=np.int32)} for i in range(num_rows)]
    config = DataConfig(val_fraction=val_fraction)
    return open_dataset(config, seed=seed, base_dir=Path(), obj=rows)


def ids(batches: list[dict[str, np.ndarray]]) -> list[int]:
    return [int(i) for batch in batches for i in batch["x"][:, 0]]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    num_rows = draw(st.integers(1, 60))
    global_batch = draw(st.integers(1, num_rows))
    return num_rows, global_batch, draw(st.integers(1, global_batch + 3))


@given(shapes(), st.integers(0, 2**64 - 1), st.integers(0, 3))
def test_an_epoch_shows_every_row_once(shape, seed, epoch):
    num_rows, global_batch, microbatch_size = shape
    data = numbered(num_rows, seed=seed)
    steps = data.steps_per_epoch(global_batch)
    assert steps == math.ceil(num_rows / global_batch)
    seen: list[int] = []
    for step in range(epoch * steps, (epoch + 1) * steps):
        batches = data.microbatches(step, global_batch=global_batch, microbatch_size=microbatch_size)
        sizes = [len(batch["x"]) for batch in batches]
        short = step == (epoch + 1) * steps - 1
        expected = num_rows - (steps - 1) * global_batch if short else global_batch
        assert sum(sizes) == expected
        assert len(sizes) == math.ceil(expected / microbatch_size)
        assert all(0 < size <= microbatch_size for size in sizes)
        assert all(size == microbatch_size for size in sizes[:-1])
        seen += ids(batches)
    assert sorted(seen) == list(range(num_rows))


@given(shapes(), st.integers(0, 99), st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_order_is_a_pure_function_of_seed_and_step(shape, seed, steps):
    num_rows, global_batch, microbatch_size = shape
    used, sizes = numbered(num_rows, seed=seed), {"global_batch": global_batch}
    for step in steps:  # any walk gives what a fresh dataset gives, at any microbatch size
        fresh = numbered(num_rows, seed=seed).microbatches(step, **sizes, microbatch_size=global_batch)
        assert ids(used.microbatches(step, **sizes, microbatch_size=microbatch_size)) == ids(fresh)


def test_the_order_is_pinned():
    """Resumed runs, other machines and later versions must see the same rows."""
    assert epoch_order(7, 0, 10).tolist() == PINNED[0]
    assert epoch_order(7, 1, 10).tolist() == PINNED[1]
    assert not np.array_equal(epoch_order(1, 0, 50), epoch_order(2, 0, 50))


PINNED = ([8, 4, 1, 6, 3, 2, 7, 5, 9, 0], [3, 9, 1, 6, 2, 5, 4, 8, 0, 7])


@given(st.integers(2, 80), st.floats(0, 0.99), st.integers(1, 9), st.integers(0, 5))
def test_splits_are_disjoint_and_complete(num_rows, val_fraction, batch_size, seed):
    data = numbered(num_rows, seed=seed, val_fraction=val_fraction)
    train = ids(data.microbatches(0, global_batch=data.num_rows, microbatch_size=batch_size))
    batches = list(data.val_batches(batch_size))
    val = ids(batches)
    assert len(train) == data.num_rows >= 1
    assert len(val) == data.num_val_rows == num_val_rows(num_rows, val_fraction)
    assert sorted(train) + val == list(range(num_rows))  # one block at the end, in order
    assert all(len(batch["x"]) == batch_size for batch in batches[:-1])
    assert val == ids(list(data.val_batches(batch_size)))
    assert ids(list(data.val_batches(batch_size, 2))) == val[: 2 * batch_size]
    assert bool(val) == (val_fraction > 0)


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=8), st.integers(2, 16))
def test_packed_bytes_are_the_texts_in_order(texts, seq_len):
    flat = b"\xff".join(text.encode() for text in texts)  # 0xff, in no UTF-8 text, stands for end
    config = DataConfig(tokenizer="bytes+eos", seq_len=seq_len, val_fraction=0)
    if len(flat) < seq_len:
        with pytest.raises(UserError, match="fewer than one row"):
            open_dataset(config, seed=0, base_dir=Path(), obj=texts)
        return
    data = open_dataset(config, seed=0, base_dir=Path(), obj=texts)
    assert data.num_rows == len(flat) // seq_len
    (batch,) = data.microbatches(0, global_batch=data.num_rows, microbatch_size=data.num_rows)
    rows = batch["input_ids"][np.argsort(data.step_rows(0, data.num_rows))].reshape(-1)
    assert rows.dtype == np.int64
    assert bytes(255 if i == 256 else i for i in rows.tolist()) == flat[: len(rows)]
    assert np.array_equal(batch["labels"], batch["input_ids"])
    assert data.columns == {
        "input_ids": TensorSpec("int64", (seq_len,)),
        "labels": TensorSpec("int64", (seq_len,)),
    }
    assert data.vocab_size == 257
    assert data.decode(data.encode(texts[0])) == texts[0]


def test_shipped_text_and_tokenizer():
    config = DataConfig(source="shakespeare.txt", tokenizer="tokenizer.json", seq_len=64)
    data = open_dataset(config, seed=3, base_dir=EXAMPLES)
    assert data.vocab_size == 2048
    assert data.num_rows + data.num_val_rows > 5000
    line = "To be, or not to be: that is the question:"
    assert data.decode(data.encode(line)) == line
    batch = data.microbatches(0, global_batch=4, microbatch_size=4)[0]
    assert batch["input_ids"].shape == (4, 64)
    assert 0 <= batch["input_ids"].min() <= batch["input_ids"].max() < 2048
    again = open_dataset(config, seed=3, base_dir=EXAMPLES)
    assert again.fingerprint == data.fingerprint
    assert open_dataset(config, seed=4, base_dir=EXAMPLES).fingerprint != data.fingerprint


def test_shipped_files_are_those_of_the_readme():
    readme = (EXAMPLES / "README.md").read_text()
    for name in ("shakespeare.txt", "tokenizer.json"):
        assert hashlib.sha256((EXAMPLES / name).read_bytes()).hexdigest() in readme


def test_a_hub_dataset_is_loaded_by_its_splits(tmp_path, monkeypatch):
    """From a folder of files instead of the hub: the same call, without a network."""
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for split, letter in (("train", "a"), ("validation", "b")):
        (tmp_path / "set" / f"{split}.jsonl").write_text(f'{{"text": "{letter * 40}"}}\n' * 3)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    source = f"hf:{tmp_path / 'set'}"
    data = open_dataset(DataConfig(source=source, val_source=source, seq_len=8), seed=0, base_dir=tmp_path)
    assert (data.num_rows, data.num_val_rows) == (15, 15)
    assert {int(i) for batch in data.val_batches(8) for i in batch["input_ids"].flat} == {ord("b")}


def test_folder_joins_documents_in_name_order_with_end_of_text(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("BB")
    (tmp_path / "a.md").write_text("AA")
    (tmp_path / "sub" / "c.jsonl").write_text('{"text": "CC"}\n\n{"text": "DD"}\n')
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "image.png").write_bytes(b"\xff\xfe")
    config = DataConfig(source=str(tmp_path), tokenizer="bytes+eos", seq_len=11, val_fraction=0)
    data = open_dataset(config, seed=0, base_dir=Path())
    row = data.microbatches(0, global_batch=1, microbatch_size=1)[0]["input_ids"][0].tolist()
    assert row == [65, 65, 256, 66, 66, 256, 67, 67, 256, 68, 68]


def test_val_source_is_used_instead_of_a_split(tmp_path):
    (tmp_path / "train.txt").write_text("a" * 40)
    (tmp_path / "val.txt").write_text("b" * 20)
    config = DataConfig(source="train.txt", val_source="val.txt", seq_len=4)
    data = open_dataset(config, seed=0, base_dir=tmp_path)
    assert (data.num_rows, data.num_val_rows) == (10, 5)
    assert {int(i) for batch in data.val_batches(2) for i in batch["input_ids"].flat} == {ord("b")}


def test_python_source_gives_rows_of_arrays(tmp_path):
    (tmp_path / "my_rows_abc.py").write_text(
        "import numpy as np\n"
        "def rows():\n"
        "    return [{'pixels': np.full((2, 3), i, np.float32), 'label': i, 'w': 0.5} for i in range(7)]\n"
    )
    config = DataConfig(source="python:my_rows_abc:rows", val_fraction=0.3)
    before = list(sys.path)
    data = open_dataset(config, seed=0, base_dir=tmp_path)
    assert sys.path == before
    assert data.columns == {
        "pixels": TensorSpec("float32", (2, 3)),
        "label": TensorSpec("int64", ()),
        "w": TensorSpec("float32", ()),
    }
    assert data.vocab_size is None
    sizes = [len(b["label"]) for b in data.microbatches(1, global_batch=3, microbatch_size=2)]
    assert sizes == [2]  # 5 training rows in batches of 3: the second step has two
    with pytest.raises(UserError, match="no tokenizer"):
        data.decode([1])
    with pytest.raises(UserError, match="has no function 'row'; did you mean rows"):
        open_dataset(DataConfig(source="python:my_rows_abc:row"), seed=0, base_dir=tmp_path)


def test_hugging_face_dataset_object():
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"body": ["hello " * 20, "world " * 20], "n": [1, 2]})
    data = open_dataset(DataConfig(text_column="body", seq_len=8), seed=0, base_dir=Path(), obj=texts)
    assert data.num_rows + data.num_val_rows == 30
    with pytest.raises(UserError, match=r"no text in column 'text'; its columns are 'body', 'n'.*'body'"):
        open_dataset(DataConfig(), seed=0, base_dir=Path(), obj=texts)
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]})
    data = open_dataset(DataConfig(val_fraction=0), seed=0, base_dir=Path(), obj=rows)
    assert data.columns == {"input_ids": TensorSpec("int64", (2,)), "labels": TensorSpec("int64", ())}


BAD_SOURCES = [
    ("shakespear.txt", r"no such file or folder.*did you mean .*shakespeare\.txt"),
    ("", "data.source is empty"),
    ("empty.txt", "the text is empty"),
    ("nothing", r"holds no \.txt"),
    ("latin1.txt", r"latin1\.txt: not UTF-8: byte 0xe9 at offset 6 \(line 2\)"),
    ("torn.jsonl", r"torn\.jsonl:2: not a JSON object"),
    ("list.jsonl", r"list\.jsonl:1: a line must be a JSON object, not a list"),
    ("nokey.jsonl", r"nokey\.jsonl:1: no key 'text'; its keys are 'texts'; did you mean texts"),
    ("number.jsonl", r"number\.jsonl:1: 'text' must be a text, not a int"),
    ("tiny.txt", r"tiny\.txt has 3 tokens, fewer than one row of data\.seq_len = 128"),
    ("python:os", "write python:module:function"),
    ("python:no_such_module_x:f", "cannot import 'no_such_module_x'"),
    ("hf:", "no dataset id"),
]


@pytest.mark.parametrize(("source", "message"), BAD_SOURCES)
def test_bad_source_names_the_value_and_the_fix(tmp_path, source, message):
    (tmp_path / "shakespeare.txt").write_text("x" * 999)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "latin1.txt").write_bytes(b"abc\nd\xc3\xa9\n"[:5] + b"x\xe9\n")
    (tmp_path / "torn.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "nokey.jsonl").write_text('{"texts": "a"}\n')
    (tmp_path / "number.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "tiny.txt").write_text("abc")
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(DataConfig(source=source), seed=0, base_dir=tmp_path)
    assert caught.value.exit_code == 2


def test_an_unreachable_hub_is_explained(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"'hf:nobody/nothing-here' \(split 'train'\).*check the id"):
        open_dataset(DataConfig(source="hf:nobody/nothing-here"), seed=0, base_dir=tmp_path)


def test_without_a_network_the_hub_is_not_asked_again_and_again(monkeypatch, tmp_path):
    pytest.importorskip("tokenizers")
    from huggingface_hub import constants

    asked = []

    def nowhere(host, *rest, **more):
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", nowhere)
    monkeypatch.setattr("fusionllm.store.hub.getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=r"nobody/nothing-here.*check the name and the network"):
        open_tokenizer("nobody/nothing-here", tmp_path)
    assert len(asked) == 1 and constants.HF_HUB_OFFLINE is False


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("missing.json", "no such file or folder"),
        ("", "no such file or folder"),
        ("byte", r"neither built in \(bytes, bytes\+eos\), nor .* OWNER/NAME; did you mean bytes\?"),
        ("gtp2", r"did you mean gpt2\?"),
        ("broken.json", "is not a tokenizers JSON file"),
        ("folder", "has no tokenizer.json"),
    ],
)
def test_bad_tokenizer(tmp_path, tokenizer, message):
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=message):
        open_dataset(DataConfig(tokenizer=tokenizer), seed=0, base_dir=tmp_path, obj=["text"])


def test_tokenizer_folder_with_its_own_end_of_text(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((EXAMPLES / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "!"}}')
    data = open_dataset(DataConfig(tokenizer=".", seq_len=2), seed=0, base_dir=tmp_path, obj=["one two three"])
    assert data.tokenizer.eos_id == data.encode("!")[0]


@pytest.mark.parametrize(("field", "value"), [("seq_len", 1), ("val_fraction", 1.0), ("val_fraction", -0.1)])
def test_bad_numbers_are_refused_on_construction_and_on_decoding(field, value):
    with pytest.raises(UserError, match=f"data.{field} is {value}"):
        DataConfig(**{field: value})
    with pytest.raises(UserError, match=f"data.{field} is {value}"):
        msgspec.convert({field: value}, DataConfig)


def test_fewer_rows_than_a_batch_says_both_numbers():
    with pytest.raises(UserError, match="has 5 training rows but one global batch needs 8"):
        numbered(5).microbatches(0, global_batch=8, microbatch_size=2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the data is empty"),
        (5, "a int is no data"),
        (iter(["a"]), "turn an iterable dataset into a list first"),
        ({"train": ["a"]}, "a mapping with the keys 'train'"),
        ([3], "row 0 is a int"),
        ([{"x": [1, 2]}, {"x": [1]}], "column 'x' is int64\\[1\\] in row 1 but int64\\[2\\] in row 0"),
        ([{"x": [1]}, {"y": [1]}], "row 1 has 'y', row 0 has 'x'"),
        ([{"x": [[1], [1, 2]]}], "column 'x' of row 0 is no array"),
        ([{"x": None}], "has dtype object"),
        ([{"story": "once"}], "set data.text_column to 'story'"),
    ],
)
def test_bad_rows(rows, message):
    with pytest.raises(UserError, match=message):
        data = open_dataset(DataConfig(val_fraction=0), seed=0, base_dir=Path(), obj=rows)
        data.microbatches(0, global_batch=1, microbatch_size=1)


def text_rows(kind: str, texts: list[str], seq_len: int) -> Dataset:
    config = DataConfig(tokenizer="bytes", documents=kind, seq_len=seq_len, val_fraction=0.0)
    return open_dataset(config, seed=0, base_dir=Path(), obj=texts)


def test_documents_apart_have_positions_of_their_own():
    data = text_rows("apart", ["abc", "", "defghijk", "lm", "nopqrst"], 5)
    rows = data._train.take([0, 1, 2, 3])
    assert bytes(rows["input_ids"].ravel().tolist()) == b"abcdefghijklmnopqrst"
    # a row that goes on with a document begins at 0 as any sequence does
    assert rows["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 0, 1, 0, 1], [0, 1, 2, 3, 4]]
    assert (rows["labels"] == -100).nonzero()[1].tolist() == [0, 3, 1, 3]
    assert data.fingerprint != text_rows("apart", ["abcdefghijklmnopqrst"], 5).fingerprint


def test_padded_documents_are_as_long_as_the_longest_of_their_batch():
    data = text_rows("padded", ["abc", "", "defghijkl", "m", "nopq"], 4)
    assert (data.num_rows, data.max_length) == (4, 4)  # the 9 letters are 4, 4 and 1, which is left out as the m is
    rows = data._train.take([0, 1, 3])
    assert rows["input_ids"].tolist() == [[97, 98, 99, 0], [100, 101, 102, 103], [110, 111, 112, 113]]
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 0], [1] * 4, [1] * 4]
    assert rows["labels"][0].tolist() == [97, 98, 99, -100]
    assert data._train.take([0])["input_ids"].shape == (1, 3)
    assert all(a.shape == (2, 4) for a in data.example().values())


def test_rows_of_arrays_are_no_documents():
    with pytest.raises(UserError, match=r"data\.documents is 'padded'"):
        text_rows("padded", [{"x": np.zeros(2, np.float32)}] * 4, 4)
