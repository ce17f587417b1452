"""A model without weights becomes a graph that computes what the model with weights does."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from fusionllm.capture.empty import is_empty, without_weights
from fusionllm.capture.export import capture_module
from fusionllm.capture.sources import ModelConfig, resolve_model
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage
from fusionllm.errors import CaptureError

SHAPES = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 32},
    "llama": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4},
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_graph_computes_the_same_and_the_buffers_keep_their_values(name):
    config = ModelConfig(source=name, config={**SHAPES[name], "vocab_size": 32})
    ids = torch.arange(24).reshape(2, 12) % 32
    whole, empty = (resolve_model(config, base_dir=Path(), seed=1, empty=empty).module for empty in (False, True))
    assert is_empty(empty) and not is_empty(whole)
    expected, got = (capture_module(module, {"input_ids": ids, "labels": ids}) for module in (whole, empty))
    assert got.graph.held == expected.graph.held
    losses = []
    for captured in (expected, got):
        stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(), 1)
        for tensor_name, tensor in expected.tensors.items():
            stage.load(tensor_name, tensor)
        losses.append(stage.forward(0, 0, {"input_ids": ids, "labels": ids})[captured.graph.outputs[0]].item())
    assert losses[0] == losses[1]
    for buffer in got.graph.buffers:
        assert torch.equal(got.tensors[buffer], expected.tensors[buffer])
    assert all(got.tensors[param].is_meta for param in got.graph.params)
    assert all(not b.is_meta for b in empty.buffers())  # put back after the capture


def test_nothing_of_the_size_of_the_weights_is_kept():
    with without_weights():
        before = psutil.Process().memory_info().rss
        model = nn.Linear(1 << 15, 1 << 15)  # 4 GiB
        assert psutil.Process().memory_info().rss - before < 1 << 28
    assert model.weight.is_meta and model.bias.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_constant_that_would_lose_its_value_is_refused():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return (self.layer(x) + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)).mean()

    with without_weights():
        model = Shifted()
    with pytest.raises(CaptureError, match="register it as a buffer"):
        capture_module(model, {"x": torch.zeros(2, 4)})
