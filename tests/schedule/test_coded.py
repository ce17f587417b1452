"""Codecs on a placement: never more than asked for, counted where they cost, and chosen with nodes and cuts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedule.test_planner import instances, make_cluster, make_workload

from fusionllm.errors import PlanError
from fusionllm.estimate.coding import assumed_speed
from fusionllm.estimate.library import known_rates
from fusionllm.ir.codec import IDENTITY, CodecSpeed, parse_codec
from fusionllm.schedule.coded import (
    Coded,
    backward_codec,
    best_coded,
    give_codecs,
    ladder_factors,
    link_loads,
    moved_depths,
    propose,
    replay_coded,
)
from fusionllm.schedule.placement import NodeModel, Placement, replay_placement
from fusionllm.schedule.planner import plan_placement
from fusionllm.schedule.ratios import LADDER, PRETRAINED
from fusionllm.sim.codecs import speeds_of

MIB = 1 << 20


def wide(workload):
    """Cuts of at least a MiB, in rows of 256, so that codecs pay."""
    cuts = tuple(msgspec.structs.replace(cut, num_bytes=(cut.num_bytes + 1) * MIB) for cut in workload.cuts)
    return msgspec.structs.replace(workload, cuts=cuts, wire_dtype="float32", widths=(256,) * len(cuts))


@settings(max_examples=25)
@given(instances(3, 6), st.sampled_from(["deadline", "uniform-topk", "adatopk-paper", ""]))
def test_codecs_only_help_when_they_cost_no_time(instance, rule):
    workload, cluster = wide(instance[0]), instance[1]
    cluster = msgspec.structs.replace(
        cluster, bandwidth_bytes_per_s=tuple(tuple(r * MIB for r in row) for row in cluster.bandwidth_bytes_per_s)
    )
    pool = propose(workload, cluster, ladder_factors(workload))
    best = best_coded(pool, rule, workload, cluster, ratio=100)
    assert best.step_s == replay_coded(workload, cluster, best.placement, best.codecs).step_s
    dense = ((IDENTITY, IDENTITY),) * len(best.placement.boundaries)
    plain = replay_placement(workload, cluster, best.placement).step_s
    assert replay_coded(workload, cluster, best.placement, dense).step_s == plain
    if rule == "deadline":
        assert best.step_s <= plan_placement(workload, cluster)[0].step_s * 1.01 + 1e-9
        assert best.step_s <= plain * (1 + 1e-9)
    if rule == "":
        assert best.codecs == dense and best.loss((IDENTITY,)) == (0, 0)


def test_a_slow_link_is_compressed_and_a_fast_one_is_not():
    cluster = make_cluster([1, 1, 1], lambda a, b: MIB * (100 if {a, b} == {0, 1} else 0.5))
    workload = wide(make_workload([1.0] * 3, [3, 3], num_microbatches=8))
    placement = Placement(nodes=(0, 1, 2), boundaries=(1, 2))
    codecs = give_codecs("deadline", workload, cluster, placement)
    assert codecs[0] == (IDENTITY, IDENTITY)
    assert IDENTITY not in codecs[1]
    before = replay_placement(workload, cluster, placement).step_s
    assert replay_coded(workload, cluster, placement, codecs).step_s < before
    out, back = link_loads(workload, cluster, placement)[1]
    assert out.shape == (4 * MIB // 4 // 256, 256) and out.dtype == "float32"
    assert back.bandwidth_bytes_per_s == 0.5 * MIB


@pytest.mark.parametrize(
    ("ladder", "rung"), [(LADDER, "klt-ec:rate=1.3"), (LADDER[:4], "hadamard"), (PRETRAINED, "outlier:bits=6")]
)
def test_a_link_in_time_goes_down_the_ladder_while_that_is_worth_the_steps(ladder, rung):
    """One microbatch, so every second on the link is waited for: 16 dense, 40 of compute."""
    cluster = make_cluster([1, 1], 0.5 * MIB)
    workload = wide(make_workload([20.0 / 3] * 2, [3], num_microbatches=1))
    placement = Placement(nodes=(0, 1), boundaries=(1,))
    best = best_coded([placement], "deadline", workload, cluster, ladder=ladder)
    assert [[str(spec) for spec in pair] for pair in best.codecs] == [[rung, rung]]
    assert best.step_s <= best.cost_s <= best.step_s * 1.01
    assert all(backward_codec(spec).name == "tangent" for spec in best.codecs[0])


def test_the_time_of_coding_counts_on_both_ends():
    cluster = make_cluster([1, 1], MIB)
    workload = wide(make_workload([1.0] * 2, [3], num_microbatches=4))
    placement = Placement(nodes=(0, 1), boundaries=(1,))
    codecs = ((parse_codec("hadamard"), parse_codec("hadamard")),)
    free = replay_coded(workload, cluster, placement, codecs)
    slow = replay_coded(workload, cluster, placement, codecs, lambda spec, node: CodecSpeed(1e-6, 2e-6, 0.5))
    coding_s = 0.5 + 0.5 + MIB * 3e-6  # a million elements are encoded in one direction and decoded in the other
    assert slow.busy_s[0] - free.busy_s[0] == pytest.approx(4 * coding_s)
    assert slow.busy_s[1] - free.busy_s[1] == pytest.approx(4 * coding_s)


def test_assumed_speeds_are_of_known_devices():
    fast, slow = (assumed_speed(parse_codec("hadamard"), known_rates()[name]) for name in ("A100 40GB", "RTX 2080 Ti"))
    assert fast is not None and slow is not None and fast.encode_s(1000) < slow.encode_s(1000)
    t4 = known_rates()["T4"]
    assert assumed_speed(parse_codec("tangent(hadamard)"), t4) == assumed_speed(parse_codec("hadamard"), t4)
    speeds, node = speeds_of({"mine": t4}), NodeModel(name="a", flops_per_s=1.0, device="mine")
    assert speeds(parse_codec("cast"), node) == assumed_speed(parse_codec("cast"), t4)
    assert speeds(IDENTITY, msgspec.structs.replace(node, device="abacus")) is None


def test_what_cannot_be_coded_is_named():
    workload = wide(make_workload([1.0] * 2, [3]))
    with pytest.raises(PlanError, match="rate that is not above zero"):
        give_codecs("deadline", workload, make_cluster([1, 1], 0), Placement(nodes=(0, 1), boundaries=(1,)))
    with pytest.raises(PlanError, match="no placement on 1 nodes fits"):
        propose(workload, make_cluster([1], 1, memory_bytes=1.0), [1.0])
    with pytest.raises(PlanError, match="none of the placements"):
        best_coded([], "deadline", workload, make_cluster([1], 1))


def test_depths_are_those_of_stages_that_overtake():
    """Three stages behind slow lines want more microbatches in flight than twice as many as 1F1B."""
    plain_workload = make_workload([0.125, 0.11, 0.07, 0.08], [16, 16, 1])
    workload = msgspec.structs.replace(plain_workload, pipeline="1f1b-ahead")
    cluster = make_cluster([1.0] * 4, 100.0, 0.03)
    plain = Placement(nodes=(0, 1, 2, 3), boundaries=(1, 2, 3))
    codecs = ((IDENTITY, IDENTITY),) * 3
    before = Coded(placement=plain, codecs=codecs, step_s=replay_coded(workload, cluster, plain, codecs).step_s)
    after = moved_depths(before, workload, cluster)
    assert after.step_s < before.step_s and after.placement.boundaries == plain.boundaries
    assert all(a >= b for a, b in zip(after.placement.depths, after.placement.depths[1:]))
    assert after.step_s == replay_coded(workload, cluster, after.placement, codecs).step_s
    assert moved_depths(before, plain_workload, cluster) is before  # 1F1B has its own
