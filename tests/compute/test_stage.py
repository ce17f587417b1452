"""Stages against a plain PyTorch loop: bit for bit, in any partition, with everything that usually breaks it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusionllm.capture.export import Captured, capture_module
from fusionllm.compute import ComputeOptions, OptimConfig, learning_rate, torch_backend
from fusionllm.compute.optimizers import OPTIMIZERS
from fusionllm.compute.reference import CounterDropout
from fusionllm.compute.stage import TorchStage
from fusionllm.compute.wire import tensor_from_buffer, tensor_to_bytes
from fusionllm.errors import GraphError, RemoteProtocolError
from fusionllm.ir.cuts import anchored_ops, list_cuts, split_graph

VOCAB, WIDTH, LENGTH = 17, 8, 6


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TiedLM(nn.Module):
    """Embedding tied to the head, dropout, layer norm, a frozen layer."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.drop = nn.Dropout(p)
        self.layers[1].weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(ids))
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class ConvNet(nn.Module):
    """Batch norm: statistics that change once per microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.out = nn.Linear(4, 5)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.net(image).mean((2, 3))), label)


def made(kind: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A module and three microbatches, the last one short."""
    torch.manual_seed(1)
    if kind == "conv":
        model: nn.Module = ConvNet()
        batches = [{"image": torch.randn(n, 3, 8, 8), "label": torch.randint(5, (n,))} for n in (3, 3, 2)]
    else:
        model = TiedLM(0.2 if kind == "dropout" else 0.0)
        batches = [
            {"ids": torch.randint(VOCAB, (n, LENGTH)), "labels": torch.randint(VOCAB, (n, LENGTH))} for n in (3, 3, 1)
        ]
    return model, batches


