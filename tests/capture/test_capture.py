"""Models become graphs that say what they are, and those that cannot say why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fusionllm.capture.export import capture_module
from fusionllm.capture.sources import ModelConfig, resolve_model
from fusionllm.capture.weights import write_back
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage
from fusionllm.errors import CaptureError, CheckpointError, UserError
from fusionllm.ir.cuts import list_cuts
from fusionllm.ir.graph import decode_graph, encode_graph
from fusionllm.ir.text import graph_to_text, parse_graph

SHAPES = {
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 32},
    "llama": {
        "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 32,
    },
}  # fmt: skip


def tokens(rows: int, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def language_model(request):
    model = resolve_model(ModelConfig(source=request.param, config=SHAPES[request.param]), base_dir=Path(), seed=1)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        assert getattr(model.module.config, name, 0.1) == 0.1
    return request.param, model.module.eval(), capture_module(model.module, tokens(2), mode="eval")


def test_a_language_model_runs_at_any_batch_size_with_equal_loss(language_model):
    _, model, captured = language_model
    stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(), 1)
    for name, tensor in captured.tensors.items():
        stage.load(name, tensor)
    for rows in (1, 2, 5):
        model.zero_grad()
        expected = model(**tokens(rows)).loss
        expected.backward()
        loss = stage.forward(0, 0, tokens(rows))[captured.graph.outputs[0]]
        stage.backward(0, 0, {}, 1.0)
        assert loss.item() == expected.item()
        squares = sum(p.grad.double().square().sum().item() for p in model.parameters())
        assert stage.grad_square_sum() == pytest.approx(squares, rel=1e-7)  # float32: sums in another order
        stage.drop_gradients()


def test_the_forms_of_a_graph_read_back(language_model):
    name, model, captured = language_model
    graph = captured.graph
    assert decode_graph(encode_graph(graph)) == graph
    assert parse_graph(graph_to_text(graph)) == graph
    assert b"device" not in encode_graph(graph) and b"cpu" not in encode_graph(graph).replace(
        graph.producer.encode(), b""
    )
    again = capture_module(model, tokens(3), mode="eval").graph
    assert again.content_hash() == graph.content_hash()
    assert graph.symbols == {"B": 1}
    if name == "gpt2":
        assert graph.params["transformer.wte.weight"].aliases == ("lm_head.weight",)
    assert sum(len(cut.values) == 1 for cut in list_cuts(graph, {"B": 2})) >= 4


def test_dropout_gets_an_index_each():
    model = resolve_model(ModelConfig(source="gpt2", config=SHAPES["gpt2"]), base_dir=Path(), seed=1).module
    indices = [op.rng for op in capture_module(model, tokens(2)).graph.ops if op.rng is not None]
    assert indices == list(range(7))  # embedding, and three in each of two layers


def test_a_python_function_is_a_model(tmp_path):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.w = torch.nn.Linear(4, 1)\n"
        "    def forward(self, x, y):\n        return {'loss': (self.w(x) - y).square().mean()}\n"
        "def make():\n    return M()\n"
    )
    source = resolve_model(ModelConfig(source="python:my_models:make"), base_dir=tmp_path, seed=0)
    captured = capture_module(source.module, {"x": torch.randn(2, 4), "y": torch.randn(2, 1)})
    assert set(captured.tensors) == {"w.weight", "w.bias"}
    for bad, text in (
        ("python:my_models:other", "no function"),
        ("python:absent_module:f", "absent_module"),
        ("python:x", "MODULE"),
    ):
        with pytest.raises(UserError, match=text):
            resolve_model(ModelConfig(source=bad), base_dir=tmp_path, seed=0)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ModelConfig(source="no-such-model"), "no such folder or file"),
        (ModelConfig(source="gpt2", config={"n_layers": 2}), "did you mean n_layer"),
    ],
)
def test_a_model_that_is_not_there_says_so(config, text, tmp_path):
    with pytest.raises(UserError, match=text):
        resolve_model(config, base_dir=tmp_path, seed=0)


class Loss(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.function = function

    def forward(self, x):
        return self.function(x @ self.w)


def branch(x):
    if x.sum() > 0:
        return x.mean()
    return x.sum()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.linalg.svdvals(x).sum(), ["svd", "test_capture.py", "docs/operators.md"]),
        (branch, ["test_capture.py", "x.sum() > 0", "torch.where"]),
        (lambda x: x, ["must be one float"]),
        (lambda x: "text", ["without a loss"]),
    ],
)
def test_what_cannot_be_captured_names_the_line_and_the_way_out(function, words, capfd):
    with pytest.raises(CaptureError) as caught:
        capture_module(Loss(function), {"x": torch.randn(2, 4)})
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # torch's own pages stay away


def test_inputs_that_do_not_fit_are_named():
    model = Loss(torch.mean)
    with pytest.raises(CaptureError, match="at least 2 rows"):
        capture_module(model, {"x": torch.randn(1, 4)})
    with pytest.raises(CaptureError, match="'z'"):
        capture_module(model, {"z": torch.randn(2, 4)})


def test_weights_go_back_into_the_module():
    model = Loss(torch.mean)
    write_back(model, {"w": torch.zeros(4, 4)})
    assert model.w.abs().sum() == 0
    with pytest.raises(CheckpointError, match="no value"):
        write_back(model, {})
    with pytest.raises(CheckpointError, match="does not fit"):
        write_back(model, {"w": torch.zeros(3)})


def test_two_inputs_given_as_one_tensor_stay_two():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, a, b):
            return (a * self.weight - b).sum()

    x = torch.ones(2, 3)
    graph = capture_module(Sum(), {"a": x, "b": x}).graph
    reads = {ref for op in graph.ops for ref in op.refs()}
    assert {"a", "b"} <= reads


class Regression(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.line, self.loss = nn.Linear(8, 3), loss

    def forward(self, x, y):
        return self.loss(self.line(x), y)


@pytest.mark.parametrize("loss", ["mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits"])
def test_losses_of_a_regression(loss):
    """They broadcast their arguments first, which is nothing to do for equal shapes."""
    module = Regression(getattr(nn.functional, loss))
    inputs = {"x": torch.randn(4, 8), "y": torch.rand(4, 3)}
    captured = capture_module(module, inputs)
    stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(name="sgd", lr=0.1), 1)
    for name in stage.missing():
        stage.load(name, captured.tensors[name])
    found = stage.forward(0, 0, inputs, train=True)[captured.graph.outputs[0]]
    assert torch.equal(found, module(**inputs))


def test_a_loss_of_unequal_shapes_is_refused():
    inputs = {"x": torch.randn(4, 8), "y": torch.rand(4, 1)}
    with pytest.raises(CaptureError, match=r"broadcast_tensors\.default of unequal shapes"):
        capture_module(Regression(nn.functional.mse_loss), inputs)
