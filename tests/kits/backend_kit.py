"""What every backend must do: the class of tests a new one joins by one line in ``BACKENDS``.

Knows the methods of a stage, not how it computes; graphs come from `capture`, values go in and out as torch tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
from tests.kits.torch_faced import TorchFaced
from torch import nn

from fusionllm.capture.export import capture_module
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.errors import GraphError
from fusionllm.ir.cuts import anchored_ops, list_cuts, split_graph

ROWS, WIDTH = 3, 6


class Regression(nn.Module):
    """Two matrices and a loss; the second layer may be frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.two = nn.Linear(WIDTH, 1, dtype=dtype)
        self.two.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.two(torch.tanh(self.one(x))) - y).square().mean()


def example(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, WIDTH, dtype=dtype, generator=generator),
        "y": torch.randn(rows, 1, dtype=dtype, generator=generator),
    }


def stages_of(
    backend: str, model: nn.Module, inputs: Mapping[str, torch.Tensor], num_stages: int = 1,
    optim: OptimConfig | None = None, **options: Any,
) -> list[Any]:  # fmt: skip
    """Loaded stages of a model, cut near equal numbers of operators."""
    captured = capture_module(model, inputs)
    places = [c.boundary for c in list_cuts(captured.graph, {"B": ROWS})]
    count = len(anchored_ops(captured.graph))
    wanted = [count * k // num_stages for k in range(1, num_stages)]
    cuts = sorted({min(places, key=lambda p, w=w: abs(p - w)) for w in wanted})
    stages = []
    for graph in split_graph(captured.graph, cuts):
        stage = TorchFaced(backend, graph, ComputeOptions(**options), optim or OptimConfig(lr=0.1), 4)
        for name in stage.missing():
            stage.load(name, captured.tensors[name])
        stages.append(stage)
    return stages


def forward(stages: Sequence[Any], inputs: Mapping[str, torch.Tensor], microbatch_index: int = 0) -> float:
    values = dict(inputs)
    for stage in stages:
        wanted = {v.id for v in (*stage.graph.inputs, *stage.graph.recv)}
        values |= stage.forward(0, microbatch_index, {i: t for i, t in values.items() if i in wanted})
    return float(values[stages[-1].graph.outputs[0]])


def backward(stages: Sequence[Any], loss_weight: float = 1.0, microbatch_index: int = 0) -> None:
    grads: dict[str, torch.Tensor] = {}
    for stage in reversed(stages):
        own = {i: grads[i] for i in stage.graph.send if i in grads}
        grads |= stage.backward(0, microbatch_index, own, loss_weight)


def eager_norm(model: nn.Module) -> float:
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


class BackendContract:
    """Subclass it as ``TestX(BackendContract)`` with ``backend = "x"``."""

    backend: str

    @pytest.mark.parametrize("num_stages", [1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_losses_and_gradients_are_the_models(self, num_stages: int, dtype: torch.dtype) -> None:
        model, inputs = Regression(dtype), example(dtype)
        stages = stages_of(self.backend, model, inputs, num_stages)
        expected = model(**inputs)
        expected.backward()
        assert forward(stages, inputs) == pytest.approx(expected.item(), rel=1e-6)
        backward(stages)
        norm = sum(stage.grad_square_sum() for stage in stages) ** 0.5
        assert norm == pytest.approx(eager_norm(model), rel=1e-6 if dtype == torch.float32 else 1e-12)

    def test_gradients_add_up_with_their_weights(self) -> None:
        stages = stages_of(self.backend, Regression(), example())
        norms = []
        for weight in (1.0, 0.5):
            forward(stages, example())
            backward(stages, weight)
            norms.append(stages[0].grad_square_sum() ** 0.5)
        assert norms[1] == pytest.approx(1.5 * norms[0], rel=1e-5)

    def test_microbatches_may_be_under_way_together(self) -> None:
        one, two = (stages_of(self.backend, Regression(), example(), 2) for _ in range(2))
        for index in range(3):
            forward(one, example(rows=index + 1), index)
            forward(two, example(rows=index + 1), index)
            backward(two, 1.0, index)
        for index in range(3):
            backward(one, 1.0, index)
        assert [s.grad_square_sum() for s in one] == [s.grad_square_sum() for s in two]

    def test_recompute_changes_nothing(self) -> None:
        norms = []
        for recompute in (False, True):
            stages = stages_of(self.backend, Regression(), example(), 2, recompute=recompute)
            forward(stages, example())
            backward(stages)
            norms.append([stage.grad_square_sum() for stage in stages])
        assert norms[0] == norms[1]

    def test_a_frozen_parameter_stays(self) -> None:
        (stage,) = stages_of(self.backend, Regression(frozen=True), example())
        before = {n: t.clone() for n, t in stage.state()[0].items()}
        forward([stage], example())
        backward([stage])
        assert stage.update(0, 0.0) == 0.1
        weights, optimizer = stage.state()
        assert {n for n, t in weights.items() if torch.equal(t, before[n])} == {"two.weight", "two.bias"}
        assert {key.partition("/")[2] for key in optimizer} == {"one.weight", "one.bias"}

    def test_an_update_drops_the_gradients(self) -> None:
        (stage,) = stages_of(self.backend, Regression(), example())
        forward([stage], example())
        backward([stage])
        stage.update(0, stage.grad_square_sum() ** 0.5)
        assert stage.grad_square_sum() == 0.0

    def test_a_tensor_loaded_again_is_the_one_trained(self) -> None:
        (stage,) = stages_of(self.backend, Regression(), example())
        forward([stage], example())
        backward([stage])
        stage.update(0, 0.0)
        stage.load("one.weight", torch.zeros(WIDTH, WIDTH))
        forward([stage], example())
        backward([stage])
        stage.update(1, 0.0)
        assert stage.state()[0]["one.weight"].abs().sum() > 0

    def test_an_unknown_operator_is_refused_at_load(self) -> None:
        (stage,) = stages_of(self.backend, Regression(), example())
        first, *rest = stage.graph.ops
        for name in ("aten.system.default", "os.system", "aten.linear.out", "torch.load"):
            bad = msgspec.structs.replace(stage.graph, ops=(msgspec.structs.replace(first, name=name), *rest))
            with pytest.raises(GraphError, match="allow-list"):
                TorchFaced(self.backend, bad, ComputeOptions(), OptimConfig(), 1)

    def test_values_that_do_not_fit_are_refused(self) -> None:
        (stage,) = stages_of(self.backend, Regression(), example())
        for bad in (torch.zeros(3, WIDTH + 1), torch.zeros(3), torch.zeros(2, WIDTH)):
            with pytest.raises(GraphError):
                stage.forward(0, 0, {**example(), "x": bad})