def plain(model: nn.Module, batches: list[dict[str, torch.Tensor]], optim: OptimConfig, steps: int, seed: int):
    """Losses of a plain loop; the model is trained in place."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=optim.lr, betas=(0.9, 0.95), weight_decay=optim.weight_decay)
    rows = sum(len(next(iter(b.values()))) for b in batches)
    losses = []
    for step in range(steps):
        for index, batch in enumerate(batches):
            with CounterDropout(seed, step, index):
                loss = model(**batch)
            (loss * (len(next(iter(batch.values()))) / rows)).backward()
            losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, steps)
        if optim.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def spread(captured: Captured, num_stages: int) -> list[int]:
    """Boundaries near equal numbers of operators."""
    count = len(anchored_ops(captured.graph))
    places = [c.boundary for c in list_cuts(captured.graph, {"B": 3})]
    targets = [count * k // num_stages for k in range(1, num_stages)]
    return sorted({min(places, key=lambda p, t=t: abs(p - t)) for t in targets})


class Chain:
    """Stages in this process, all microbatches forward, then all backward. ``cut``: how many, or boundaries."""

    def __init__(self, model: nn.Module, batches, cut: int | list[int], optim: OptimConfig, steps: int, **options):
        captured = capture_module(model, batches[0])
        graphs = split_graph(captured.graph, spread(captured, cut) if isinstance(cut, int) else cut)
        assert len(graphs) == (cut if isinstance(cut, int) else len(cut) + 1)
        holders = {n: [i for i, g in enumerate(graphs) if n in g.params] for n in captured.graph.params}
        self.tied = {n: h for n, h in holders.items() if len(h) > 1}
        self.stages = [
            TorchStage(
                g, ComputeOptions(tied="microbatch", **options), optim, steps,
                tied_names=[n for n in self.tied if n in g.params],
                norm_names=[n for n in g.params if holders[n][0] == i],
            )
            for i, g in enumerate(graphs)
        ]  # fmt: skip
        for stage in self.stages:
            for name in stage.missing():
                stage.load(name, captured.tensors[name])
            assert stage.missing() == []

    def step(self, step: int, batches) -> list[float]:
        rows = sum(len(next(iter(b.values()))) for b in batches)
        losses = []
        for index, batch in enumerate(batches):
            values = dict(batch)
            for stage in self.stages:
                wanted = {v.id for v in (*stage.graph.inputs, *stage.graph.recv)}
                values |= stage.forward(step, index, {i: t for i, t in values.items() if i in wanted})
            losses.append(values[self.stages[-1].graph.outputs[0]].item())
        for index, batch in enumerate(batches):
            grads: dict[str, torch.Tensor] = {}
            for stage in reversed(self.stages):
                own = {i: grads[i] for i in stage.graph.send if i in grads}
                weight = len(next(iter(batch.values()))) / rows
                for i, g in stage.backward(step, index, own, weight).items():
                    grads[i] = grads[i] + g if i in grads else g
        parts = [stage.tied_gradients() for stage in self.stages]
        for stage in self.stages:
            stage.reduce_tied({n: [parts[i][n] for i in sorted(h, reverse=True)] for n, h in self.tied.items()})
        norm = sum(stage.grad_square_sum() for stage in self.stages) ** 0.5
        for stage in self.stages:
            stage.update(step, norm)
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: t for stage in self.stages for n, t in stage.state()[0].items()}


@pytest.mark.parametrize("kind", ["plain", "dropout", "conv"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_any_partition_equals_a_plain_loop_bit_for_bit(kind, num_stages, recompute):
    optim = OptimConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2)
    model, batches = made(kind)
    chain = Chain(model, batches, num_stages, optim, 5, seed=7, recompute=recompute)
    losses = [loss for step in range(5) for loss in chain.step(step, batches)]
    assert losses == plain(model, batches, optim, 5, 7)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in chain.weights().items():
        assert torch.equal(tensor, own[name]), name


def places_of(kind: str) -> list[int]:
    model, batches = made(kind)
    return [c.boundary for c in list_cuts(capture_module(model, batches[0]).graph, {"B": 3})]


PLACES = places_of("dropout")


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(cut=st.lists(st.sampled_from(PLACES), min_size=1, max_size=5, unique=True).map(sorted))
def test_any_boundaries_at_all_equal_a_plain_loop(cut):
    optim = OptimConfig(lr=1e-2)
    model, batches = made("dropout")
    chain = Chain(model, batches, cut, optim, 2, seed=7)
    assert [loss for step in range(2) for loss in chain.step(step, batches)] == plain(model, batches, optim, 2, 7)


@settings(max_examples=100)
@given(
    config=st.builds(
        OptimConfig,
        lr=st.floats(1e-6, 1.0),
        schedule=st.sampled_from(["constant", "cosine", "linear"]),
        warmup_steps=st.integers(0, 50),
        min_lr_ratio=st.floats(0, 1),
    ),
    num_steps=st.integers(1, 200),
    step=st.integers(0, 300),
)
def test_a_learning_rate_stays_between_its_limits(config, num_steps, step):
    rate = learning_rate(config, step, num_steps)
    assert 0 <= rate <= config.lr * (1 + 1e-12)
    if step >= config.warmup_steps:
        assert rate >= config.lr * config.min_lr_ratio * (1 - 1e-12)
        assert learning_rate(config, step + 1, num_steps) <= rate


def test_clipping_uses_the_norm_over_all_stages():
    optim = OptimConfig(lr=1e-2, clip_norm=0.1)
    model, batches = made("plain")
    chain = Chain(model, batches, 3, optim, 5)
    losses = [loss for step in range(5) for loss in chain.step(step, batches)]
    expected = plain(model, batches, optim, 5, 0)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_evaluation_changes_nothing_and_drops_nothing():
    model, batches = made("dropout")
    chain = Chain(model, batches, 1, OptimConfig(), 1)
    before = {n: t.clone() for n, t in chain.weights().items()}
    (stage,) = chain.stages
    loss = stage.forward(0, 0, batches[0], train=False)[stage.graph.outputs[0]]
    assert loss.item() == model.eval()(**batches[0]).item()
    assert all(torch.equal(before[n], t) for n, t in chain.weights().items())


def test_autocast_is_close_to_torchs():
    model, batches = made("plain")
    chain = Chain(model, batches, 2, OptimConfig(lr=1e-2), 2, precision="bfloat16")
    (first, *_) = chain.step(0, batches)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert first == pytest.approx(model(**batches[0]).item(), abs=1e-2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_cast_once_a_step_change_no_bit(name, monkeypatch):
    """Against autocast's own casts, for every microbatch; whichever optimizer changes the weights, it is seen."""
    model, batches = made("plain" if name != "muon" else "conv")
    optim = OptimConfig(name=name, lr=1e-2)

    def losses() -> list[list[float]]:
        chain = Chain(model, batches, 2, optim, 4, precision="bfloat16")
        return [chain.step(step, batches) for step in range(4)]

    shared = losses()
    assert len({step[0] for step in shared}) == 4
    monkeypatch.setattr(torch_backend, "_LOWERED", ())
    assert shared == losses()


