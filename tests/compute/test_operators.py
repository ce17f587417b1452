"""What each listed operator means, on every backend: forward and gradients as the plain form in ``operator_cases``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.kits.operator_cases import CASES, HEADS, Case, Held, real
from tests.kits.torch_faced import TorchFaced

from fusionllm.compute import BACKENDS, ComputeOptions, OptimConfig, load_backend
from fusionllm.errors import GraphError
from fusionllm.ir.graph import UNUSED, Arg, Buffer, Op, OpGraph, Value, decode_graph, encode_graph
from fusionllm.ir.ops import OPS
from fusionllm.ir.tensor import TensorSpec


@pytest.fixture(autouse=True)
def _has_it(request: pytest.FixtureRequest) -> None:
    """A backend that is not installed, or lacks an operator that it says it lacks, is not asked."""
    call = getattr(request.node, "callspec", None)
    if call is None or "backend" not in call.params:
        return
    backend, name = call.params["backend"], call.params.get("name")
    if backend not in ("torch", "jax"):
        pytest.importorskip(backend)
        if name is not None and name not in load_backend(backend).warm_up("cpu").operators:
            pytest.skip(f"{backend} has no {name}")


SIZES = [name for name in OPS if name.startswith("sym.")]


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


class Call:
    """One operator as a stage of its own: tensors come from elsewhere, results go elsewhere."""

    def __init__(
        self, backend: str, name: str, case: Case, results: Sequence[torch.Tensor | None], rng: int | None = None
    ):
        self.tensors: list[torch.Tensor] = []
        self.held: dict[str, torch.Tensor] = {}
        outs = tuple(UNUSED if r is None else f"out{i}" for i, r in enumerate(results))
        made = [r if r is not None else torch.zeros(()) for r in results]
        args = {key: self.encode(value) for key, value in case.args.items()}
        call = Op(name=name, args=args, outs=outs, specs=tuple(spec(r) for r in made), rng=rng)
        received = tuple(Value(f"in{i}", spec(t)) for i, t in enumerate(self.tensors))
        self.outs = [out for out in outs if out != UNUSED]
        buffers = {name: Buffer(f"b:{name}", spec(t)) for name, t in self.held.items()}
        graph = OpGraph(
            inputs=(), params={}, buffers=buffers, ops=(call,), outputs=(), recv=received, send=tuple(self.outs)
        )
        self.stage = TorchFaced(backend, decode_graph(encode_graph(graph)), ComputeOptions(), OptimConfig(), 1)
        for held, tensor in self.held.items():
            self.stage.load(held, tensor)

    def encode(self, value: Any) -> Arg:
        if isinstance(value, Held):
            name = f"held{len(self.held)}"
            self.held[name] = value.tensor
            return {"r": f"b:{name}"}
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return {"r": f"in{len(self.tensors) - 1}"}
        if isinstance(value, torch.dtype):
            return {"dt": str(value).removeprefix("torch.")}
        if isinstance(value, float) and not math.isfinite(value):
            return {"f": str(value)}
        return [self.encode(v) for v in value] if isinstance(value, list) else value

    def forward(self, step: int = 0, *, train: bool = True) -> list[torch.Tensor]:
        values = {f"in{i}": t for i, t in enumerate(self.tensors)}
        results = self.stage.forward(step, 0, values, train=train)
        return [results[out] for out in self.outs]

    def backward(self, grads: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gradients by the place of the tensor among the arguments."""
        found = self.stage.backward(0, 0, dict(zip(self.outs, grads)), 1.0)
        return {int(name.removeprefix("in")): gradient for name, gradient in found.items()}


def plain(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """(tensors that go in, results) of the plain form, recorded by autograd."""
    leaves: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    for value in case.args.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, torch.Tensor):
                leaves.append(item.clone().requires_grad_(item.is_floating_point()))
                given.append(leaves[-1])
            elif isinstance(item, Held):
                given.append(item.tensor)
    results = case.plain(*given)
    return leaves, list(results) if isinstance(results, (tuple, list)) else [results]


