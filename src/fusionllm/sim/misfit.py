"""Misfit: when no plan fits, which stage lacks what where, and the smallest changes that would make one fit.

On the path: Workload + Cluster -> **sentence** of a PlanError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fusionllm.errors import PlanError
from fusionllm.schedule.pipeline import build_programs, pipeline_name
from fusionllm.schedule.placement import Cluster, Workload, node_memory
from fusionllm.schedule.planner import plan_placement
from fusionllm.sim.variants import with_copies, with_memory
from fusionllm.units import format_num_bytes


def explain_misfit(
    workload: Workload, cluster: Cluster, others: Iterable[tuple[str, Callable[[], Workload]]] = ()
) -> str:
    """Which stage needs how much where, and the smallest change found that makes a plan fit.

    Args:
        others: workloads that need less, by name, such as one of smaller microbatches; the first that fits is named.
    """
    needed, there = sum(workload.state_bytes), sum(node.memory_bytes for node in cluster.nodes)
    low, high, best = 1.0, 64.0, None
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        try:
            best, high = plan_placement(workload, with_memory(cluster, middle))[0].placement, middle
        except PlanError:
            low = middle
    total = (
        f"State of {format_num_bytes(needed)} stands against {format_num_bytes(there)} on {len(cluster.nodes)} nodes"
    )
    if best is None:
        why = "some node has no way to the others" if _has_gap(cluster) else "a microbatch is too large for any of them"
        return f"{total}; even {high:.0f} times the memory would not do: {why}{_less_work(cluster, others)}"
    programs = build_programs(pipeline_name(workload.pipeline, best.depths), len(best.nodes), workload.num_microbatches)
    lacks = [
        (need - cluster.nodes[best.nodes[k]].memory_bytes, k, need)
        for k, need in enumerate(node_memory(workload, best, programs))
    ]
    over, k, need = max(lacks)
    node, short = cluster.nodes[best.nodes[k]], sum(max(0.0, lack[0]) for lack in lacks)
    return (
        f"{total}. Nearest plan: stage {k} needs {format_num_bytes(need)} on {node.name}, {format_num_bytes(over)} "
        f"more than it has; smallest change found: {format_num_bytes(short)} more over "
        f"{sum(lack[0] > 0 for lack in lacks)} nodes"
        f"{_more_nodes(workload, cluster)}{_less_work(cluster, others)}"
    )


def _has_gap(cluster: Cluster) -> bool:
    pairs = [(a, b) for a in range(len(cluster.nodes)) for b in range(len(cluster.nodes)) if a != b]
    return any(cluster.bandwidth_bytes_per_s[a][b] <= 0 for a, b in pairs)


def _less_work(cluster: Cluster, others: Iterable[tuple[str, Callable[[], Workload]]]) -> str:
    for name, make in others:
        try:
            plan_placement(make(), cluster)
        except PlanError:
            continue
        return f", or {name}"
    return ""


def _more_nodes(workload: Workload, cluster: Cluster) -> str:
    """``, or 2 more nodes like big0`` where up to four more of the largest node make it fit."""
    largest = max(range(len(cluster.nodes)), key=lambda i: cluster.nodes[i].memory_bytes)
    for count in range(1, 5):
        try:
            plan_placement(workload, with_copies(cluster, largest, count))
        except PlanError:
            continue
        return f", or {count} more node{'s' * (count > 1)} like {cluster.nodes[largest].name}"
    return ""
