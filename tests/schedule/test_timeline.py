"""The replay against closed forms, bounds, and its picture."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionllm.errors import PlanError
from fusionllm.ir.program import StageProgram, parse_program, verify_programs
from fusionllm.schedule.pipeline import PIPELINES, build_programs
from fusionllm.schedule.timeline import LinkModel, StageModel, Timeline, format_grid, replay

seconds = st.floats(0.001, 10)


@st.composite
def cases(draw):
    num_stages = draw(st.integers(1, 5))
    stages = [draw(st.builds(StageModel, forward_s=seconds, backward_s=seconds)) for _ in range(num_stages)]
    link = st.builds(
        LinkModel,
        forward_bytes=st.floats(0, 1e6),
        backward_bytes=st.floats(0, 1e6),
        bandwidth_bytes_per_s=st.floats(1e5, 1e8),
        latency_s=st.floats(0, 1),
    )
    links = [draw(link) for _ in range(num_stages - 1)]
    programs = build_programs(draw(st.sampled_from(sorted(PIPELINES))), num_stages, draw(st.integers(1, 10)))
    return programs, stages, links


@given(cases(), st.floats(0.1, 10))
def test_bounds_and_scaling(case, factor):
    programs, stages, links = case
    line = replay(programs, stages, links)
    count = sum(a.kind == "F" for a in programs[0].actions)
    path = sum(s.forward_s + s.backward_s for s in stages)
    path += sum(2 * k.latency_s + k.transfer_s("SEND_F") + k.transfer_s("SEND_B") for k in links)
    work = max(count * (s.forward_s + s.backward_s) for s in stages)
    assert line.step_s >= max(path, work, *line.link_busy_s, 0) * (1 - 1e-9)
    assert line.step_s <= path * count * (1 + 1e-9)
    assert all(idle >= -1e-9 for idle in line.idle_s)
    assert -1e-9 <= line.bubble < 1
    for spans in line.spans:
        assert all(a.end_s <= b.start_s for a, b in zip(spans, spans[1:]))
    slow = [StageModel(forward_s=s.forward_s * factor, backward_s=s.backward_s * factor) for s in stages]
    slower = [
        msgspec.structs.replace(
            k, latency_s=k.latency_s * factor, bandwidth_bytes_per_s=k.bandwidth_bytes_per_s / factor
        )
        for k in links
    ]
    assert replay(programs, slow, slower).step_s == pytest.approx(line.step_s * factor)


@given(cases())
def test_overtaking_keeps_order_and_memory(case):
    programs, stages, links = case
    line = replay(programs, stages, links, overtaking=True)
    for program, spans, busy_s in zip(programs, line.spans, line.busy_s):
        done = [span.action for span in spans]
        assert {*done} == {*program.actions} and (program.overtakes or done == [*program.actions])
        assert StageProgram(program.stage_index, tuple(done)).depth <= program.depth
        assert all(a.end_s <= b.start_s for a, b in zip(spans, spans[1:])) and busy_s <= line.step_s
    count = sum(action.kind == "F" for action in programs[0].actions)
    verify_programs([StageProgram(k, tuple(s.action for s in spans)) for k, spans in enumerate(line.spans)], count)


def test_a_stage_does_not_wait_for_a_late_microbatch():
    """The third stage has a gradient at 0.94 s and the next microbatch at 1.03 s; in its order it waits for the one
    after that, too."""
    stages = [StageModel(forward_s=0.08, backward_s=0.16)] * 4
    fast = LinkModel(forward_bytes=0, backward_bytes=0, bandwidth_bytes_per_s=1)
    slow = LinkModel(forward_bytes=0.4, backward_bytes=0.4, bandwidth_bytes_per_s=1, latency_s=0.03)
    programs = build_programs("1f1b-ahead", 4, 8)
    waits, goes = (replay(programs, stages, [fast, slow, fast], overtaking=on) for on in (False, True))
    assert [str(span.action) for span in waits.spans[2] if span.action.kind in "FB"][:4] == ["2F0", "2F1", "2F2", "2B0"]
    assert [str(span.action) for span in goes.spans[2] if span.action.kind in "FB"][:4] == ["2F0", "2B0", "2F1", "2F2"]
    assert goes.step_s < 0.92 * waits.step_s


@given(cases(), st.booleans())
def test_the_critical_path_adds_up_to_the_step(case, overtaking):
    programs, stages, links = case
    line = replay(programs, stages, links, overtaking=overtaking)
    path = dict(line.critical_path())
    assert sum(path.values()) == pytest.approx(line.step_s)
    known = {*(f"stage {k}" for k in range(len(stages))), *(f"link {k}-{k + 1}" for k in range(len(links)))}
    assert path.keys() <= known and list(path.values()) == sorted(path.values(), reverse=True)
    for name, seconds_s in path.items():
        if name.startswith("stage"):
            assert seconds_s <= line.busy_s[int(name.split()[1])] * (1 + 1e-9)


def test_the_critical_path_by_hand():
    """Two stages, one microbatch: 1 s forward, 4 s to the next, 2 and 3 s there, 5 s back, 2 s backward."""
    programs = build_programs("1f1b", 2, 1)
    stages = [StageModel(forward_s=1, backward_s=2), StageModel(forward_s=2, backward_s=3)]
    link = LinkModel(forward_bytes=3, backward_bytes=4, bandwidth_bytes_per_s=1, latency_s=1)
    line = replay(programs, stages, [link])
    assert line.critical_path() == [("link 0-1", 9.0), ("stage 1", 5.0), ("stage 0", 3.0)] and line.step_s == 17
    assert line.with_feed(20.0).critical_path() == [("owner's line", 20.0)]


@given(cases(), st.data())
def test_a_faster_device_or_link_is_never_slower(case, data):
    programs, stages, links = case
    before = replay(programs, stages, links).step_s
    at = data.draw(st.integers(0, len(stages) - 1))
    stages[at] = msgspec.structs.replace(stages[at], forward_s=stages[at].forward_s / 2)
    links = [msgspec.structs.replace(k, bandwidth_bytes_per_s=k.bandwidth_bytes_per_s * 3) for k in links]
    assert replay(programs, stages, links).step_s <= before * (1 + 1e-12)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (4, 4), (4, 16), (8, 32)])
def test_equal_stages_without_links_give_the_known_bubble(name, num_stages, num_microbatches):
    stage = StageModel(forward_s=1, backward_s=2)
    free = LinkModel(forward_bytes=0, backward_bytes=0, bandwidth_bytes_per_s=1)
    programs = build_programs(name, num_stages, num_microbatches)
    line = replay(programs, [stage] * num_stages, [free] * (num_stages - 1))
    assert line.step_s == pytest.approx(3 * (num_microbatches + num_stages - 1))
    assert line.bubble == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


def test_the_picture():
    link = LinkModel(forward_bytes=0, backward_bytes=0, bandwidth_bytes_per_s=1, latency_s=1)
    stage = StageModel(forward_s=1, backward_s=1, update_s=1)
    line = replay(build_programs("1f1b", 2, 2), [stage] * 2, [link])
    assert format_grid(line, 9).splitlines() == [
        "stage   0 |01...a.bU| idle 4.0 s",
        "stage   1 |..0a1bU..| idle 4.0 s",
        "step 9.0 s, bubble 44 %, stage 0, busy 56 % of the step",
    ]
    assert msgspec.json.decode(msgspec.json.encode(line), type=Timeline) == line


def test_what_cannot_be_replayed_is_named():
    stage = StageModel(forward_s=1, backward_s=1)
    dead = LinkModel(forward_bytes=1, backward_bytes=1, bandwidth_bytes_per_s=0)
    programs = build_programs("gpipe", 2, 1)
    with pytest.raises(PlanError, match="rate"):
        replay(programs, [stage] * 2, [dead])
    with pytest.raises(PlanError, match="expected n, n, n - 1"):
        replay(programs, [stage], [])
    alone = [parse_program("0RECV_B0 0F0"), parse_program("1RECV_F0 1F0")]
    with pytest.raises(PlanError, match="deadlock; waiting: 0RECV_B0 1RECV_F0"):
        replay(alone, [stage] * 2, [msgspec.structs.replace(dead, bandwidth_bytes_per_s=1)])
