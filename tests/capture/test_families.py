"""Families of models, one of each kind: three stages train as the eager model. All of them: `benchmarks capture`."""

from __future__ import annotations

import pytest
import torch
from benchmarks.capture import compare_family
from benchmarks.families import FAMILIES
from torch import nn

from fusionllm.capture.export import capture_module
from fusionllm.capture.portable import portable
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage

#: Experts, an encoder with a decoder, images with batch norm, a recurrent net, adapters; decoders are in test_capture.
KINDS = ("mixtral", "t5", "resnet-18", "lstm", "lora-gpt2")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", KINDS)
def test_a_family_trains_in_three_stages_as_it_does_eagerly(name):
    found = compare_family(name, torch.float64, 3)
    assert found["update_diff"] <= 1e-9
    assert found["loss_diff"] <= 1e-6  # transformers computes the loss of float64 logits in float32
    assert not any("nonzero" in op or "grouped" in op for op in found["operators"])
    if name.startswith("lora"):
        assert 0 < found["trainable"] < found["params"]


def test_what_capture_asks_of_a_model_is_undone():
    module, _ = FAMILIES["mixtral"]()
    module.config.use_cache = True
    before = (module.get_experts_implementation(), module.config.use_cache)
    with portable(module):
        assert (module.get_experts_implementation(), module.config.use_cache) != before
    assert (module.get_experts_implementation(), module.config.use_cache) == before


def test_transformers_does_not_talk_about_a_loss_it_chose_itself(monkeypatch):
    from transformers.utils import logging

    module, inputs = FAMILIES["gpt2"]()
    said: list[str] = []
    monkeypatch.setattr(logging.get_logger("transformers.modeling_utils"), "warning_once", said.append)
    capture_module(module, inputs)
    assert said == [] and module.loss_type is None
    module(**inputs)
    assert "loss_type" in said[0]  # by itself it does talk


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(image)).square().mean()


def test_batch_norm_in_eval_mode_uses_and_keeps_its_statistics():
    image = torch.randn(3, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    model = Normed()
    model(image)  # statistics other than the initial ones
    captured = capture_module(model, {"image": image}, mode="eval")
    assert captured.graph.mutations == {}
    stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(), 1)
    for name, tensor in captured.tensors.items():
        stage.load(name, tensor)
    expected = model.eval()(image)
    expected.backward()
    assert stage.forward(0, 0, {"image": image})[captured.graph.outputs[0]].item() == expected.item()
    stage.backward(0, 0, {}, 1.0)
    squares = sum(p.grad.double().square().sum().item() for p in model.parameters())
    assert stage.grad_square_sum() == pytest.approx(squares, rel=1e-6)
    assert torch.equal(stage.state()[0]["norm.running_mean"], model.norm.running_mean)
