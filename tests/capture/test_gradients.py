"""What a model says about gradients survives capture, and its own lines are named when something does not."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from benchmarks.coded import CodedPipeline
from torch import nn

from fusionllm.capture.export import capture_module
from fusionllm.capture.normalise import user_line
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage
from fusionllm.errors import CaptureError
from fusionllm.ir.graph import decode_graph, encode_graph
from fusionllm.ir.text import graph_to_text, parse_graph


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def equal_calls(m, x):
    h = torch.tanh(m.a(x))
    product = m.a.weight.t() @ m.b.weight
    return (m.b(m.norm(h)) * torch.sigmoid(m.norm(h)) * m.norm(h)).square().mean() * product.exp().mean()


def no_grad(m, x):
    h = m.a(x)
    with torch.no_grad():
        scale = m.b(h).exp()
    return (h * scale + m.norm(h)).mean()


def detached(m, x):
    h = m.a(x)
    return (m.b(h) * h.detach()).mean()


def detached_in_place(m, x):
    h = m.a(x)
    return (m.b(h) * (h * 2).detach_()).mean()


def straight_through(m, x):
    h = m.a(x)
    return m.b(h + (h.round() - h).detach()).square().mean()


def changed_in_place(m, x):
    h = m.a(x).clone()
    h[:, 0] = 0
    return m.b(h.add_(1)).square().mean()


def checkpointed(m, x):
    return torch.utils.checkpoint.checkpoint(m.b, m.a(x), use_reentrant=False).square().mean()


def grad_inside_no_grad(m, x):
    with torch.no_grad():
        h = m.a(x)
        with torch.enable_grad():
            h = m.b(h)
        h = h * 2
    return (m.norm(x) * h).mean()


@pytest.mark.parametrize(
    "function",
    [
        equal_calls,
        no_grad,
        detached,
        detached_in_place,
        grad_inside_no_grad,
        straight_through,
        changed_in_place,
        checkpointed,
    ],
    ids=lambda f: f.__name__,
)
def test_gradients_are_the_models_bit_for_bit(function):
    model, inputs = Model(function), {"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(1))}
    captured = capture_module(model, inputs)
    assert parse_graph(graph_to_text(captured.graph)) == decode_graph(encode_graph(captured.graph)) == captured.graph
    stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(name="sgd", lr=1.0, schedule="constant"), 1)
    for name, tensor in captured.tensors.items():
        stage.load(name, tensor)
    loss = model(**inputs)
    loss.backward()
    assert stage.forward(0, 0, inputs)[captured.graph.outputs[0]].item() == loss.item()
    stage.backward(0, 0, {}, 1.0)
    stage.update(0, 0.0)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    state = stage.state()[0]
    for name, parameter in model.named_parameters():
        assert name not in state or torch.equal(state[name], parameter), name
        assert name in state or parameter.grad is None


def own_backward(m, x):
    return m.b(Rounded.apply(m.a(x))).mean()


def test_a_backward_of_its_own_is_refused():
    with pytest.raises(CaptureError, match=r"Rounded.*\.detach\(\)"):
        capture_module(Model(own_backward), {"x": torch.randn(3, 8)})
    assert Rounded.apply(torch.ones(1)) == 1  # the way in is open again


def double(*args):
    return tuple(a * 2 for a in args[-1]) if isinstance(args[-1], tuple) else args[-1] * 2


def hooked(m, x):
    h = m.a(x)
    h.register_hook(double)
    return m.b(h).mean()


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (lambda m: m.b.register_full_backward_hook(double), r"module b \(Linear\).*double"),
        (lambda m: m.register_full_backward_pre_hook(double), r"module itself \(Model\).*double"),
        (lambda m: m.a.weight.register_hook(double), r"parameter a\.weight.*double"),
        (lambda m: m.a.bias.register_post_accumulate_grad_hook(double), r"parameter a\.bias.*double"),
        (lambda m: setattr(m, "function", hooked), r"test_gradients\.py:\d+ \(`h\.register_hook.*double"),
    ],
)
def test_hooks_on_gradients_are_refused(hook, words):
    model = Model(no_grad)
    hook(model)
    with pytest.raises(CaptureError, match=words):
        capture_module(model, {"x": torch.randn(3, 8)})
    torch.ones(1, requires_grad=True).register_hook(double)  # the way in is open again


def test_hooks_on_a_forward_are_part_of_the_model():
    model, inputs = Model(detached), {"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(1))}
    before = model(**inputs).item()
    model.a.register_forward_hook(lambda module, given, out: out * 3)
    model.b.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    captured = capture_module(model, inputs)
    stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(), 1)
    for name, tensor in captured.tensors.items():
        stage.load(name, tensor)
    found = stage.forward(0, 0, inputs)[captured.graph.outputs[0]].item()
    assert found == model(**inputs).item() != before


class Repeated(nn.Module):
    """One weight used several times in each of two stages."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)) / 4)
        self.before, self.after = before, after

    def forward(self, x):
        for _ in range(self.before + self.after):
            x = torch.tanh(x @ self.w)
        return x.square().mean()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (2, 1), (3, 3)])
def test_a_weight_used_again_and_again_in_two_stages(before, after):
    """Equal bit for bit where the first stage uses it once; else its sum is in another order, some roundings off."""
    model = Repeated(before, after)
    halves = [torch.randn(4, 16, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    captured = capture_module(model, {"x": halves[0]})
    sgd = OptimConfig(name="sgd", lr=1.0, schedule="constant")
    pipeline = CodedPipeline(captured, sgd, 1, [2 * before])  # a matmul and a tanh each
    assert all("w" in stage.graph.params for stage in pipeline.stages)
    uses = [sum(op.name == "aten.matmul.default" for op in stage.graph.ops) for stage in pipeline.stages]
    assert uses == [before, after]
    pipeline.train_step(0, [{"x": half.numpy()} for half in halves])
    for half in halves:
        (model(half) * 0.5).backward()
    gradient = model.w.grad.clone()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    found = pipeline.state()["w"]
    if before == 1:
        assert torch.equal(found, model.w)
    assert (found - model.w).abs().max() <= 4 * 2**-24 * max(gradient.abs().max(), model.w.abs().max())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x).square().mean()


def test_statistics_of_batch_norm_are_mutations():
    train = capture_module(Normed(), {"x": torch.randn(3, 4)}).graph
    assert set(train.mutations) == {f"b:norm.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("folder", ["fusionllm/examples", "torch/models", "my project"])
def test_the_line_named_is_the_users_in_any_folder(folder, tmp_path):
    path = tmp_path / folder / "my_model.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import torch\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.seq = torch.nn.Sequential(torch.nn.Linear(4, 4))\n"
        "    def forward(self, x):\n        h = self.seq(x)\n"
        "        if h.sum() > 0:\n            return h.mean()\n"
        "        return h.sum()\n"
        "class N(M):\n"
        "    def forward(self, x):\n        return torch.fft.fft(self.seq(x)).abs().mean()\n"
    )
    spec = importlib.util.spec_from_file_location("my_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for model, where in ((module.M(), "my_model.py:8"), (module.N(), "my_model.py:13")):
        with pytest.raises(CaptureError, match=where):
            capture_module(model, {"x": torch.randn(2, 4)})


def test_frames_of_torch_and_python_are_not_the_users():
    def frame(path):
        return f'  File "{path}", line 3, in f\n    code()\n'

    own = frame("/home/me/torch/model.py")
    assert user_line(own + frame(torch.nn.__file__) + frame(importlib.util.__file__)) == "torch/model.py:3 (`code()`)"
    assert user_line(frame(torch.nn.__file__) + frame("<string>")) is None
