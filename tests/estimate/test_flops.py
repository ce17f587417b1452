"""Operator costs against counts by hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from tests.strategies import dataflows

from fusionllm.errors import GraphError
from fusionllm.estimate.flops import anchored_flops, graph_costs, op_flops, summary
from fusionllm.ir.graph import Op, OpGraph, Param, Value
from fusionllm.ir.tensor import TensorSpec

B, T, D, H, V, LAYERS = 2, 128, 64, 4, 1000, 3


def spec(*shape, dtype="float32") -> TensorSpec:
    return TensorSpec(dtype, shape)


class Builder:
    """A graph line by line, shapes given by hand."""

    def __init__(self) -> None:
        self.params: dict[str, Param] = {}
        self.ops: list[Op] = []

    def param(self, name, *shape) -> str:
        self.params[name] = Param(f"p:{name}", spec(*shape))
        return f"p:{name}"

    def op(self, name, shape, /, **refs) -> str:
        args = {arg: {"r": ref} if isinstance(ref, str) else ref for arg, ref in refs.items()}
        out = f"v{len(self.ops)}"
        self.ops.append(Op(name=f"aten.{name}", args=args, outs=(out,), specs=(spec(*shape),)))
        return out

    def dense(self, x, name, fan_in, fan_out) -> str:
        """As GPT-2 does: rows flattened, addmm with weight [in, out]."""
        weight, bias = self.param(f"{name}.w", fan_in, fan_out), self.param(f"{name}.b", fan_out)
        rows = self.op("view.default", ("B*128", fan_in), self=x, size=[-1, fan_in])
        rows = self.op("addmm.default", ("B*128", fan_out), self=bias, mat1=rows, mat2=weight)
        return self.op("view.default", ("B", T, fan_out), self=rows, size=[-1, T, fan_out])

    def norm(self, x, name) -> str:
        weight, bias = self.param(f"{name}.w", D), self.param(f"{name}.b", D)
        return self.op("layer_norm.default", ("B", T, D), input=x, normalized_shape=[D], weight=weight, bias=bias)


def test_recurrent_layers_count_their_matrices():
    g = Builder()
    names = ("w_ih", "w_hh", "b_ih", "b_hh")
    params = [g.param(n, *shape) for n, shape in zip(names, ((4 * 8, 6), (4 * 8, 8), (4 * 8,), (4 * 8,)))]
    args = {"hx": [{"r": "h"}, {"r": "c"}], "params": [{"r": p} for p in params]}
    g.op("lstm.input", ("B", 5, 8), input="x", **args)
    specs = {"x": spec("B", 5, 6)} | {p.id: p.spec for p in g.params.values()} | {"h": spec(1, "B", 8)}
    specs |= {"c": spec(1, "B", 8)}
    assert op_flops(g.ops[0], specs, {"B": 3}) == 2 * 3 * 5 * (4 * 8 * 6 + 4 * 8 * 8)


def gpt2() -> OpGraph:
    """GPT-2 with tied head: LAYERS blocks of width D."""
    g = Builder()
    wte, wpe = g.param("wte", V, D), g.param("wpe", T, D)
    x = g.op("embedding.default", ("B", T, D), weight=wte, indices="ids")
    x = g.op("add.Tensor", ("B", T, D), self=x, other=g.op("slice.Tensor", (T, D), self=wpe))
    for layer in range(LAYERS):
        h = g.dense(g.norm(x, f"{layer}.ln1"), f"{layer}.qkv", D, 3 * D)
        q, k, v = (g.op("slice.Tensor", ("B", H, T, D // H), self=h) for _ in range(3))
        h = g.op("scaled_dot_product_attention.default", ("B", H, T, D // H), query=q, key=k, value=v, is_causal=True)
        x = g.op("add.Tensor", ("B", T, D), self=x, other=g.dense(h, f"{layer}.proj", D, D))
        h = g.dense(g.norm(x, f"{layer}.ln2"), f"{layer}.up", D, 4 * D)
        h = g.op("gelu.default", ("B", T, 4 * D), self=h)
        x = g.op("add.Tensor", ("B", T, D), self=x, other=g.dense(h, f"{layer}.down", 4 * D, D))
    logits = g.op("linear.default", ("B", T, V), input=g.norm(x, "ln_f"), weight=wte)
    loss = g.op("cross_entropy_loss.default", (), self=logits, target="ids")
    inputs = (Value("ids", spec("B", T, dtype="int64")),)
    return OpGraph(
        symbols={"B": 1}, inputs=inputs, params=g.params, buffers={}, ops=tuple(g.ops), outputs=(loss,)
    )  # fmt: skip


def test_gpt2_costs_two_operations_a_parameter_and_token_plus_attention():
    graph = gpt2()
    total = summary(graph, {"B": B})
    num_weights = total.num_params - graph.params["wpe"].spec.numel({})
    attention = LAYERS * 4 * B * T * T * D
    assert total.flops == pytest.approx(2 * num_weights * B * T + attention, rel=0.02)
    assert total.param_bytes == 4 * total.num_params
    assert "operators" in str(total)
    assert sum(anchored_flops(graph, {"B": B})) == pytest.approx(total.flops)


@pytest.mark.parametrize(
    ("name", "out", "operands", "flops"),
    [
        ("linear.default", (B, T, 7), {"input": (B, T, 5), "weight": (7, 5), "bias": (7,)}, 2 * B * T * 5 * 7),
        ("mm.default", (3, 7), {"self": (3, 5), "mat2": (5, 7)}, 2 * 3 * 5 * 7),
        ("bmm.default", (9, 3, 7), {"self": (9, 3, 5), "mat2": (9, 5, 7)}, 2 * 9 * 3 * 5 * 7),
        ("matmul.default", (9, 3, 7), {"self": (9, 3, 5), "other": (5, 7)}, 2 * 9 * 3 * 5 * 7),
        ("addmm.default", (3, 7), {"self": (7,), "mat1": (3, 5), "mat2": (5, 7)}, 2 * 3 * 5 * 7),
        (
            "convolution.default",
            (B, 8, 10, 10),
            {"input": (B, 6, 12, 12), "weight": (8, 3, 3, 3)},
            2 * B * 8 * 100 * 27,
        ),
        (
            "conv_transpose2d.input",
            (B, 8, 20, 20),
            {"input": (B, 6, 10, 10), "weight": (6, 8, 2, 2)},
            2 * B * 6 * 100 * 8 * 4,
        ),
        (
            "scaled_dot_product_attention.default",
            (B, H, 10, 16),
            {"query": (B, H, 10, 32), "key": (B, H, 20, 32), "value": (B, H, 20, 16)},
            2 * B * H * 10 * 20 * (32 + 16),
        ),
        ("embedding.default", (B, T, D), {"weight": (V, D), "indices": (B, T)}, 0),
        ("permute.default", (D, T), {"self": (T, D)}, 0),
        ("add.Tensor", (B, T, D), {"self": (B, T, D), "other": (D,)}, B * T * D),
        ("sum.default", (), {"self": (B, T, D)}, B * T * D),
    ],
)
def test_each_kind_of_operator(name, out, operands, flops):
    op = Op(name=f"aten.{name}", args={k: {"r": k} for k in operands}, outs=("y",), specs=(spec(*out),))
    assert op_flops(op, {k: spec(*shape) for k, shape in operands.items()}, {}) == flops


def test_operands_of_too_few_dimensions_are_named():
    op = Op(name="aten.scaled_dot_product_attention.default", args={}, outs=("y",), specs=(spec(B),))
    with pytest.raises(GraphError, match="too few dimensions"):
        op_flops(op, {}, {})


def test_a_symbol_without_a_value_is_named():
    with pytest.raises(GraphError, match="needs symbol 'B'"):
        graph_costs(gpt2(), {})


@given(dataflows())
def test_costs_are_per_operator_and_not_negative(drawn):
    ops = (msgspec.structs.replace(op, name="aten.add.Tensor") if "attention" in op.name else op for op in drawn.ops)
    drawn = msgspec.structs.replace(drawn, ops=tuple(ops))
    costs = graph_costs(drawn, {"B": 3})
    assert len(costs) == len(drawn.ops)
    assert all(c.flops >= 0 and c.output_bytes >= 0 and c.param_bytes >= 0 for c in costs)
