"""Whole models of several families: the other backends give torch's loss and gradients."""

from __future__ import annotations

import pytest
import torch
from benchmarks.families import FAMILIES
from tests.kits.torch_faced import TorchFaced

from fusionllm.capture.export import capture_module
from fusionllm.compute import ComputeOptions, OptimConfig

#: One of each kind: attention with grouped heads, adapters over frozen weights, statistics of batches and skips; of
#: tinygrad the family with most operators that it has.
CASES = [("jax", "llama"), ("jax", "lora-gpt2"), ("jax", "unet"), ("tinygrad", "qwen3")]
SGD = OptimConfig(name="sgd", lr=1.0, schedule="constant")


@pytest.mark.parametrize(("other", "name"), CASES)
def test_backends_agree(other: str, name: str) -> None:
    pytest.importorskip(other)
    module, inputs = FAMILIES[name]()
    inputs = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    captured = capture_module(module.double(), inputs)
    found = {}
    for backend in ("torch", other):
        stage = TorchFaced(backend, captured.graph, ComputeOptions(), SGD, 1)
        for held in stage.missing():
            stage.load(held, captured.tensors[held])
        loss = stage.forward(0, 0, inputs)[captured.graph.outputs[0]]
        stage.backward(0, 0, {}, 1.0)
        stage.update(0, 0.0)
        found[backend] = loss, stage.state()[0]
    loss, weights = found["torch"]
    own_loss, own = found[other]
    torch.testing.assert_close(own_loss, loss, rtol=1e-6, atol=0)  # that of Hugging Face's language models is float32
    for held, tensor in weights.items():
        scale = (tensor.double() - captured.tensors[held].double()).abs().max() + 1e-6
        assert (own[held].double() - tensor.double()).abs().max() < 1e-6 * scale, held
