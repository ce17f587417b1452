"""Sequences of any length, padded or not: one graph, the loss of the eager model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusionllm.capture.export import capture_module
from fusionllm.capture.sources import ModelConfig, resolve_model
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage
from fusionllm.ir.graph import decode_graph, encode_graph

SHAPES = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": 32},
    "llama": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64},
}  # fmt: skip


def batch(rows: int, length: int, padded: bool) -> dict[str, torch.Tensor]:
    """Rows padded to one length on the right; padding has no label."""
    numbers = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(1, 32, (rows, length), generator=numbers)
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    lengths = torch.randint(2, length + 1, (rows, 1), generator=numbers)
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_any_length_has_the_models_loss_and_gradients(name, padded):
    module = resolve_model(ModelConfig(source=name, config=SHAPES[name]), base_dir=Path(), seed=1).module
    captured = capture_module(module, batch(3, 12, padded), mode="eval", open_length=True)
    graph = decode_graph(encode_graph(captured.graph))
    assert len(graph.symbols) == 2
    stage = TorchStage(graph, ComputeOptions(), OptimConfig(), 1)
    for tensor, value in captured.tensors.items():
        stage.load(tensor, value)
    for rows, length in ((1, 5), (4, 12), (2, 31)):
        data = batch(rows, length, padded)
        module.zero_grad()
        expected = module(**data).loss
        expected.backward()
        assert stage.forward(0, 0, data)[graph.outputs[0]].item() == pytest.approx(expected.item(), rel=1e-6)
        stage.backward(0, 0, {}, 1.0)
        squares = sum(p.grad.double().square().sum().item() for p in module.parameters())
        assert stage.grad_square_sum() == pytest.approx(squares, rel=1e-5)
        stage.drop_gradients()
