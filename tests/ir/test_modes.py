"""One captured graph trains and evaluates: as the eager model in either mode, and counts what it got right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusionllm.capture.export import capture_module
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage
from fusionllm.ir.cuts import list_cuts, split_graph
from fusionllm.ir.graph import decode_graph, encode_graph
from fusionllm.ir.modes import METRICS, evaluation_graph, training_graph, with_metrics


class Classifier(nn.Module):
    """Batch norm, dropout, a cross entropy that ignores class 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.scores(x), y, ignore_index=3)


def batch(rows: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, 6, generator=numbers), "y": torch.randint(5, (rows,), generator=numbers)}


def stages(graph, tensors, boundaries):
    made = [TorchStage(g, ComputeOptions(), OptimConfig(lr=0.1), 4) for g in split_graph(graph, boundaries)]
    for stage in made:
        for name in stage.missing():
            stage.load(name, tensors[name])
    return made


def forward(chain, values, *, train, index=0):
    for stage in chain:
        wanted = {v.id for v in (*stage.graph.inputs, *stage.graph.recv)}
        values = values | stage.forward(0, index, {i: t for i, t in values.items() if i in wanted}, train=train)
    return values


@pytest.mark.parametrize("cut", [None, 0, 1, -1])
def test_an_evaluation_is_the_model_in_eval_mode_and_counts(cut):
    model = Classifier()
    captured = capture_module(model, batch(4))
    graph = decode_graph(encode_graph(with_metrics(captured.graph)))
    cuts = list_cuts(graph, {"B": 4})
    chain = stages(graph, captured.tensors, [] if cut is None else [cuts[cut].boundary])
    forward(chain, batch(16), train=True)  # moves the running statistics
    model.train()(**batch(16))
    model.eval()
    data = batch(9)
    before = [{n: t.clone() for n, t in stage.state()[0].items()} for stage in chain]
    out = forward(chain, data, train=False)
    loss, correct, counted = (out[name].item() for name in graph.outputs)
    asked = data["y"] != 3
    assert loss == model(**data).item()
    assert counted == asked.sum() and 0 < counted < 9
    assert correct == ((model.scores(data["x"]).argmax(1) == data["y"]) & asked).sum()
    for stage, kept in zip(chain, before):
        assert all(torch.equal(t, kept[n]) for n, t in stage.state()[0].items())


def test_training_leaves_the_metrics_out_and_no_cut_parts_them_from_the_loss():
    graph = capture_module(Classifier(), batch(4)).graph
    counting = with_metrics(graph)
    assert len(counting.outputs) == 1 + len(METRICS) and training_graph(counting).ops == graph.ops
    for cut in list_cuts(counting, {"B": 4}):
        last = split_graph(counting, [cut.boundary])[1]
        assert last.outputs == counting.outputs
    assert evaluation_graph(counting).mutations == {}


def test_other_losses_are_left_as_they_are():
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.layer(x).squeeze(1) - y).square().mean()

    graph = capture_module(Squares(), batch(4)).graph
    assert with_metrics(graph) is graph
