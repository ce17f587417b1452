"""The batch replay against the timeline, lines in common, and what a better cluster can do."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.test_planner import instances, make_cluster, make_workload

from fusionllm.errors import PlanError
from fusionllm.schedule.batch import event_order
from fusionllm.schedule.pipeline import PIPELINES, build_programs
from fusionllm.schedule.placement import Placement, Share, Tied, build_models, replay_placement
from fusionllm.schedule.planner import place_exhaustive, plan_placement
from fusionllm.schedule.tables import Point, Tables
from fusionllm.schedule.timeline import replay


@settings(max_examples=40)
@given(instances(4, 8), st.sampled_from(sorted(PIPELINES)), st.data())
def test_batch_and_timeline_agree_and_keep_the_bounds(instance, pipeline, data):
    workload, cluster = instance
    tied = (Tied(ops=(0, len(workload.flops) - 1), num_bytes=3.0),) if data.draw(st.booleans()) else ()
    workload = msgspec.structs.replace(workload, pipeline=pipeline, tied=tied)
    count = data.draw(st.integers(1, min(len(cluster.nodes), len(workload.flops))))
    nodes = tuple(data.draw(st.permutations(range(len(cluster.nodes))))[:count])
    inner = st.sampled_from([*range(1, len(workload.flops))] or [0])
    at = data.draw(st.lists(inner, unique=True, min_size=count - 1, max_size=count - 1))
    placement = Placement(nodes=nodes, boundaries=tuple(sorted(at)))
    line = replay_placement(workload, cluster, placement)
    tables = Tables(workload, cluster)
    step_s = tables.evaluate([tables.point(placement)])[0]
    assert step_s == pytest.approx(line.step_s, rel=1e-9)
    assert line.step_s >= max(*line.busy_s, *line.link_busy_s, 0) * (1 - 1e-9)
    point = tables.point(placement)
    columns = np.array(point.nodes)[:, None], np.array(point.edges)[:, None]
    bound = tables.costs(*columns).lower_bound_s(point.depths, workload.num_microbatches)[0]
    assert bound <= step_s * (1 + 1e-9)


@settings(max_examples=25)
@given(instances(3, 5), st.data())
def test_a_faster_device_or_link_never_makes_the_best_plan_slower(instance, data):
    workload, cluster = instance
    count = len(cluster.nodes)
    a, b = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    nodes, rates = list(cluster.nodes), [list(row) for row in cluster.bandwidth_bytes_per_s]
    nodes[a] = msgspec.structs.replace(nodes[a], flops_per_s=nodes[a].flops_per_s * 1.7)
    rates[a][b] *= 3
    better = msgspec.structs.replace(cluster, nodes=tuple(nodes), bandwidth_bytes_per_s=tuple(map(tuple, rates)))
    before, after = place_exhaustive(workload, cluster).step_s, place_exhaustive(workload, better).step_s
    assert after <= before * (1 + 1e-9)
    assert plan_placement(workload, better)[0].step_s <= before * 1.03


@settings(max_examples=20)
@given(instances(4, 7), st.randoms(use_true_random=False))
def test_the_order_and_names_of_nodes_change_nothing(instance, rng):
    workload, cluster = instance
    order = list(range(len(cluster.nodes)))
    rng.shuffle(order)
    renamed = msgspec.structs.replace(
        cluster,
        nodes=tuple(msgspec.structs.replace(cluster.nodes[i], name=f"m{k}") for k, i in enumerate(order)),
        bandwidth_bytes_per_s=tuple(tuple(cluster.bandwidth_bytes_per_s[a][b] for b in order) for a in order),
    )
    assert place_exhaustive(workload, renamed).step_s == pytest.approx(place_exhaustive(workload, cluster).step_s)
    assert plan_placement(workload, renamed)[0].step_s == pytest.approx(
        plan_placement(workload, cluster)[0].step_s, rel=0.03
    )


@settings(max_examples=8)
@given(instances(10, 12), st.randoms(use_true_random=False))
def test_names_change_nothing_where_the_plan_is_found_by_search(instance, rng):
    workload, cluster = instance
    names = [node.name for node in cluster.nodes]
    rng.shuffle(names)
    nodes = tuple(msgspec.structs.replace(node, name=name) for node, name in zip(cluster.nodes, names))
    renamed = msgspec.structs.replace(cluster, nodes=nodes)
    assert plan_placement(workload, renamed) == plan_placement(workload, cluster)


def test_a_shared_uplink_carries_one_message_after_another():
    cluster = make_cluster([1, 1, 1], 1.0, latency_s=0.0)
    shared = msgspec.structs.replace(
        cluster, shares=(Share(name="site", nodes=(1,), up_bytes_per_s=1.0, down_bytes_per_s=1.0),)
    )
    workload = make_workload([0.001] * 3, [4, 4], num_microbatches=8)
    middle = Placement(nodes=(0, 1, 2), boundaries=(1, 2))
    free_s, shared_s = (replay_placement(workload, c, middle).step_s for c in (cluster, shared))
    # both neighbours' messages leave and enter through one line: at least 16 of 4 s each way
    assert shared_s >= 16 * 4 > free_s * 0.9
    assert Tables(workload, shared).evaluate([Point((0, 1, 2), (0, 1, 2, 3), (3, 2, 1))])[0] >= 16 * 4


def test_more_in_flight_hides_a_slow_link():
    cluster = make_cluster([1, 1], 1e9, latency_s=6.0)
    workload = make_workload([1.0] * 4, [1] * 3, num_microbatches=12)
    plain, ahead = (
        plan_placement(msgspec.structs.replace(workload, pipeline=name), cluster)[0] for name in ("1f1b", "1f1b-ahead")
    )
    assert ahead.step_s < plain.step_s * 0.9
    assert max(ahead.placement.depths) > 2
    programs = build_programs(f"1f1b-ahead:{','.join(map(str, ahead.placement.depths))}", 2, 12)
    assert replay(programs, *build_models(workload, cluster, ahead.placement)).step_s == pytest.approx(ahead.step_s)


def test_depths_that_deadlock_are_refused():
    with pytest.raises(PlanError, match=r"depths \[1, 2\] deadlocks"):
        event_order((1, 2), 4)
