"""Pipeline schedules keep every dependency, never deadlock, and hold as many microbatches as they promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionllm.errors import PlanError, UserError
from fusionllm.ir.program import parse_program, verify_programs
from fusionllm.schedule.pipeline import (
    PIPELINES,
    SIMULATED,
    build_programs,
    find_pipeline,
    forward_only,
    pipeline_name,
    stages_per_node,
)
from fusionllm.schedule.timeline import LinkModel, StageModel, replay

every_pipeline = pytest.mark.parametrize("name", PIPELINES)


def most_in_flight(program) -> int:
    held = most = 0
    for action in program.actions:
        held += (action.kind == "F") - (action.kind == "B")
        most = max(most, held)
    return most


@every_pipeline
@given(st.integers(1, 12), st.integers(1, 30))
def test_programs_finish_and_read_back(name, num_stages, num_microbatches):
    programs = build_programs(name, num_stages, num_microbatches)
    verify_programs(programs, num_microbatches)
    assert [parse_program(str(p)).actions for p in programs] == [p.actions for p in programs]
    for program in programs:
        assert program.overtakes == (name == "1f1b-ahead") and program.depth == most_in_flight(program)
        behind = num_stages - 1 - program.stage_index
        depth = {"gpipe": num_microbatches, "1f1b": 1 + behind, "1f1b-ahead": 1 + 2 * behind}[name]
        assert most_in_flight(program) == min(depth, num_microbatches)


@given(st.integers(1, 12), st.integers(1, 30))
def test_evaluation_is_forward_only(num_stages, num_microbatches):
    programs = [forward_only(stage_index, num_stages, num_microbatches) for stage_index in range(num_stages)]
    verify_programs(programs, num_microbatches, train=False)
    assert {a.kind for p in programs for a in p.actions} <= {"RECV_F", "F", "SEND_F"}


def most_held(program) -> int:
    """Microbatches of which something is still needed, all stages of the program together."""
    held = most = 0
    for action in program.actions:
        held += (action.kind == "F") - (action.kind == ("W" if program.splits else "B"))
        most = max(most, held)
    return most


seconds = st.floats(0.01, 10)


def random_costs(draw, count):
    parts = [draw(st.tuples(seconds, seconds, st.floats(0, 1))) for _ in range(count)]
    stages = [StageModel(forward_s=f, backward_s=b, weight_s=b * share) for f, b, share in parts]
    sizes = st.floats(0, 1e6)
    links = [
        LinkModel(forward_bytes=draw(sizes), backward_bytes=draw(sizes), bandwidth_bytes_per_s=1e5, latency_s=0.1)
        for _ in range(count - 1)
    ]
    return stages, links


@given(st.integers(1, 8), st.integers(1, 24), st.data())
def test_zero_bubble_keeps_every_dependency_and_its_cap(num_stages, num_microbatches, data):
    programs = build_programs("zb-h1", num_stages, num_microbatches)
    verify_programs(programs, num_microbatches)
    assert [parse_program(str(p)) for p in programs] == programs
    assert all(most_held(p) <= min(num_stages, num_microbatches) for p in programs)
    assert most_held(programs[0]) == most_held(build_programs("1f1b", num_stages, num_microbatches)[0])
    costs = random_costs(data.draw, num_stages)
    line = replay(programs, *costs)  # raises where programs deadlock
    check_order(line)
    plain = replay(build_programs("1f1b", num_stages, num_microbatches), *costs)
    assert sum(line.busy_s) == pytest.approx(sum(plain.busy_s))


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 24), st.data())
def test_interleaved_keeps_every_dependency_and_its_cap(num_nodes, chunks, num_microbatches, data):
    name, num_stages = f"1f1b-interleaved:{chunks}", num_nodes * chunks
    programs = build_programs(name, num_stages, num_microbatches)
    assert [p.stages for p in programs] == [tuple(range(k, num_stages, num_nodes)) for k in range(num_nodes)]
    verify_programs(programs, num_microbatches)
    assert [parse_program(str(p)) for p in programs] == programs
    group = max(num_nodes, num_microbatches) if num_microbatches < 2 * num_nodes else 2 * num_nodes
    for node, program in enumerate(programs):
        cap = 2 * (num_nodes - 1 - node) + (chunks - 1) * group + 1
        assert most_held(program) <= min(cap, chunks * num_microbatches)
    check_order(replay(programs, *random_costs(data.draw, num_stages)))


def check_order(line) -> None:
    """As replayed: no computation before the one it needs is done, on whichever node."""
    done = {(s.action.stage_index, s.action.kind, s.action.microbatch_index): s for spans in line.spans for s in spans}
    for (stage, kind, m), span in done.items():
        needed = {"F": (stage - 1, "F", m), "B": (stage + 1, "B", m), "W": (stage, "B", m)}.get(kind)
        if needed in done:
            assert done[needed].end_s <= span.start_s + 1e-9
        if kind == "B":
            assert done[stage, "F", m].end_s <= span.start_s + 1e-9
    for spans in line.spans:
        assert all(a.end_s <= b.start_s for a, b in zip(spans, spans[1:]))


@pytest.mark.parametrize("num_stages", [2, 4, 7])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_published_bubbles(num_stages, rounds):
    """Equal stages, forward as long as either half of the backward, free links."""
    free = LinkModel(forward_bytes=0, backward_bytes=0, bandwidth_bytes_per_s=1)
    count = num_stages * rounds

    def step_s(name, chunks=1):
        stage = StageModel(forward_s=1 / chunks, backward_s=2 / chunks, weight_s=1 / chunks)
        total = num_stages * chunks
        return replay(build_programs(name, total, count), [stage] * total, [free] * (total - 1)).step_s

    assert step_s("1f1b") == pytest.approx(3 * (count + num_stages - 1))
    assert step_s("zb-h1") == pytest.approx(3 * count + num_stages - 1)  # F + B - W
    for chunks in (2, 3):
        bubble = 3 * (num_stages - 1) / chunks
        assert step_s(f"1f1b-interleaved:{chunks}", chunks) == pytest.approx(3 * count + bubble)


def test_what_nodes_do_not_execute_is_refused_for_runs():
    for name in (*SIMULATED, "1f1b-interleaved:4"):
        with pytest.raises(UserError, match="planned and simulated, but nodes do not execute it yet; use one of"):
            find_pipeline(name)
    assert stages_per_node("1f1b-interleaved") == 2 and stages_per_node("zb-h1") == 1
    for name in ("1f1b-interleaved:1", "1f1b-interleaved:x", "1f1b-interleaved:65", "zb-h1:2"):
        with pytest.raises(UserError, match=r"1f1b-interleaved:2|takes no number"):
            build_programs(name, 4, 4)
    with pytest.raises(PlanError, match="5 stages, 2 per node"):
        build_programs("1f1b-interleaved", 5, 4)


def test_programs_as_people_read_them():
    assert str(build_programs("zb-h1", 1, 2)[0]) == "0F0 0B0 0W0 0F1 0B1 0W1 0UPDATE"
    assert str(build_programs("gpipe", 1, 2)[0]) == "0F0 0F1 0B0 0B1 0UPDATE"
    first, last = build_programs("1f1b", 2, 2)
    assert str(first) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0UPDATE"
    assert str(last) == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1UPDATE"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 30))
def test_chosen_depths_are_kept_and_read_back(drawn, num_microbatches):
    depths = sorted(drawn, reverse=True)
    name = pipeline_name("1f1b-ahead", depths)
    programs = build_programs(name, len(depths), num_microbatches)
    verify_programs(programs, num_microbatches)
    assert [most_in_flight(p) for p in programs] == [min(depth, num_microbatches) for depth in depths]
    with pytest.raises(PlanError, match="give one per stage"):
        find_pipeline(name)(0, len(depths) + 1, 4)


@pytest.mark.parametrize("name", ["1f1b-ahead:", "1f1b-ahead:0", "1f1b-ahead:3,x", "1f1b:3,2", "1f1b-ahead:1,2"])
def test_depths_that_cannot_be_are_refused(name):
    with pytest.raises(UserError, match=r"only 1f1b-ahead takes depths|deadlocks"):
        find_pipeline(name)


def test_bad_numbers_are_named():
    with pytest.raises(UserError, match="known: gpipe, 1f1b"):
        build_programs("2f2b", 2, 2)
    with pytest.raises(PlanError, match="stage 2 of 2"):
        PIPELINES["gpipe"](2, 2, 1)
    with pytest.raises(PlanError, match="0 microbatches"):
        PIPELINES["1f1b"](0, 2, 0)
