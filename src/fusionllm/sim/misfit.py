"""Misfit: when no plan fits, which stage lacks what where, and the smallest changes that would make one fit.

On the path: Workload + Cluster -> **sentence** of a PlanError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import permutations

import msgspec
import numpy as np

from fusionllm.errors import PlanError
from fusionllm.schedule.limits import refused
from fusionllm.schedule.pipeline import build_programs, pipeline_name, stages_per_node
from fusionllm.schedule.placement import Cluster, Workload, node_memory
from fusionllm.schedule.planner import plan_placement
from fusionllm.sim.variants import with_copies, with_memory
from fusionllm.units import format_num_bytes

#: Times the memory that there is.
MOST_MEMORY = 64.0
#: Operators that are named, and pairs of sites between which a link is tried.
SHOWN = 4
MAX_GAPS = 8


def explain_misfit(
    workload: Workload, cluster: Cluster, others: Iterable[tuple[str, Callable[[], Workload]]] = ()
) -> str:
    """Which stage needs how much where, and the smallest change found that makes a plan fit.

    Args:
        others: workloads that need less, by name, such as one of smaller microbatches; the first that fits is named.
    """
    needed, there = sum(workload.state_bytes), sum(node.memory_bytes for node in cluster.nodes)
    best, low, high = None, 1.0, MOST_MEMORY
    with suppress(PlanError):
        best = plan_placement(workload, with_memory(cluster, high))[0].placement
    while best is not None and high / low > 1.03:
        middle = (low * high) ** 0.5
        try:
            best, high = plan_placement(workload, with_memory(cluster, middle))[0].placement, middle
        except PlanError:
            low = middle
    total = (
        f"State of {format_num_bytes(needed)} stands against {format_num_bytes(there)} on {len(cluster.nodes)} nodes"
    )
    lifted = _lifted(workload, cluster)
    if best is None:
        if lifted:
            return f"Smallest change found: {lifted}{_less_work(cluster, others)}"
        return f"{total}; even {high:.0f} times the memory would not do: {_why(cluster)}{_less_work(cluster, others)}"
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
        f"{_more_nodes(workload, cluster)}{f', or {lifted}' if lifted else ''}{_less_work(cluster, others)}"
    )


def _lifted(workload: Workload, cluster: Cluster) -> str:
    """Which limit besides memory to lift, one of them, so that a plan fits; empty: none."""
    for words, changed_workload, changed in _limits(workload, cluster):
        with suppress(PlanError):
            plan_placement(changed_workload, changed)
            return words
    return ""


def _limits(workload: Workload, cluster: Cluster) -> Iterator[tuple[str, Workload, Cluster]]:
    """With one of the limits lifted that have nothing to do with memory, in words."""
    if stages_per_node(workload.pipeline) > 1:
        yield "the schedule 1f1b", msgspec.structs.replace(workload, pipeline="1f1b"), cluster
    free = tuple(msgspec.structs.replace(node, refuses=()) for node in cluster.nodes)
    table = refused(workload, msgspec.structs.replace(cluster, pins=()))
    nobody = sorted({workload.op_names[int(k)] for k in np.flatnonzero(table.all(axis=0))})[:SHOWN]
    what = f"a node that runs {', '.join(nobody)}" if nobody else "nodes that refuse less"
    if table.any():
        yield what, workload, msgspec.structs.replace(cluster, nodes=free)
    if cluster.pins:
        yield "no pinned stage", workload, msgspec.structs.replace(cluster, pins=())
    sites = [node.site or node.name for node in cluster.nodes]
    gaps = dict.fromkeys((min(sites[a], sites[b]), max(sites[a], sites[b])) for a, b in _gaps(cluster))
    for pair in list(gaps)[:MAX_GAPS]:
        yield f"a link between {pair[0]} and {pair[1]}", workload, _joined(cluster, sites, {pair})
    if len(gaps) > 1:
        yield "links between all sites ([otherwise])", workload, _joined(cluster, sites, set(gaps))


def _joined(cluster: Cluster, sites: list[str], pairs: set[tuple[str, str]]) -> Cluster:
    """With the fastest rate there is, at least 1 Gbps, where these sites had no way to each other."""
    rates = [list(row) for row in cluster.bandwidth_bytes_per_s]
    rate = max(1e9 / 8, *(max(row) for row in rates))
    for a, b in _gaps(cluster):
        if (min(sites[a], sites[b]), max(sites[a], sites[b])) in pairs:
            rates[a][b] = rate
    return msgspec.structs.replace(cluster, bandwidth_bytes_per_s=tuple(map(tuple, rates)))


def _gaps(cluster: Cluster) -> list[tuple[int, int]]:
    pairs = permutations(range(len(cluster.nodes)), 2)
    return [(a, b) for a, b in pairs if cluster.bandwidth_bytes_per_s[a][b] <= 0]


def _why(cluster: Cluster) -> str:
    if cluster.pins or any(node.refuses for node in cluster.nodes) or _gaps(cluster):
        return "several limits bind together"
    return "a microbatch is too large for any of them"


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
