"""Pinned stages, nodes that refuse operators, and the owner's lines: kept by every planner, counted in every replay."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.test_planner import instances, make_cluster, make_workload

from fusionllm.errors import PlanError
from fusionllm.schedule.limits import feed_seconds, refused
from fusionllm.schedule.placement import Feed, Owner, Pin, Placement, replay_placement
from fusionllm.schedule.planner import place_exhaustive, plan_placement
from fusionllm.schedule.tables import Tables


@st.composite
def limited(draw, max_nodes: int, max_ops: int):
    """An instance in which some node refuses a kind of operator, ends may be pinned, and the owner's lines count."""
    workload, cluster = draw(instances(max_nodes, max_ops))
    count, num_ops = len(cluster.nodes), len(workload.flops)
    kinds = st.sampled_from(["aten.linear.default", "aten.convolution.default"])
    ops = st.lists(st.integers(0, num_ops - 1), min_size=1, max_size=2, unique=True)
    workload = msgspec.structs.replace(
        workload,
        op_names=tuple(draw(kinds) for _ in range(num_ops)),
        feeds=tuple(Feed(ops=tuple(draw(ops)), num_bytes=draw(st.floats(0, 20))) for _ in range(2)),
    )
    nodes = list(cluster.nodes)
    at = draw(st.integers(0, count - 1))
    nodes[at] = msgspec.structs.replace(nodes[at], refuses=draw(st.sampled_from([(), ("aten.conv*",), ("*linear*",)])))
    members = st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(tuple)
    pins = tuple(Pin(op=op, nodes=draw(members)) for op in (0, -1) if draw(st.booleans()))
    owner = Owner(
        bandwidth_bytes_per_s=tuple(draw(st.floats(0.5, 50)) for _ in range(count)),
        line_bytes_per_s=draw(st.floats(0.5, 50)),
        beyond=draw(st.lists(st.integers(0, count - 1), unique=True).map(tuple)),
    )
    return workload, msgspec.structs.replace(cluster, nodes=tuple(nodes), pins=pins, owner=owner)


@settings(max_examples=60)
@given(limited(4, 8), st.data())
def test_batch_and_replay_agree_on_limits(instance, data):
    workload, cluster = instance
    count = data.draw(st.integers(1, min(len(cluster.nodes), len(workload.flops))))
    nodes = tuple(data.draw(st.permutations(range(len(cluster.nodes))))[:count])
    inner = st.sampled_from([*range(1, len(workload.flops))] or [0])
    at = data.draw(st.lists(inner, unique=True, min_size=count - 1, max_size=count - 1))
    placement = Placement(nodes=nodes, boundaries=tuple(sorted(at)))
    tables = Tables(workload, cluster)
    step_s = tables.evaluate([tables.point(placement)])[0]
    table = refused(workload, cluster)
    edges = [0, *placement.boundaries, len(workload.flops)]
    allowed = not any(table[node, a:b].any() for node, a, b in zip(nodes, edges, edges[1:]))
    if not allowed:
        assert step_s == np.inf
        with pytest.raises(PlanError, match=r"refuses aten|pinned to"):
            replay_placement(workload, cluster, placement)
        return
    line = replay_placement(workload, cluster, placement)
    assert step_s == pytest.approx(line.step_s, rel=1e-9)
    assert line.step_s >= line.feed_s == feed_seconds(workload, cluster, placement)


@settings(max_examples=25)
@given(limited(3, 6))
def test_the_planner_keeps_limits_and_stays_near_the_oracle(instance):
    workload, cluster = instance
    table = refused(workload, cluster)
    try:
        oracle = place_exhaustive(workload, cluster)
    except PlanError:
        with pytest.raises(PlanError):
            plan_placement(workload, cluster)
        return
    best = plan_placement(workload, cluster)[0]
    edges = [0, *best.placement.boundaries, len(workload.flops)]
    assert not any(table[k, a:b].any() for k, a, b in zip(best.placement.nodes, edges, edges[1:]))
    assert oracle.step_s * (1 - 1e-9) <= best.step_s <= oracle.step_s * 1.25


def test_the_data_stage_stays_where_it_is_pinned():
    workload = make_workload([1.0] * 8, [1] * 7)
    cluster = make_cluster([1, 10, 10], 100)
    assert 0 not in plan_placement(workload, cluster)[0].placement.nodes
    pinned = msgspec.structs.replace(cluster, pins=(Pin(op=0, nodes=(0,)), Pin(op=-1, nodes=(0, 2))))
    nodes = plan_placement(workload, pinned)[0].placement.nodes
    assert nodes[0] == 0 and nodes[-1] == 2
    with pytest.raises(PlanError, match=r"stage 0 on n1 has the first operator, which is pinned to n0"):
        replay_placement(workload, pinned, Placement(nodes=(1, 2), boundaries=(4,)))


def test_large_inputs_draw_the_first_stage_near_the_owner():
    workload = make_workload([1.0] * 8, [1] * 7)
    workload = msgspec.structs.replace(workload, feeds=(Feed(ops=(0,), num_bytes=100.0), Feed(ops=(7,), num_bytes=0.1)))
    cluster = make_cluster([1, 1], 100)
    near = Owner(bandwidth_bytes_per_s=(1.0, 1000.0))
    best = plan_placement(workload, msgspec.structs.replace(cluster, owner=near))[0]
    assert best.placement.nodes[0] == 1
    behind = Owner(bandwidth_bytes_per_s=(1000.0, 1000.0), line_bytes_per_s=5.0, beyond=(0, 1))
    line = replay_placement(workload, msgspec.structs.replace(cluster, owner=behind), best.placement)
    assert line.step_s == line.feed_s == pytest.approx(8 * 100.1 / 5)
    assert line.bottleneck.startswith("owner's line, busy 100 %")