def test_microbatches_share_the_casts_of_weights():
    model, batches = made("conv")
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
    chain, seen = Chain(model, batches, 1, OptimConfig(), 2, precision="bfloat16"), []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
                seen.extend([tuple(args[0].shape)] * (tuple(args[0].shape) in weights))
            return function(*args, **(kwargs or {}))

    for step in range(2):
        with Casts():
            chain.step(step, batches)
        assert sorted(seen) == sorted(weights), f"step {step}, {len(batches)} microbatches"
        seen.clear()


def test_optimizer_state_goes_out_and_in():
    optim = OptimConfig(lr=1e-2)
    model, batches = made("plain")
    one, two = (Chain(model, batches, n, optim, 6) for n in (2, 3))
    for step in range(3):
        one.step(step, batches)
    state = {k: t for stage in one.stages for k, t in stage.state()[1].items()}
    for stage in two.stages:
        for name, tensor in one.weights().items():
            if name in stage.graph.params:
                stage.load(name, tensor)
        stage.load_optimizer(state)
    assert one.step(3, batches) == two.step(3, batches)
    assert one.step(4, batches) == two.step(4, batches)


def test_a_tensor_that_does_not_fit_is_refused():
    model, batches = made("plain")
    (stage,) = Chain(model, batches, 1, OptimConfig(), 1).stages
    with pytest.raises(GraphError, match="no tensor"):
        stage.load("other", torch.zeros(1))
    with pytest.raises(GraphError, match="expected"):
        stage.load("norm.weight", torch.zeros(3))
    with pytest.raises(GraphError, match="shape"):
        stage.forward(0, 0, {"ids": torch.zeros(2, LENGTH + 1, dtype=torch.int64), "labels": batches[0]["labels"]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float16", "float64", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_bytes_round_trip(dtype, shape):
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    back = tensor_from_buffer(bytes(tensor_to_bytes(tensor)), dtype, shape)
    assert back.dtype == tensor.dtype and back.shape == tensor.shape and torch.equal(back, tensor)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float32", (2,), 7),
        ("float32", (-2,), 8),
        ("object", (1,), 8),
        ("int64", (1 << 40,), 8),
        ("uint8", (0, 1 << 70), 0),
        ("uint8", (1,) * 70 + (2,), 1),
    ],
)
def test_bytes_of_another_length_are_refused(dtype, shape, size):
    with pytest.raises(RemoteProtocolError):
        tensor_from_buffer(bytes(size), dtype, shape)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_learning_rates(schedule):
    config = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(config, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert all(a >= b for a, b in zip(rates[4:], rates[5:]))
    assert learning_rate(config, 20, 20) == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_a_step_that_overflows_float16_is_left_out_and_the_scale_shrinks():
    model, batches = made("plain")
    chain = Chain(model, batches, 2, OptimConfig(name="sgd", lr=1e-2), 8, precision="float16")
    before = {n: t.clone() for n, t in chain.weights().items()}
    for stage in chain.stages:
        stage.update(0, float("inf"))
    assert all(torch.equal(before[n], t) for n, t in chain.weights().items())
    assert {stage._scale for stage in chain.stages} == {2.0**15}
    chain.step(1, batches)
    assert any(not torch.equal(before[n], t) for n, t in chain.weights().items())


def test_the_scale_of_the_loss_does_not_change_the_update():
    model, batches = made("plain")
    optim = OptimConfig(name="sgd", lr=1e-2, clip_norm=0.05)
    plainly, scaled = (Chain(model, batches, 2, optim, 8, precision="float16") for _ in range(2))
    for stage in plainly.stages:
        stage._scale = 1.0
    plainly.step(0, batches)
    scaled.step(0, batches)
    for name, tensor in plainly.weights().items():
        assert torch.allclose(tensor, scaled.weights()[name], atol=1e-5), name
