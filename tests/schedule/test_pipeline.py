"""Pipeline schedules keep every dependency, never deadlock, and hold as many microbatches as they promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionllm.errors import PlanError, UserError
from fusionllm.ir.program import parse_program, verify_programs
from fusionllm.schedule.pipeline import (
    PIPELINES,
    build_programs,
    check_microbatches,
    find_pipeline,
    forward_only,
    pipeline_name,
)

every_pipeline = pytest.mark.parametrize("name", PIPELINES)


def most_in_flight(program) -> int:
    held = most = 0
    for action in program.actions:
        held += (action.kind == "F") - (action.kind == "B")
        most = max(most, held)
    return most


@every_pipeline
@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 30))
def test_programs_finish_and_read_back(name, num_stages, num_microbatches):
    programs = build_programs(name, num_stages, num_microbatches)
    verify_programs(programs, num_microbatches)
    assert [parse_program(str(p)) for p in programs] == programs
    for program in programs:
        behind = num_stages - 1 - program.stage_index
        depth = {"gpipe": num_microbatches, "1f1b": 1 + behind, "1f1b-ahead": 1 + 2 * behind}[name]
        assert most_in_flight(program) == min(depth, num_microbatches)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 30))
def test_evaluation_is_forward_only(num_stages, num_microbatches):
    programs = [forward_only(stage_index, num_stages, num_microbatches) for stage_index in range(num_stages)]
    verify_programs(programs, num_microbatches, train=False)
    assert {a.kind for p in programs for a in p.actions} <= {"RECV_F", "F", "SEND_F"}


def test_programs_as_people_read_them():
    assert str(build_programs("gpipe", 1, 2)[0]) == "0F0 0F1 0B0 0B1 0UPDATE"
    first, last = build_programs("1f1b", 2, 2)
    assert str(first) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0UPDATE"
    assert str(last) == "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1UPDATE"


@settings(deadline=None)
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
    with pytest.raises(UserError, match=r"known: gpipe|deadlocks"):
        find_pipeline(name)


def test_bad_numbers_are_named():
    check_microbatches(4, 4)
    with pytest.raises(UserError, match=r"3 microbatches for 4 stages.*num_microbatches to 4.*num_stages to 3"):
        check_microbatches(4, 3)
    with pytest.raises(UserError, match="known: gpipe, 1f1b"):
        build_programs("2f2b", 2, 2)
    with pytest.raises(PlanError, match="stage 2 of 2"):
        PIPELINES["gpipe"](2, 2, 1)
    with pytest.raises(PlanError, match="0 microbatches"):
        PIPELINES["1f1b"](0, 2, 0)
