"""Every optimizer: torch's own, whatever the partition; what it is told is checked before anything runs."""

from __future__ import annotations

import inspect

import pytest
import torch
from tests.compute.test_stage import Chain, made
from torch import nn

from fusionllm.capture.export import capture_module
from fusionllm.compute import OptimConfig, ParamGroup, check_optimizer, resolve_groups
from fusionllm.compute.groups import parameter_kinds
from fusionllm.compute.optim import Optimizer, optimizer_class
from fusionllm.compute.optimizers import NO_WEIGHT_DECAY, OPTIMIZERS, group_arguments, known_options
from fusionllm.errors import GraphError, UserError

SWITCHES = {"capturable", "differentiable"}  # of CUDA graphs and of derivatives through the update


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_table_is_torchs():
    own = {
        n.lower() for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }
    assert set(OPTIMIZERS) == own - {"optimizer", "lbfgs", "sparseadam"}
    for name in OPTIMIZERS:
        signature = inspect.signature(optimizer_class(name).__init__).parameters
        theirs = {k: p.default for k, p in signature.items() if k not in {"self", "params", "lr", *SWITCHES}}
        assert ("weight_decay" in theirs) == (name not in NO_WEIGHT_DECAY)
        theirs.pop("weight_decay", None)
        assert known_options(name) == theirs, name


