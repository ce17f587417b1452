"""A model whose owner never holds it: the stages' weights come from a folder, a server, or a seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kits.range_server import serving

import fusionllm
from fusionllm.store.checkpoint import load_checkpoint
from fusionllm.store.tensorfile import TensorFile, write_tensors
from fusionllm.store.weights import INDEX, SINGLE

SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small pretrained Llama in bfloat16, in two files, as hubs have them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    whole = TensorFile(folder / SINGLE)
    files = {f"model-{k + 1:05d}-of-00002.safetensors": whole.names[k::2] for k in range(2)}
    for file, names in files.items():
        write_tensors(folder / file, {n: whole.read(n) for n in names})
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": {n: f for f, names in files.items() for n in names}})
    )
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("All the world's a stage, and all the men and women merely players. " * 60)
    return path


def train(tmp_path: Path, text: Path, model: dict, name: str, **options):
    options = {"steps": 3, "nodes": 2, "seq_len": 32, "global_batch": 4, "microbatch_size": 2, "lr": 1e-2} | options
    run = {"root": str(tmp_path), "name": name, "seed": 3, "resume": options.pop("resume", False)}
    return fusionllm.train(model, str(text), run=run, threads=1, plot=False, **options)


def digest(run) -> str:
    checkpoint = load_checkpoint(run.run_dir / "checkpoints")
    return hashlib.sha256(
        b"".join(bytes(checkpoint.read_weight(n).data) for n in sorted(checkpoint.manifest.weights))
    ).hexdigest()


def test_a_pretrained_folder_trains_as_if_it_were_held(tmp_path, text, folder):
    whole = train(tmp_path, text, {"source": str(folder)}, "whole")
    lazy = train(tmp_path, text, {"source": str(folder), "lazy": True}, "lazy")
    assert lazy.losses == whole.losses
    assert all(p.is_meta for p in lazy.model.parameters())
    before = digest(lazy)
    assert before == digest(whole)
    more = train(tmp_path, text, {"source": str(folder), "lazy": True}, "lazy", resume=True, steps=4)
    assert len(more.losses) == 4 and digest(more) != before


def test_the_export_of_a_lazy_run_never_builds_the_model(tmp_path, text, folder, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = train(tmp_path, text, {"source": str(folder)}, "whole")
    lazy = train(tmp_path, text, {"source": str(folder), "lazy": True}, "lazy")
    fusionllm.export(whole.run_dir, tmp_path / "of-whole")
    monkeypatch.setattr("fusionllm.api.weights.restore", None)
    monkeypatch.setattr("fusionllm.store.weights.write_folder.__defaults__", (20_000,))
    fusionllm.export(lazy.run_dir, tmp_path / "of-lazy")
    assert len(list((tmp_path / "of-lazy").glob("model-*.safetensors"))) > 2
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / f"of-{name}") for name in ("whole", "lazy"))
    assert type(first) is type(second) and second.dtype == torch.float32
    assert {n: t.tolist() for n, t in first.state_dict().items()} == {
        n: t.tolist() for n, t in second.state_dict().items()
    }
    assert first.generation_config == second.generation_config
    assert {p.name for p in (tmp_path / "of-whole").iterdir()} - {p.name for p in (tmp_path / "of-lazy").iterdir()} == {
        "model.safetensors"
    }
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "of-lazy")
    words = "O for a Muse of fire, Zürich\n  \t–"
    assert tokenizer(words)["input_ids"] == list(words.encode()) and tokenizer.decode(list(words.encode())) == words


def test_nodes_read_their_own_from_a_server_and_check_it(tmp_path, text, folder):
    expected = train(tmp_path, text, {"source": str(folder), "lazy": True}, "owner")
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with serving(folder) as server:
        server.break_after = 6_000
        model = {"source": str(folder), "lazy": True, "mirrors": [server.url]}
        found = train(tmp_path, text, model, "server")
        assert 0.8 * total < server.num_bytes < 1.6 * total  # each its own; the tied embedding and headers twice
    assert found.losses == expected.losses
    assert found.summary.link_bytes  # a run as any other


def test_a_server_with_other_weights_is_not_believed(tmp_path, text, folder):
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".safetensors":
            data[-1] ^= 1
        (other / path.name).write_bytes(data)
    expected = train(tmp_path, text, {"source": str(folder), "lazy": True}, "own")
    with serving(other) as server:
        found = train(tmp_path, text, {"source": str(folder), "lazy": True, "mirrors": [server.url]}, "lied-to")
    assert found.losses == expected.losses
    logs = "".join(path.read_text() for path in (found.run_dir / "logs").iterdir())
    assert "is not what the owner has" in logs


def test_random_weights_are_a_function_of_seed_and_name(tmp_path, text):
    model = {"source": "llama", "config": SHAPE, "lazy": True}
    two, three = (train(tmp_path, text, model, f"n{n}", nodes=n, tied="microbatch", microbatch_size=1) for n in (2, 3))
    assert two.losses == three.losses and np.isfinite(two.losses).all()
    assert digest(two) == digest(three)
    assert 5.3 < two.losses[0] < 5.8  # ln 256 = 5.55: as the model's own beginning
