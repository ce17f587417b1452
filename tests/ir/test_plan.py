"""Plans and stage programs as text."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import plans

from fusionllm.errors import GraphError
from fusionllm.ir.graph import Param
from fusionllm.ir.plan import Plan, StagePlan, parse_plan, plan_to_text, tied_params, verify_plan
from fusionllm.ir.program import Action, StageProgram, parse_program, verify_program, verify_programs
from fusionllm.ir.tensor import TensorSpec


@given(plans())
def test_a_plan_comes_back_from_its_text_and_json(plan):
    verify_plan(plan)
    assert parse_plan(plan_to_text(plan)) == plan
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@given(plans(), st.data())
def test_a_torn_plan_is_a_graph_error_or_a_plan(plan, data):
    text = plan_to_text(plan)
    at = data.draw(st.integers(0, len(text)))
    with contextlib.suppress(GraphError):
        verify_plan(parse_plan(text[:at] + data.draw(st.text(max_size=3)) + text[at + 1 :]))


def stage(index: int, first: int, end: int) -> StagePlan:
    return StagePlan(stage_index=index, node="n", first_op=first, end_op=end, num_ops=1, flops=1.0, param_bytes=4)


@pytest.mark.parametrize(
    ("stages", "tied", "message"),
    [
        ((), {}, "0 stages"),
        ((stage(1, 0, 2),), {}, "stage 1 stands at place 0"),
        ((stage(0, 0, 2), stage(1, 3, 4)), {}, "expected from 2 on"),
        ((stage(0, 0, 0),), {}, "operators 0 to 0"),
        ((stage(0, 0, 2), stage(1, 2, 4)), {"w": (0, 2)}, "two or more of the plan"),
    ],
)
def test_a_broken_plan_is_named(stages, tied, message):
    with pytest.raises(GraphError, match=message):
        verify_plan(Plan(pipeline="1f1b", num_microbatches=4, stages=stages, tied=tied))


def test_a_plan_has_replicas_and_old_text_still_reads():
    plan = Plan(pipeline="1f1b", num_microbatches=4, stages=(stage(0, 0, 2), stage(1, 2, 4)))
    text = plan_to_text(plan)
    assert text.startswith("plan 1f1b microbatches 4 replicas 1\n")
    assert parse_plan(text.replace(" replicas 1", "")) == parse_plan(text) == plan
    with pytest.raises(GraphError, match="2 replicas; only 1 can run yet"):
        parse_plan(text.replace("replicas 1", "replicas 2"))
    for broken in (" replica 1", " replicas", " replicas 1 1", " replicas one"):
        with pytest.raises(GraphError, match="line 1"):
            parse_plan(text.replace(" replicas 1", broken))


def test_tied_params_are_those_of_several_stages():
    spec = TensorSpec("float32", (2,))
    trained, frozen = Param("p:x", spec), Param("p:x", spec, trainable=False)
    stages = [{"wte": trained, "wpe": frozen}, {"b": trained, "wpe": frozen}, {"wte": trained, "c": trained}]
    assert tied_params(stages) == {"wte": (0, 2)}
    assert Plan(pipeline="x", num_microbatches=1, stages=(stage(0, 0, 2), stage(1, 2, 4))).boundaries == [2]


@pytest.mark.parametrize("text", ["", "0F", "0UPDATE3", "0F0 1G0", "0G0", "0F-1", "F0", "0F99999999", "0W"])
def test_a_word_that_is_no_action_is_refused(text):
    with pytest.raises(GraphError):
        parse_program(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1F0 1B0 1SEND_B0 1UPDATE", "expected 1RECV_F0 first"),
        ("1RECV_F0 1F0 1B0 1SEND_B0", "does not end with UPDATE"),
        ("1RECV_F0 1F0 1UPDATE", "does not finish microbatch 0: B"),
        ("1RECV_F1 1F1 1B1 1SEND_B1 1UPDATE", "does not belong"),
        ("3F0 3UPDATE", "stages 0 to 1"),
        ("1RECV_F0 1F0 1W0 1B0 1SEND_B0 1UPDATE", "expected 1B0 first"),
        ("0F0 0SEND_F0 0RECV_B0 0B0 0UPDATE 1RECV_F0", "does not end with UPDATE"),
        ("0F0 0SEND_F0 1RECV_F0 1F0 1B0 1SEND_B0 0UPDATE 1UPDATE", "stage 0 does not finish microbatch 0: RECV_B"),
    ],
)
def test_a_broken_program_is_named(text, message):
    with pytest.raises(GraphError, match=message):
        verify_program(parse_program(text), 2, 1)


def test_microbatches_out_of_order_are_refused():
    with pytest.raises(GraphError, match="run in order"):
        verify_program(parse_program("0F1 0F0 0B1 0B0 0UPDATE"), 1, 2)


def test_a_stage_has_one_program():
    whole = parse_program("0F0 0SEND_F0 1RECV_F0 1F0 1B0 1SEND_B0 0RECV_B0 0B0 0UPDATE 1UPDATE")
    verify_programs([whole], 1)
    assert whole.stages == (0, 1) and not whole.splits
    with pytest.raises(GraphError, match="two programs"):
        verify_programs([parse_program("0F0 0SEND_F0 0RECV_B0 0B0 0UPDATE"), *[_half(1, (1, 2)), _half(2, (2,))]], 1)


def _half(first: int, stages) -> StageProgram:
    words = [f"{k}RECV_F0 {k}F0 {k}SEND_F0" for k in stages] + [f"{k}RECV_B0 {k}B0 {k}SEND_B0" for k in stages[::-1]]
    return parse_program(" ".join([*words, *(f"{k}UPDATE" for k in stages)]))


def test_a_deadlock_is_named():
    first = parse_program("0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0UPDATE")
    last = parse_program("1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1UPDATE")
    with pytest.raises(GraphError, match="deadlock; waiting: 0RECV_B0 1RECV_F1"):
        verify_programs([first, last], 2)
    assert str(StageProgram(0, (Action(0, "F", 3), Action(0, "UPDATE")))) == "0F3 0UPDATE"