def config_of(name: str) -> OptimConfig:
    decay = 0.0 if name in NO_WEIGHT_DECAY else 0.1
    momentum = 0.9 if name in ("sgd", "rmsprop", "muon") else None
    return OptimConfig(name=name, lr=1e-2, weight_decay=decay, momentum=momentum, clip_norm=0.5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_partition_and_a_resume_change_nothing(name):
    model, batches = made("plain")
    optim = resolve_groups(config_of(name), capture_module(model, batches[0]).graph)
    chains = [Chain(model, batches, cut, optim, 6, seed=7) for cut in (1, 3)]
    losses = [[loss for step in range(3) for loss in chain.step(step, batches)] for chain in chains]
    assert losses[0] == losses[1]
    again = Chain(model, batches, 2, optim, 6, seed=7)
    weights = {n: t.clone() for n, t in chains[1].weights().items()}
    state = {k: t.clone() for stage in chains[1].stages for k, t in stage.state()[1].items()}
    for stage in again.stages:
        for tensor in stage.graph.held:
            stage.load(tensor, weights[tensor])
        stage.load_optimizer(state)
    for chain in (chains[0], again):
        for step in range(3, 5):
            chain.step(step, batches)
    for tensor, value in again.weights().items():
        assert torch.equal(value, chains[0].weights()[tensor]), tensor


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_torchs_own(name):
    numbers = torch.Generator().manual_seed(1)
    start = {"matrix": torch.randn(6, 4, generator=numbers), "bias": torch.randn(4, generator=numbers)}
    config = config_of(name)
    ours = {n: t.clone().requires_grad_() for n, t in start.items()}
    optimizer = Optimizer(config, ours)
    theirs = {n: t.clone().requires_grad_() for n, t in start.items()}
    kinds = {n: ("adamw" if name == "muon" and t.dim() != 2 else name) for n, t in theirs.items()}
    plain = []
    for n, t in theirs.items():
        options = {"weight_decay": config.weight_decay} if config.weight_decay else {}
        options |= {"betas": (0.9, 0.95)} if kinds[n] in ("adam", "adamw") else {}
        options |= {"momentum": 0.9} if kinds[n] in ("sgd", "rmsprop", "muon") else {}
        options |= {"adjust_lr_fn": "match_rms_adamw"} if kinds[n] == "muon" else {}
        plain.append(optimizer_class(kinds[n])([t], lr=3e-3, **options))
    for _ in range(3):
        for n in start:
            gradient = torch.randn(start[n].shape, generator=numbers)
            ours[n].grad, theirs[n].grad = gradient.clone(), gradient.clone()
        optimizer.step(3e-3)
        for one in plain:
            one.step()
        assert all(torch.equal(ours[n], theirs[n]) and not torch.equal(ours[n], start[n]) for n in start)


def test_no_parameter_at_all_is_fine():
    optimizer = Optimizer(OptimConfig(), {})
    optimizer.step(1.0)
    optimizer.load({})
    assert optimizer.state() == {}


class Small(nn.Module):
    """One of each kind; the embedding is tied to the head when asked."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layer(self.table(ids))) * self.scale
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def graph_of(tied: bool):
    ids = torch.arange(6).reshape(2, 3)
    return capture_module(Small(tied), {"ids": ids, "labels": ids}).graph


@pytest.mark.parametrize("tied", [False, True])
def test_kinds_of_parameters(tied):
    expected = {
        "table.weight": "embeddings", "layer.weight": "weights", "layer.bias": "biases", "norm.weight": "norms",
        "norm.bias": "norms", "scale": "norms", "head.weight": "head",
    }  # fmt: skip
    if tied:
        expected.pop("head.weight")
    assert parameter_kinds(graph_of(tied)) == expected


def test_weight_decay_leaves_norms_biases_and_embeddings_alone():
    graph = graph_of(False)

    def decays(config: OptimConfig) -> set[str]:
        resolved = resolve_groups(config, graph)
        shapes = {n: len(p.spec.shape) for n, p in graph.params.items()}
        return {n for n in graph.params if group_arguments(resolved, n, shapes[n])[2].get("weight_decay")}

    assert decays(OptimConfig(weight_decay=0.1)) == {"layer.weight", "head.weight"}
    assert decays(OptimConfig(weight_decay=0.1, no_decay=("biases",))) == graph.params.keys() - {"layer.bias"}
    assert decays(OptimConfig(name="sgd", weight_decay=0.1)) == graph.params.keys()
    group = ParamGroup(match=("table.*",), weight_decay=0.3)
    assert decays(OptimConfig(weight_decay=0.1, groups=(group,))) == {"layer.weight", "head.weight", "table.weight"}


def test_muon_is_for_hidden_matrices():
    graph = graph_of(False)
    resolved = resolve_groups(OptimConfig(name="muon"), graph)
    kinds = {n: group_arguments(resolved, n, len(p.spec.shape))[0] for n, p in graph.params.items()}
    assert {n for n, kind in kinds.items() if kind == "muon"} == {"layer.weight"}
    assert set(kinds.values()) == {"muon", "adamw"}


def test_a_group_has_its_own_rate():
    config = OptimConfig(name="sgd", groups=(ParamGroup(match=("b*",), lr_scale=0.5),))
    tensors = {n: torch.zeros(2, requires_grad=True) for n in ("a", "b.c")}
    optimizer = Optimizer(config, tensors)
    for tensor in tensors.values():
        tensor.grad = torch.ones(2)
    optimizer.step(0.2)
    assert tensors["a"].tolist() == [pytest.approx(-0.2)] * 2 and tensors["b.c"].tolist() == [pytest.approx(-0.1)] * 2


@pytest.mark.parametrize(
    "config, message",
    [
        (OptimConfig(name="adamv"), "did you mean adam.*known: adadelta"),
        (OptimConfig(name="lbfgs"), "known: adadelta"),
        (OptimConfig(options={"nesterof": True}, name="sgd"), "did you mean nesterov"),
        (OptimConfig(momentum=0.9), "adamw has no such option; known: amsgrad, betas"),
        (OptimConfig(name="sgd", options={"nesterov": 1}), "wants true or false"),
        (OptimConfig(name="muon", options={"ns_steps": 2.5}), "a whole number"),
        (OptimConfig(name="adafactor", options={"eps": [1]}), "wants 2 numbers"),
        (OptimConfig(weight_decay=-1.0), "at least 0"),
        (OptimConfig(groups=(ParamGroup(match=()),)), "matches nothing"),
        (OptimConfig(groups=(ParamGroup(match=("*",), name="sgd", options={"rho": 1.0}),)), "sgd has no such option"),
    ],
)
def test_what_is_wrong_is_named(config, message):
    with pytest.raises(UserError, match=message):
        check_optimizer(config)


def test_what_torch_refuses_and_what_matches_nothing():
    with pytest.raises(UserError, match="sgd refuses its options"):
        Optimizer(OptimConfig(name="sgd", options={"nesterov": True}), {"a": torch.zeros(1, requires_grad=True)})
    with pytest.raises(UserError, match=r"is 0\.1, and rprop knows none"):
        Optimizer(OptimConfig(name="rprop", weight_decay=0.1), {"a": torch.zeros(1, requires_grad=True)})
    with pytest.raises(UserError, match="matches no parameter"):
        resolve_groups(OptimConfig(groups=(ParamGroup(match=("nothing.*",)),)), graph_of(False))


@pytest.mark.parametrize("offload", [False, True])
def test_short_weights_have_masters_that_gather_small_updates(offload):
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Optimizer(OptimConfig(name="sgd", offload=offload), {"w": weight})
    values = []
    for _ in range(8):
        weight.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step(1e-3)  # a bfloat16 near 1 cannot hold so small a step
        values.append(weight[0].item())
    assert values[0] == 1.0 and values[-1] < 1.0
    state = {k: t.clone() for k, t in optimizer.state().items()}
    assert state["master/w"].dtype == torch.float32
    assert state["master/w"][0].item() == pytest.approx(1 - 8e-3, rel=1e-6)
    other = Optimizer(OptimConfig(name="sgd"), {"w": torch.ones(4, dtype=torch.bfloat16, requires_grad=True)})
    other.load(state)
    assert torch.equal(other.state()["master/w"], state["master/w"])
    with pytest.raises(GraphError, match="expected"):
        other.load({"master/w": torch.zeros(3)})
    with pytest.raises(GraphError, match="no parameter"):
        other.load({"master/x": torch.zeros(3)})


def test_a_weight_given_anew_is_what_is_updated():
    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Optimizer(OptimConfig(name="sgd"), {"w": weight})
    with torch.no_grad():
        weight.fill_(3.0)
    optimizer.reload("w")
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.step(1.0)
    assert weight.tolist() == [2.0, 2.0]
