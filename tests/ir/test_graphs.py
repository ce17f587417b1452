"""Graphs: the verifier's rules, the text form, and that stages compute what the whole graph computes."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.strategies import dataflows, graphs

from fusionllm.errors import GraphError, PlanError
from fusionllm.ir.cuts import anchored_ids, anchored_ops, list_cuts, split_graph, trained_ids
from fusionllm.ir.graph import UNUSED, Op, OpGraph, Param, Value, decode_graph, encode_graph
from fusionllm.ir.ops import OPS
from fusionllm.ir.tensor import TensorSpec
from fusionllm.ir.text import graph_to_text, parse_graph
from fusionllm.ir.verify import verify_graph

some = settings(max_examples=60, suppress_health_check=list(HealthCheck))
SPEC = TensorSpec("float32", ("B", 4))
NAME, SCHEMA = next((n, s) for n, s in sorted(OPS.items()) if not s.rng and s.num_required >= 1)
RANDOM = next((n for n, s in sorted(OPS.items()) if s.rng), "")


def call(out: str, ref: str = "x", **changes) -> Op:
    fields = {"name": NAME, "args": {a: {"r": ref} for a in SCHEMA.args[: SCHEMA.num_required]}}
    return Op(**{**fields, "outs": (out,), "specs": (SPEC,), **changes})


def graph(*ops: Op, **changes) -> OpGraph:
    fields = {"symbols": {"B": 1}, "inputs": (Value("x", SPEC),), "params": {}, "buffers": {}, "outputs": ("y",)}
    return OpGraph(**{**fields, "ops": ops or (call("y"),), **changes})


@some
@given(graphs())
def test_text_and_json_give_the_same_graph_back(drawn):
    verify_graph(drawn)
    text = graph_to_text(drawn)
    assert parse_graph(text) == drawn
    assert graph_to_text(parse_graph(text)) == text
    assert decode_graph(encode_graph(drawn)) == drawn
    assert parse_graph(text).content_hash() == drawn.content_hash()


@some
@given(graphs(), st.data())
def test_broken_text_is_a_graph_error_or_a_graph(drawn, data):
    text = graph_to_text(drawn)
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 5)))
    torn = text[:at] + data.draw(st.text('%"[]()=:,@ \\\nab01_', max_size=3)) + text[end:]
    with contextlib.suppress(GraphError):
        verify_graph(parse_graph(torn))


def deep(levels: int):
    arg: list = []
    for _ in range(levels):
        arg = [arg]
    return arg


FIRST = SCHEMA.args[0]
BROKEN = {
    "opdag version 2": graph(version=2),
    "opset 99": graph(opset=99),
    "not in the list of operators": graph(call("y", name=NAME[:-1])),
    NAME: graph(call("y", name=NAME[:-1])),
    "has no argument 'nope'": graph(call("y", args={**call("y").args, "nope": 1})),
    "lacks the argument": graph(call("y", args={})),
    "not defined before it": graph(call("y", "z")),
    "reads value 'y'": graph(call("y", "y")),
    "defined twice": graph(call("y"), call("y")),
    "result types": graph(call("y", specs=())),
    "no result that is read": graph(call(UNUSED)),
    "names \\['Q'\\]": graph(call("y", specs=(TensorSpec("float32", ("Q",)),))),
    "unknown dtype": graph(call("y", specs=(TensorSpec("float33"),))),
    "outside 0 to": graph(call("y", specs=(TensorSpec("float32", (-1,)),))),
    "something other than integers": graph(call("y", specs=(TensorSpec("float32", ("open('x')",)),))),
    "output 'z'": graph(outputs=("z",)),
    "listed twice": graph(outputs=("y", "y")),
    "sent value 'x'": graph(send=("x",)),
    "frozen values": graph(frozen=("x",)),
    "not a buffer": graph(mutations={"b:n": "y"}),
    "expected 'p:w'": graph(params={"w": Param("p:v", TensorSpec("float32", (4,)))}),
    "sizes known in advance": graph(params={"w": Param("p:w", SPEC)}),
    "unique": graph(params={n: Param(f"p:{n}", TensorSpec("float32"), True, ("a",)) for n in "vw"}),
    "nested deeper": graph(call("y", args={**call("y").args, FIRST: deep(9)})),
    "limit is 64": graph(call("y", args={**call("y").args, FIRST: 1 << 64})),
    '"f": "inf"': graph(call("y", args={**call("y").args, FIRST: float("inf")})),
    "names dtype": graph(call("y", args={**call("y").args, FIRST: {"dt": "object"}})),
    "holds": graph(call("y", args={**call("y").args, FIRST: {"code": "1"}})),
    "does not know": graph(call("y", args={**call("y").args, FIRST: {"r": "x", "f": "nan"}})),
    "is not random": graph(call("y", rng=0)),
    "like a parameter": graph(call("p:y"), outputs=()),
    "text of": graph(call("y", scope="s" * 5000)),
    "not an identifier": graph(symbols={"B": 1, "a b": 1}),
}


@pytest.mark.parametrize("message", BROKEN)
def test_each_broken_rule_is_named(message):
    with pytest.raises(GraphError, match=message):
        verify_graph(BROKEN[message])


def test_random_operators_have_an_index():
    for chance, fine in ((0.5, False), ({"r": "x"}, False), (True, False), (0, True), (0.0, True)):
        drawn = graph(call("y", name="ir.dropout", args={"x": {"r": "x"}, "p": chance}))
        if fine:
            verify_graph(drawn)
        else:
            with pytest.raises(GraphError, match="no rng index"):
                verify_graph(drawn)


def test_random_operators_have_their_own_index():
    schema = OPS[RANDOM]
    args = {a: {"r": "x"} for a in schema.args[: schema.num_required]}
    ops = [call(out, name=RANDOM, args=args, rng=7) for out in ("y", "z")]
    with pytest.raises(GraphError, match="rng index 7 is used twice"):
        verify_graph(graph(*ops))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"format":"opdag"}', b"[" * 100_000])
def test_bytes_from_outside_are_refused(data):
    with pytest.raises(GraphError):
        decode_graph(data)


def run(graph: OpGraph, values: dict[str, object]) -> dict[str, object]:
    """Execute symbolically: every value becomes the tree of what it was computed from."""
    values = values | {t.id: t.id for t in (*graph.params.values(), *graph.buffers.values())}
    for op in graph.ops:
        inputs = tuple(values[ref] for ref in op.refs())
        values |= {out: hash((op.name, op.rng, i, inputs)) for i, out in enumerate(op.outs) if out != UNUSED}
    return values


@some
@given(dataflows(), st.data())
def test_stages_compute_what_the_graph_computes(drawn, data):
    verify_graph(drawn)
    legal = [cut.boundary for cut in list_cuts(drawn, {"B": 2})]
    assume(legal)
    boundaries = sorted(data.draw(st.lists(st.sampled_from(legal), unique=True, min_size=1, max_size=4)))
    stages = split_graph(drawn, boundaries)
    inputs = {v.id: v.id for v in drawn.inputs}
    whole = run(drawn, inputs)
    wire: dict[str, object] = {}
    outputs, mutations, owned = [], {}, []
    for stage in stages:
        verify_graph(stage)
        given = {v.id: wire[v.id] for v in stage.recv} | {v.id: inputs[v.id] for v in stage.inputs}
        values = run(stage, given)
        wire |= {id: values[id] for id in stage.send}
        outputs += stage.outputs
        mutations |= stage.mutations
        owned += anchored_ops(msgspec.structs.replace(stage, recv=()))
        made = {v.id for v in stage.recv} | {out for op in stage.ops for out in op.outs}
        assert all(values[id] == whole[id] for id in made - {UNUSED})
    assert sorted(outputs) == sorted(drawn.outputs)
    assert mutations == drawn.mutations
    assert set(wire) == {v.id for stage in stages for v in stage.recv} <= anchored_ids(drawn)
    for buffer in drawn.mutations:
        holders = [s for s in stages if any(buffer in op.refs() for op in s.ops) or buffer in s.mutations]
        assert len(holders) == 1


@some
@given(dataflows(), st.data())
def test_both_ends_of_a_link_know_which_gradients_it_carries(drawn, data):
    legal = [cut.boundary for cut in list_cuts(drawn, {"B": 2})]
    assume(legal)
    stages = split_graph(drawn, sorted(data.draw(st.sets(st.sampled_from(legal), min_size=1, max_size=4))))
    trained = trained_ids(drawn)
    for stage in stages:
        assert {v.id for v in stage.recv} - set(stage.frozen) == {v.id for v in stage.recv} & trained
        assert set(stage.send) & trained_ids(stage) == set(stage.send) & trained


def test_nothing_is_sent_back_below_the_first_trained_parameter():
    scaled = call("c", name="aten.mul.Tensor", args={"self": {"r": "b"}, "other": {"r": "p:warm"}})
    spec = TensorSpec("float32", (4,))
    params = {"cold": Param("p:cold", spec, trainable=False), "warm": Param("p:warm", spec)}
    stages = split_graph(graph(call("a", "p:cold"), call("b", "a"), scaled, call("y", "c"), params=params), [1, 2, 3])
    assert [stage.frozen for stage in stages] == [(), ("a",), ("b",), ()]
    assert [sorted(trained_ids(stage) & set(stage.send)) for stage in stages] == [[], [], ["c"], []]


@some
@given(dataflows())
def test_a_cut_lists_what_two_stages_exchange(drawn):
    for cut in list_cuts(drawn, {"B": 2}):
        _, second = split_graph(drawn, [cut.boundary])
        assert tuple(v.id for v in second.recv) == cut.values
        assert sum(v.spec.num_bytes({"B": 2}) for v in second.recv) == cut.num_bytes


@some
@given(dataflows())
def test_cutting_a_stage_again_is_cutting_the_graph(drawn):
    legal = [cut.boundary for cut in list_cuts(drawn, {"B": 2})]
    assume(len(legal) >= 2)
    once = split_graph(drawn, legal[:2])
    assert [op for s in once for op in s.ops if op in anchored_ops(drawn)] == anchored_ops(drawn)


def test_an_empty_stage_is_refused():
    ops = [call("a", "p:w"), call("y", "a")]
    drawn = graph(*ops, params={"w": Param("p:w", TensorSpec("float32", (4,)))})
    assert len(split_graph(drawn, [1])) == 2
    for boundaries in ([0], [2], [1, 1]):
        with pytest.raises(PlanError, match="fewer stages"):
            split_graph(drawn, boundaries)