def test_every_listed_operator_has_a_meaning() -> None:
    assert sorted(CASES) == sorted(OPS.keys() - set(SIZES) - {"ir.dropout"})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_its_plain_form(name: str, backend: str) -> None:
    leaves, results = plain(CASES[name])
    call = Call(backend, name, CASES[name], results)
    expected = [r for r in results if r is not None]
    for one, other in zip(call.forward(), expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
    weights = [real(90 + i, *r.shape).to(r.dtype) for i, r in enumerate(expected)]
    grads = call.backward(weights)
    carrying = [(r, w) for r, w in zip(expected, weights) if r.requires_grad]
    if carrying:
        torch.autograd.backward(*map(list, zip(*carrying)))
    for index, leaf in enumerate(leaves):
        if leaf.requires_grad:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(grads[index], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_zeroes_some_and_scales_the_rest(backend: str) -> None:
    x = real(1, 100, 100)
    call = Call(backend, "ir.dropout", Case({"x": x, "p": 0.25}, lambda a: a), [x], rng=3)
    (first,), (again,), (later,), (off,) = (call.forward(), call.forward(), call.forward(1), call.forward(train=False))
    kept = first != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(first, x * kept / 0.75, rtol=1e-15, atol=0)
    assert torch.equal(first, again) and not torch.equal(first, later) and torch.equal(off, x)
    (gradient,) = call.backward([torch.ones_like(x)]).values()
    torch.testing.assert_close(gradient, kept.double() / 0.75, rtol=1e-15, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_drops_probabilities(backend: str) -> None:
    query, key, _ = HEADS
    value = torch.eye(5, dtype=torch.float64).expand(2, 4, 5, 5).contiguous()
    args = {"query": query, "key": key, "value": value, "dropout_p": 0.25}
    name = "aten.scaled_dot_product_attention.default"
    call = Call(backend, name, Case(args, lambda *_: None), [value], rng=0)
    (dropped,), (whole,) = call.forward(), call.forward(train=False)
    torch.testing.assert_close(dropped, whole * (dropped != 0) / 0.75, rtol=1e-12, atol=0)
    assert 0 < (dropped == 0).double().mean() < 0.5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["aten.lstm.input", "aten.gru.input"])
def test_a_recurrent_layer_drops_between_its_layers_only(name: str, backend: str) -> None:
    kinds, states = (4, 2) if "lstm" in name else (3, 1)
    hidden = [real(60 + i, 4, 2, 5) for i in range(states)]
    sizes = [s for width in (4, 10) for _ in range(2) for s in ((kinds * 5, width), (kinds * 5, 5))]
    args = {
        "input": real(62, 3, 2, 4), "hx": hidden if states == 2 else hidden[0],
        "params": [real(63 + i, *size) for i, size in enumerate(sizes)], "has_biases": False, "num_layers": 2,
        "dropout": 0.5, "train": True, "bidirectional": True, "batch_first": False,
    }  # fmt: skip
    results = [torch.zeros(3, 2, 10, dtype=torch.float64), *hidden]
    dropping = Call(backend, name, Case(args, lambda *_: None), results, rng=0)
    calm = Call(backend, name, Case({**args, "dropout": 0.0}, lambda *_: None), results)
    first, again, later, off = (
        dropping.forward(),
        dropping.forward(),
        dropping.forward(1),
        dropping.forward(train=False),
    )
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], later[0])
    assert all(map(torch.equal, off, calm.forward(train=False)))
    # the first layer's last state is before any dropout, the second layer's behind it
    torch.testing.assert_close(first[1][:2], off[1][:2], rtol=1e-12, atol=1e-12)
    assert (first[1][2:] - off[1][2:]).abs().max() > 1e-3
    function = {"aten.lstm.input": torch.lstm, "aten.gru.input": torch.gru}[name]
    whole = function(args["input"], args["hx"], args["params"], False, 2, 0.0, True, True, False)
    for one, other in zip(off, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


SIZE_CASES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "sym.add": ((3, 4), 7), "sym.sub": ((3, 4), -1), "sym.mul": ((3, 4), 12), "sym.floordiv": ((4, 3), 1),
    "sym.truediv": ((3, 4), 0.75), "sym.mod": ((4, 3), 1), "sym.eq": ((3, 3), True), "sym.ne": ((3, 3), False),
    "sym.ge": ((3, 4), False), "sym.le": ((3, 4), True), "sym.gt": ((4, 3), True), "sym.lt": ((4, 3), False),
    "sym.max": ((3, 4), 4), "sym.min": ((3, 4), 3), "sym.and": ((True, False), False), "sym.neg": ((3,), -3),
    "sym.float": ((3,), 3.0), "sym.int": ((3,), 3), "sym.not": ((True,), False),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SIZES)
def test_arithmetic_on_sizes(name: str, backend: str) -> None:
    x = Value("x", TensorSpec("float64", (3, 4)))
    given, result = SIZE_CASES.get(name, ((), 4))
    args = dict(zip(OPS[name].args, given)) if given else {"x": {"r": "x"}, "dim": 1}
    kind = {bool: "boolean", int: "int", float: "float"}[type(result)]
    dtype = {bool: "bool", int: "int64", float: "float64"}[type(result)]
    made = TensorSpec(dtype, (1,))
    fill = {"size": [1], "fill_value": {"r": "n"}, "dtype": {"dt": dtype}}
    ops = (
        Op(name=name, args=args, outs=("n",), specs=(TensorSpec(kind),)),
        Op(name="aten.full.default", args=fill, outs=("y",), specs=(made,)),
    )
    graph = decode_graph(encode_graph(OpGraph(inputs=(), params={}, ops=ops, outputs=(), recv=(x,), send=("y",))))
    stage = TorchFaced(backend, graph, ComputeOptions(), OptimConfig(), 1)
    assert stage.forward(0, 0, {"x": torch.zeros(3, 4, dtype=torch.float64)})["y"].tolist() == [result]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_an_operator_cannot_take_is_a_graph_error(backend: str) -> None:
    call = Call(backend, "aten.relu.default", Case({"self": "text"}, lambda: None), [torch.zeros(1)])
    with pytest.raises(GraphError, match=r"aten\.relu\.default"):
        call.forward()
