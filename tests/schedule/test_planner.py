"""The planner against the oracle, against the baselines, and what it leaves out."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionllm.errors import PlanError
from fusionllm.ir.cuts import Cut
from fusionllm.schedule import planner
from fusionllm.schedule.coded import propose
from fusionllm.schedule.pipeline import build_programs, stages_per_node
from fusionllm.schedule.placement import (
    BASELINES,
    Cluster,
    NodeModel,
    Placement,
    Workload,
    find_fences,
    node_memory,
    place_op_fence,
    replay_placement,
    select_nodes,
    with_chunks,
    without_chunks,
)
from fusionllm.schedule.planner import place_exhaustive, plan_placement


def make_cluster(speeds, rate, latency_s=0.001, **node) -> Cluster:
    count = len(speeds)
    rates = rate if callable(rate) else lambda a, b: rate
    return Cluster(
        nodes=tuple(NodeModel(name=f"n{i}", flops_per_s=s, **node) for i, s in enumerate(speeds)),
        bandwidth_bytes_per_s=tuple(tuple(float(rates(a, b)) for b in range(count)) for a in range(count)),
        latency_s=((latency_s,) * count,) * count,
    )


def make_workload(flops, cut_bytes, num_microbatches=8, stash=1.0, state=1.0) -> Workload:
    return Workload(
        cuts=tuple(Cut(i + 1, ("v",), int(b)) for i, b in enumerate(cut_bytes)),
        flops=tuple(flops),
        state_bytes=(state,) * len(flops),
        stash_bytes=(stash,) * len(flops),
        num_microbatches=num_microbatches,
    )


@st.composite
def instances(draw, max_nodes: int, max_ops: int):
    count, num_ops = draw(st.integers(1, max_nodes)), draw(st.integers(1, max_ops))
    speeds = draw(st.lists(st.floats(1, 10), min_size=count, max_size=count))
    rates = draw(st.lists(st.floats(0.1, 100), min_size=count * count, max_size=count * count))
    flops = draw(st.lists(st.floats(0.5, 5), min_size=num_ops, max_size=num_ops))
    cut_bytes = draw(st.lists(st.integers(0, 9), min_size=num_ops - 1, max_size=num_ops - 1))
    cluster = make_cluster(speeds, lambda a, b: rates[a * count + b], draw(st.floats(0, 1)))
    return make_workload(flops, cut_bytes, draw(st.integers(1, 12))), cluster


@settings(max_examples=25)
@given(instances(3, 6))
def test_near_the_oracle_and_never_above_a_baseline(instance):
    workload, cluster = instance
    ranked = plan_placement(workload, cluster)
    oracle = place_exhaustive(workload, cluster)
    assert oracle.step_s * (1 - 1e-9) <= ranked[0].step_s <= oracle.step_s * 1.25
    for place in BASELINES.values():
        if len(cluster.nodes) <= len(workload.flops):
            baseline = replay_placement(workload, cluster, place(workload, cluster))
            assert ranked[0].step_s <= baseline.step_s


@settings(max_examples=20)
@given(instances(6, 10), st.floats(0.01, 100))
def test_scaling_all_rates_scales_the_step(instance, factor):
    workload, cluster = instance
    faster = msgspec.structs.replace(
        cluster,
        nodes=tuple(msgspec.structs.replace(n, flops_per_s=n.flops_per_s * factor) for n in cluster.nodes),
        bandwidth_bytes_per_s=tuple(tuple(r * factor for r in row) for row in cluster.bandwidth_bytes_per_s),
        latency_s=tuple(tuple(s / factor for s in row) for row in cluster.latency_s),
    )
    before, after = (plan_placement(workload, c)[0].step_s for c in (cluster, faster))
    assert after * factor == pytest.approx(before, rel=0.05)


@settings(max_examples=25)
@given(instances(4, 10), st.sampled_from(["zb-h1", "1f1b-interleaved", "1f1b-interleaved:3"]))
def test_schedules_that_are_only_simulated_are_planned_too(instance, name):
    workload, cluster = instance
    workload = msgspec.structs.replace(workload, pipeline=name, state_bytes=(2.0,) * len(workload.flops))
    limit = 1.5 * sum(workload.state_bytes) + 4
    cluster = msgspec.structs.replace(
        cluster, nodes=tuple(msgspec.structs.replace(n, memory_bytes=limit) for n in cluster.nodes)
    )
    try:
        best = plan_placement(workload, cluster)[0]
    except PlanError:
        return
    placement = best.placement
    assert replay_placement(workload, cluster, placement).step_s == best.step_s
    programs = build_programs(name, len(placement.nodes), workload.num_microbatches)
    assert all(need <= limit * (1 + 1e-9) for need in node_memory(workload, placement, programs))
    assert len(placement.nodes) == len(set(placement.nodes)) * stages_per_node(name)
    back = without_chunks(placement, len(workload.flops))
    assert back.nodes == placement.nodes[: len(back.nodes)] and len(back.boundaries) == len(back.nodes) - 1
    for place in BASELINES.values():
        with contextlib.suppress(PlanError):
            baseline = with_chunks(workload, place(workload, cluster))
            assert best.step_s <= replay_placement(workload, cluster, baseline).step_s


def test_two_stages_of_a_node_share_its_link():
    workload = msgspec.structs.replace(make_workload([0.001] * 4, [4, 4, 4]), pipeline="1f1b-interleaved")
    placement = Placement(nodes=(0, 1, 0, 1), boundaries=(1, 2, 3))
    line = replay_placement(workload, make_cluster([1, 1], 1.0), placement)
    assert line.step_s >= 24 * 4  # 8 microbatches, 2 activations and a gradient each from node 0 to node 1
    assert set(line.link_busy_s) == {32.0}


def test_a_slow_far_node_is_left_out():
    cluster = make_cluster([10, 10, 10], lambda a, b: 0.01 if 1 in (a, b) else 1000)
    best = plan_placement(make_workload([1.0] * 12, [4] * 11), cluster)[0]
    assert best.method == "dp"
    assert sorted(best.placement.nodes) == [0, 2]


@settings(max_examples=20)
@given(instances(8, 12))
def test_no_node_by_itself_is_faster_than_the_plan(instance):
    workload, cluster = instance
    alone = []
    for node in range(len(cluster.nodes)):
        with contextlib.suppress(PlanError):
            placement = Placement(nodes=(node,), boundaries=())
            alone.append(replay_placement(workload, cluster, placement).step_s)
    with contextlib.suppress(PlanError):
        assert plan_placement(workload, cluster)[0].step_s <= min(alone, default=float("inf")) * (1 + 1e-9)


def test_fences_are_crossed_once():
    fence = [0, 1, 0, 1, 0, 1]
    cluster = make_cluster([1, 2, 3, 1, 2, 3], lambda a, b: 100 if fence[a] == fence[b] else 1)
    assert sorted(find_fences(cluster)) == [[0, 2, 4], [1, 3, 5]]
    order = [fence[i] for i in place_op_fence(make_workload([1.0] * 24, [1] * 23), cluster).nodes]
    assert order in ([0] * 3 + [1] * 3, [1] * 3 + [0] * 3)
    sited = msgspec.structs.replace(
        cluster, nodes=tuple(msgspec.structs.replace(n, site="ab"[i // 3]) for i, n in enumerate(cluster.nodes))
    )
    assert find_fences(sited) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("sited", [True, False])
def test_every_fence_by_itself_is_a_candidate_even_where_the_search_misses_it(monkeypatch, sited):
    fence = [0, 1, 0, 1, 0, 1]
    cluster = make_cluster([1, 2, 3, 1, 2, 4], lambda a, b: 100 if fence[a] == fence[b] else 1)
    if sited:
        nodes = tuple(msgspec.structs.replace(n, site="ab"[k]) for k, n in zip(fence, cluster.nodes))
        cluster = msgspec.structs.replace(cluster, nodes=nodes)
    workload = make_workload([1.0] * 12, [4] * 11)
    alone = [plan_placement(workload, select_nodes(cluster, nodes))[0].step_s for nodes in find_fences(cluster)]
    searched = planner.place_dp
    monkeypatch.setattr(planner, "place_dp", lambda w, c, others=(): searched(w, c, others) if len(c.nodes) < 6 else [])
    best = plan_placement(workload, cluster)[0]
    assert best.method == planner.ONE_FENCE and best.step_s == min(alone)
    assert replay_placement(workload, cluster, best.placement).step_s == best.step_s
    assert {fence[i] for i in best.placement.nodes} == {1}
    assert best.placement in propose(workload, cluster, [2.0, 1.0])


@settings(max_examples=20)
@given(instances(6, 12))
def test_no_step_is_shorter_than_what_bounds_a_fence(instance):
    workload, cluster = instance
    bound_s = planner._compute_seconds(workload, cluster.nodes)
    assert bound_s <= plan_placement(workload, cluster)[0].step_s * (1 + 1e-9)


def test_memory_and_missing_links_bind():
    workload = make_workload([1.0] * 8, [1] * 7, stash=0.0, state=2.0**30)
    cluster = make_cluster([1, 1], 1e9, memory_bytes=5 * 2.0**30)
    best = plan_placement(workload, cluster)[0]
    assert len(best.placement.nodes) == 2
    with pytest.raises(PlanError, match=r"stage 0 needs 8.0 GiB but node n0 has 5.0 GiB"):
        replay_placement(workload, cluster, Placement(nodes=(0,), boundaries=()))
    with pytest.raises(PlanError, match="no placement on 2 nodes fits"):
        plan_placement(workload, make_cluster([1, 1], 0, memory_bytes=5 * 2.0**30))
    with pytest.raises(PlanError, match="no nodes"):
        plan_placement(workload, make_cluster([], 0))


@settings(max_examples=20)
@given(instances(3, 6), st.sampled_from([0.125, 0.5, 4.0]))
def test_scaling_all_times_scales_the_best_plan_exactly(instance, factor):
    workload, cluster = instance
    slower = msgspec.structs.replace(
        cluster,
        nodes=tuple(msgspec.structs.replace(n, flops_per_s=n.flops_per_s / factor) for n in cluster.nodes),
        bandwidth_bytes_per_s=tuple(tuple(r / factor for r in row) for row in cluster.bandwidth_bytes_per_s),
        latency_s=tuple(tuple(s * factor for s in row) for row in cluster.latency_s),
    )
    before, after = (place_exhaustive(workload, c).step_s for c in (cluster, slower))
    assert after == pytest.approx(before * factor, rel=1e-12)


def test_a_large_cluster_is_planned():
    cluster = make_cluster([1 + i % 5 for i in range(24)], lambda a, b: 100 if a // 6 == b // 6 else 5)
    ranked = plan_placement(make_workload([1.0] * 200, [1] * 199, 32), cluster)
    assert ranked[0].step_s <= min(c.step_s for c in ranked if c.method != "dp")
