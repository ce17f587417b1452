"""Operators that a person registers with `torch.library`: allowed by name, refused everywhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusionllm.capture.export import Captured, capture_module
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage
from fusionllm.errors import CaptureError, GraphError, UserError
from fusionllm.ir.graph import decode_graph, encode_graph
from fusionllm.ir.ops import allowed_ops
from fusionllm.ir.text import graph_to_text, parse_graph

NAME = "fusionllm_tests.swish.default"


@torch.library.custom_op("fusionllm_tests::swish", mutates_args=())
def swish(x: torch.Tensor, beta: float) -> torch.Tensor:
    return x * torch.sigmoid(beta * x)


@swish.register_fake
def _(x: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:
    x, ctx.beta = inputs
    ctx.save_for_backward(x)


def _backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(ctx.beta * x)
    return gradient * (s + ctx.beta * x * s * (1 - s)), None


swish.register_autograd(_backward, setup_context=_keep)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.ops.fusionllm_tests.swish(self.one(x), 2.0)).square().mean()


X = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(1))}


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture_module(Model(), X, allow_ops=[NAME])


def test_an_allowed_operator_trains_as_in_the_model(captured):
    stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(), 1, allow_ops=[NAME])
    for name, tensor in captured.tensors.items():
        stage.load(name, tensor)
    model = Model()
    expected = model(**X)
    expected.backward()
    assert stage.forward(0, 0, X)[captured.graph.outputs[0]].item() == expected.item()
    stage.backward(0, 0, {}, 1.0)
    squares = sum(p.grad.double().square().sum().item() for p in model.parameters())
    assert stage.grad_square_sum() == pytest.approx(squares, rel=1e-6)


def test_it_is_refused_wherever_nobody_allowed_it(captured):
    with pytest.raises(CaptureError, match=r"swish\.default at .*test_library_ops\.py.*docs/operators\.md"):
        capture_module(Model(), X)
    data, text = encode_graph(captured.graph), graph_to_text(captured.graph)
    for read in (lambda: decode_graph(data), lambda: parse_graph(text)):
        with pytest.raises(GraphError, match="not allowed here"):
            read()
    with pytest.raises(GraphError, match="allow-list"):
        TorchStage(captured.graph, ComputeOptions(), OptimConfig(), 1)
    assert decode_graph(data, [NAME]) == parse_graph(text, [NAME]) == captured.graph


def test_one_that_is_allowed_but_not_there_says_what_to_import(captured):
    other = "fusionllm_tests.absent.default"
    data = encode_graph(captured.graph).replace(NAME.encode(), other.encode())
    with pytest.raises(GraphError, match="import the module"):
        TorchStage(decode_graph(data, [other]), ComputeOptions(), OptimConfig(), 1, allow_ops=[other])


@pytest.mark.parametrize(
    "name", ["aten.from_file.default", "prim.call.default", "mylib.op", "os.system", "a.b.c.d", "ir.x.y", "a.b-c.d", ""]
)
def test_only_operators_of_a_library_can_be_allowed(name):
    with pytest.raises(UserError, match="cannot be allowed"):
        allowed_ops([name])
    assert allowed_ops([NAME]) == {NAME}
