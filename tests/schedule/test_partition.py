"""Partitioners: always valid, balanced, at cheap cuts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import dataflows

from fusionllm.errors import PlanError, UserError
from fusionllm.ir.cuts import Cut, anchored_ops, list_cuts, split_graph
from fusionllm.schedule.partition import PARTITIONERS, equal_compute, equal_number, partition_graph, proportional


@st.composite
def chains(draw, max_ops: int = 30):
    costs = draw(st.lists(st.floats(1e-9, 1e15) | st.just(0.0), min_size=1, max_size=max_ops))
    sizes = st.integers(0, 3)
    cuts = [Cut(i, ("v",) * draw(sizes), draw(sizes) * 1000) for i in range(1, len(costs)) if draw(st.integers(0, 4))]
    return cuts, costs


def stage_costs(boundaries, costs):
    edges = [0, *boundaries, len(costs)]
    return [sum(costs[a:b]) for a, b in zip(edges, edges[1:])]


@given(chains(), st.sampled_from(sorted(PARTITIONERS)), st.data())
def test_any_count_up_to_the_operators_is_valid(chain, name, data):
    cuts, costs = chain
    num_stages = data.draw(st.integers(1, len(cuts) + 1))
    boundaries = PARTITIONERS[name](cuts, costs, num_stages)
    assert len(boundaries) == num_stages - 1
    assert boundaries == sorted(set(boundaries))
    assert set(boundaries) <= {cut.boundary for cut in cuts}
    with pytest.raises(PlanError, match=rf"{len(cuts) + 2} stages.*at most {len(cuts) + 1}"):
        PARTITIONERS[name](cuts, costs, len(cuts) + 2)


@given(chains(max_ops=9), st.integers(2, 5))
def test_the_largest_stage_is_least_or_within_the_window(chain, num_stages):
    cuts, costs = chain
    if len(cuts) + 1 < num_stages or sum(costs) == 0:
        return
    got = max(stage_costs(equal_compute(cuts, costs, num_stages), costs))
    choices = itertools.combinations([c.boundary for c in cuts], num_stages - 1)
    best = min(max(stage_costs(choice, costs)) for choice in choices)
    assert got <= max(best, 1.6 * sum(costs) / num_stages) * (1 + 1e-6)


def test_a_cheap_cut_near_the_target_is_preferred():
    cuts = [Cut(i, ("v",), 10 if i % 5 == 0 else 99) for i in range(1, 20)]
    assert equal_number(cuts, [0.0] * 20, 2) == [10]
    assert equal_number(cuts, [0.0] * 20, 4) == [5, 10, 15]
    assert equal_compute(cuts, [1.0] * 10 + [3.0] * 10, 2) == [15]


def test_one_heavy_operator_does_not_let_the_others_be_unequal():
    cuts = [Cut(i, ("v",), 1) for i in range(1, 41)]
    costs = [1.0] * 40 + [20.0]
    got = stage_costs(equal_compute(cuts, costs, 8), costs)
    assert got[-1] == 20 and sorted(got[:-1]) == [5, 5, 6, 6, 6, 6, 6]
    got = stage_costs(proportional(cuts, costs, [2, 1, 2, 1, 2, 1, 2, 1]), costs)
    assert got == [8, 4, 7, 4, 8, 4, 5, 20]


def test_stages_follow_their_shares():
    cuts = [Cut(i, ("v",), 1) for i in range(1, 100)]
    assert proportional(cuts, [1.0] * 100, [1, 2, 7]) == [10, 30]
    assert proportional(cuts[:2], [1.0] * 100, [7, 2, 1]) == [1, 2]
    with pytest.raises(PlanError, match="share 0"):
        proportional(cuts, [1.0] * 100, [1, 0])


def test_a_large_graph_is_partitioned():
    cuts = [Cut(i, ("v",), i % 7) for i in range(1, 50_000)]
    assert len(equal_compute(cuts, [1.0] * 50_000, 1000)) == 999
    costs = [1e9] + [1.0] * 49_999
    assert len(equal_compute(cuts, costs, 1000)) == 999


@given(dataflows(), st.data())
def test_a_graph_is_partitioned_and_split(drawn, data):
    num_stages = data.draw(st.integers(1, len(list_cuts(drawn, {"B": 2})) + 1))
    method = data.draw(st.sampled_from(sorted(PARTITIONERS)))
    costs = [float(i) for i, _ in enumerate(anchored_ops(drawn))]
    boundaries = partition_graph(drawn, num_stages, method, {"B": 2}, costs)
    assert len(split_graph(drawn, boundaries)) == num_stages
    assert len(partition_graph(drawn, num_stages, "equal-number", {"B": 2})) == num_stages - 1
    with pytest.raises(PlanError, match="needs the operators' costs"):
        partition_graph(drawn, num_stages, "equal-compute", {"B": 2})
    with pytest.raises(PlanError, match="costs for a graph"):
        partition_graph(drawn, num_stages, method, {"B": 2}, [*costs, 1.0])
    with pytest.raises(UserError, match="known: equal-number, equal-compute"):
        partition_graph(drawn, num_stages, "equal", {"B": 2})
