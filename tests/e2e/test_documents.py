"""Documents padded to the longest of a microbatch, or packed and kept apart: a run is the eager model's training."""

from __future__ import annotations

import random

import pytest
import torch

import fusionllm
from fusionllm.api.config import load_config
from fusionllm.api.prepare import open_model

LLAMA = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "n_layer": 3, "n_head": 2, "n_embd": 32, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
STEPS, LR = 3, 0.1


def documents() -> list[str]:
    numbers = random.Random(4)
    return [" ".join(["to", "be", "or", "not", "to", "be", "that", "is"][: numbers.randint(1, 8)]) for _ in range(60)]


def eager(config, base_dir, texts):
    """Losses and the trained module of one process, by torch alone."""
    _, dataset, source = open_model(config, base_dir, obj=texts)
    module, train = source.module, config.train
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    losses, lengths = [], set()
    for step in range(train.steps):
        batches = dataset.microbatches(step, global_batch=train.global_batch, microbatch_size=train.microbatch_size)
        total = 0.0
        for batch in batches:
            lengths.add(batch["input_ids"].shape[1])
            loss = module(**{n: torch.from_numpy(a) for n, a in batch.items()}).loss
            weight = len(batch["input_ids"]) / train.global_batch
            (loss * weight).backward()
            total += loss.item() * weight
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, module, lengths


@pytest.mark.parametrize(
    ("source", "shape", "kind"), [("llama", LLAMA, "padded"), ("gpt2", GPT2, "padded"), ("gpt2", GPT2, "apart")]
)
def test_a_run_over_documents_is_one_process(tmp_path, source, shape, kind):
    tables = {
        "run": {"root": str(tmp_path), "seed": 2},
        "model": {"source": source, "config": {**shape, "vocab_size": 256}},
        "data": {"documents": kind, "seq_len": 32},
        "train": {"steps": STEPS, "global_batch": 6, "microbatch_size": 2, "checkpoint_every": 0},
        "optimizer": {"name": "sgd", "lr": LR, "schedule": "constant"},
        "cluster": {"nodes": 3, "threads": 1},
        "output": {"plot": False},
    }
    config = load_config(None, (), tables)
    result = fusionllm.train(None, documents(), config=config)
    losses, module, lengths = eager(config, tmp_path, documents())
    assert (len(lengths) > 1) == (kind == "padded")
    assert result.losses == pytest.approx(losses, abs=2e-6)
    trained = result.model.state_dict()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-4, atol=1e-6)
    assert 3 < result.summary.val_loss < 6  # validation batches have lengths of their own
