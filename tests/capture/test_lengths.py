"""Sequences of any length, padded or not: one graph, the loss of the eager model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.coded import CodedPipeline
from benchmarks.families import FAMILIES

from fusionllm.capture.export import capture_module
from fusionllm.capture.sources import ModelConfig, resolve_model
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage
from fusionllm.ir.graph import decode_graph, encode_graph
from fusionllm.schedule.partition import partition_graph

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


def packed(rows: int) -> dict[str, torch.Tensor]:
    """Two documents a row, the first of 5 tokens; each begins at position 0 and its first token is no label."""
    data = batch(rows, 12, padded=False)
    data["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)]).expand(rows, 12).clone()
    data["labels"][:, 5] = -100
    return data


@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, kind) for family in ("gpt2", "llama", "qwen3") for kind in ("padded", "packed")] + [("gemma2", "packed")],
)
def test_three_stages_train_masked_and_packed_rows_as_eager(family, kind):
    module = FAMILIES[family]()[0].double()
    made = [packed(3), packed(2)] if kind == "packed" else [batch(3, 12, True), batch(2, 9, True)]
    captured = capture_module(module, packed(3) if kind == "packed" else batch(3, 12, True), open_length=True)
    graph = captured.graph
    boundaries = partition_graph(graph, 3, "equal-number", graph.sizes(3, 12))
    pipeline = CodedPipeline(captured, OptimConfig(name="sgd", lr=0.1, schedule="constant"), 1, boundaries)
    before = {n: t.clone() for n, t in pipeline.state().items()}
    ours = pipeline.train_step(0, [{n: t.numpy() for n, t in one.items()} for one in made])
    theirs = 0.0
    for one in made:
        loss = module(**one).loss * (len(one["input_ids"]) / 5)
        loss.backward()
        theirs += loss.item()
    assert ours == pytest.approx(theirs, abs=1e-6)  # transformers computes this loss in float32
    for name, parameter in module.named_parameters():
        expected = before[name] - 0.1 * parameter.grad
        change = (0.1 * parameter.grad).abs().max()
        assert (pipeline.state()[name] - expected).abs().max() <= 1e-9 * max(1.0, change), name


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gemma2", "phi", "gpt-neox"])
def test_packed_documents_do_not_see_each_other(family):
    module = FAMILIES[family]()[0]
    data = packed(2)
    captured = capture_module(module, data, mode="eval")
    stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(), 1)
    for tensor, value in captured.tensors.items():
        stage.load(tensor, value)
    found = stage.forward(0, 0, data)[captured.graph.outputs[0]].item()
    parts = [{n: data[n][:, cut] for n in ("input_ids", "labels")} for cut in (slice(5), slice(5, None))]
    alone = [module(**part).loss.item() for part in parts]
    assert found == pytest.approx((4 * alone[0] + 6 * alone[1]) / 10, rel=1e-6)
