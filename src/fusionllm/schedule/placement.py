"""Placement: which nodes, in which order, with which cuts. The paper's OP-Fence and the two plain baselines.

Pure decision: a workload and a cluster in numbers go in, a Placement comes out. On the path: CostTable + Cluster ->
**Placement** -> Plan. `schedule.planner` is the better default; these are kept by name to compare with.

OP-Fence after the FusionLLM paper (Tang et al. 2024): nodes joined by fast links form a fence (Louvain communities of
the bandwidth graph), consecutive parts of the model go to one fence, so that slow links are crossed once. Inside a
fence faster nodes come first; work is in proportion to speed. Differs: fence order is greedy from the best start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations
from math import inf

import networkx as nx

from fusionllm.errors import PlanError
from fusionllm.ir.cluster import BACKWARD_OVER_FORWARD
from fusionllm.ir.program import Action, StageProgram
from fusionllm.schedule.limits import check_allowed, feed_seconds
from fusionllm.schedule.nouns import (
    Cluster,
    Feed,
    NodeModel,
    Owner,
    Pin,
    Placement,
    Share,
    Tied,
    Workload,
    forward_seconds,
    link_rates,
    select_nodes,
)
from fusionllm.schedule.partition import equal_compute, equal_number, proportional
from fusionllm.schedule.pipeline import build_programs, pipeline_name, stages_per_node
from fusionllm.schedule.timeline import LinkModel, StageModel, Timeline, replay
from fusionllm.units import format_num_bytes

__all__ = [
    "BASELINES", "Cluster", "Feed", "NodeModel", "Owner", "Pin", "Placement", "Share", "Tied",
    "Workload", "build_models", "check_memory", "fence_order", "find_fences", "forward_seconds", "link_rates",
    "most_held", "node_memory", "place_equal_compute", "place_equal_number", "place_op_fence", "replay_placement",
    "select_nodes", "stage_memory", "with_chunks", "without_chunks",
]  # fmt: skip

#: Parts of a node's memory that OP-Fence fills, one after the other until all nodes hold what they get.
MEMORY_MARGINS = (1.0, 0.9, 0.8, 0.65, 0.5)


def find_fences(cluster: Cluster) -> list[list[int]]:
    """Groups of nodes joined by fast links: the declared sites, then Louvain communities of nodes without one."""
    sites: dict[str, list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        sites.setdefault(node.site, []).append(index)
    unknown = sites.pop("", [])
    return [*sites.values(), *_communities(cluster, unknown)]


def _communities(cluster: Cluster, nodes: Sequence[int]) -> list[list[int]]:
    graph: nx.Graph = nx.Graph()
    graph.add_nodes_from(nodes)
    for a, b in combinations(nodes, 2):
        if (rate := _both_ways(cluster, a, b)) > 0:
            graph.add_edge(a, b, weight=rate)
    if not graph.edges:
        return [[index] for index in nodes]
    return sorted(sorted(fence) for fence in nx.community.louvain_communities(graph, weight="weight", seed=0))


def _both_ways(cluster: Cluster, a: int, b: int) -> float:
    return min(cluster.bandwidth_bytes_per_s[a][b], cluster.bandwidth_bytes_per_s[b][a])


def fence_order(cluster: Cluster, fences: Sequence[Sequence[int]]) -> list[int]:
    """All nodes, fence by fence: from each start go to the best connected fence left; keep the best worst hop."""

    def rate(a: int, b: int) -> float:
        pairs = [_both_ways(cluster, i, j) for i in fences[a] for j in fences[b]]
        return sum(pairs) / len(pairs)

    rates = [[rate(a, b) if a != b else 0.0 for b in range(len(fences))] for a in range(len(fences))]
    paths = []
    for start in range(len(fences)):
        path = [start]
        while len(path) < len(fences):
            path.append(max(set(range(len(fences))) - set(path), key=lambda k: (rates[path[-1]][k], -k)))
        hops = [rates[a][b] for a, b in zip(path, path[1:])]
        paths.append((min(hops, default=0.0), sum(hops), path))
    best = max(paths)[2]
    return [i for k in best for i in sorted(fences[k], key=lambda i: (-cluster.nodes[i].flops_per_s, i))]


def place_equal_number(workload: Workload, cluster: Cluster) -> Placement:
    """All nodes in the order given, as many operators each."""
    order = range(len(cluster.nodes))
    return Placement(
        nodes=tuple(order), boundaries=tuple(equal_number(workload.cuts, workload.flops, len(cluster.nodes)))
    )


def place_equal_compute(workload: Workload, cluster: Cluster) -> Placement:
    """All nodes in the order given, as many FLOPs each."""
    order = range(len(cluster.nodes))
    return Placement(
        nodes=tuple(order), boundaries=tuple(equal_compute(workload.cuts, workload.flops, len(cluster.nodes)))
    )


def place_op_fence(workload: Workload, cluster: Cluster) -> Placement:
    """All nodes, fence by fence, FLOPs in proportion to speed; less for those whose memory that would exceed."""
    order = fence_order(cluster, find_fences(cluster))
    nodes = [cluster.nodes[i] for i in order]
    programs = build_programs(workload.pipeline, len(order), workload.num_microbatches) if len(order) > 1 else []
    held = most_held(programs) if stages_per_node(workload.pipeline) == 1 else []
    state, stash = ([0.0, *accumulate(kept)] for kept in (workload.state_bytes, workload.stash_bytes))
    boundaries: list[int] = []
    for margin in MEMORY_MARGINS:
        # the part of the model that a node holds, were bytes spread as FLOPs are
        most = [margin * n.memory_bytes / max(state[-1] + count * stash[-1], 1e-9) for n, count in zip(nodes, held)]
        shares = _capped_shares([node.flops_per_s for node in nodes], most or [inf] * len(nodes))
        boundaries = proportional(workload.cuts, workload.flops, shares)
        edges = [0, *boundaries, len(workload.flops)]
        needs = [state[b] - state[a] + most * (stash[b] - stash[a]) for most, a, b in zip(held, edges, edges[1:])]
        if all(need <= node.memory_bytes for need, node in zip(needs, nodes)):
            break
    return Placement(nodes=tuple(order), boundaries=tuple(boundaries))


def _capped_shares(speeds: Sequence[float], most: Sequence[float]) -> list[float]:
    """Parts of a whole in proportion to speed, none above its ``most``; if that leaves some over, all are too large."""
    if sum(most) <= 1:
        return list(most)
    low, high = 0.0, max(part / speed for part, speed in zip(most, speeds) if part < inf) if min(most) < inf else 0.0
    high = max(high, 1 / sum(speeds))
    for _ in range(60):
        level = (low + high) / 2
        low, high = (low, level) if sum(min(p, level * v) for p, v in zip(most, speeds)) >= 1 else (level, high)
    return [min(part, high * speed) for part, speed in zip(most, speeds)]


#: Placers by the name used in a run's configuration; `schedule.planner` adds ``dp``.
BASELINES: dict[str, Callable[[Workload, Cluster], Placement]] = {
    "equal-number": place_equal_number,
    "equal-compute": place_equal_compute,
    "op-fence": place_op_fence,
}


def build_models(
    workload: Workload, cluster: Cluster, placement: Placement
) -> tuple[list[StageModel], list[LinkModel]]:
    """What the timeline needs to know of a placement."""
    num_bytes = {cut.boundary: cut.num_bytes for cut in workload.cuts}
    edges = [0, *placement.boundaries, len(workload.flops)]
    sync_s = _sync_seconds(workload, cluster, placement)
    stages = []
    for stage_index, (index, first, end) in enumerate(zip(placement.nodes, edges, edges[1:])):
        forward_s = sum(forward_seconds(workload, cluster.nodes[index])[first:end])
        backward_s = forward_s * BACKWARD_OVER_FORWARD
        stages.append(
            StageModel(
                forward_s=forward_s, backward_s=backward_s, update_s=sync_s[stage_index],
                weight_s=_weight_seconds(workload, cluster.nodes[index], first, end),
            )
        )  # fmt: skip
    rate = link_rates(cluster)
    again = len(set(placement.nodes)) < len(placement.nodes)
    links = []
    for a, b, boundary in zip(placement.nodes, placement.nodes[1:], placement.boundaries):
        links.append(
            LinkModel(
                forward_bytes=num_bytes[boundary],
                backward_bytes=num_bytes[boundary],
                bandwidth_bytes_per_s=float(rate[a, b]),
                back_bandwidth_bytes_per_s=float(rate[b, a]),
                latency_s=max(cluster.latency_s[a][b], cluster.latency_s[b][a]),
                forward_shared=_lines(cluster, a, b, again),
                back_shared=_lines(cluster, b, a, again),
            )
        )
    return stages, links


def _weight_seconds(workload: Workload, node: NodeModel, first: int, end: int) -> float:
    """Of the backward of these operators: half of it, for those that have parameters."""
    seconds = forward_seconds(workload, node)
    half = BACKWARD_OVER_FORWARD / 2
    return sum(half * seconds[k] for k in range(first, end) if workload.state_bytes[k] > 0)


def _lines(cluster: Cluster, sender: int, receiver: int, again: bool) -> tuple[tuple[str, float], ...]:
    """Lines in common between two nodes, with their bytes per second; ``again``: stages share their own link too."""
    lines = []
    if again:
        names = cluster.nodes[sender].name, cluster.nodes[receiver].name
        lines.append((f"{names[0]} to {names[1]}", float(link_rates(cluster)[sender, receiver])))
    for share in cluster.shares:
        if (sender in share.nodes) and (receiver not in share.nodes):
            lines.append((f"{share.name} up", share.up_bytes_per_s))
        elif (receiver in share.nodes) and (sender not in share.nodes):
            lines.append((f"{share.name} down", share.down_bytes_per_s))
    return tuple(lines)


def _sync_seconds(workload: Workload, cluster: Cluster, placement: Placement) -> list[float]:
    """Seconds each stage exchanges gradients of tied parameters with the other holder, once a step."""
    seconds = [0.0] * len(placement.nodes)
    rate = link_rates(cluster) if workload.tied else None
    for tied in workload.tied:
        a, b = (bisect_right(placement.boundaries, op) for op in (tied.ops[0], tied.ops[-1]))
        first, last = placement.nodes[a], placement.nodes[b]
        if rate is None or first == last:
            continue
        slowest = float(min(rate[first, last], rate[last, first]))
        latency_s = max(cluster.latency_s[first][last], cluster.latency_s[last][first])
        for stage_index in (a, b):
            seconds[stage_index] += tied.num_bytes / slowest + latency_s if slowest > 0 else inf
    return seconds


def replay_placement(workload: Workload, cluster: Cluster, placement: Placement) -> Timeline:
    """One step of a placement.

    Raises:
        PlanError: a link is missing, a node has too little memory, or it may not run what it got.
    """
    name = pipeline_name(workload.pipeline, placement.depths)
    programs = build_programs(name, len(placement.nodes), workload.num_microbatches)
    check_allowed(workload, cluster, placement)
    check_memory(workload, cluster, placement, programs)
    line = replay(programs, *build_models(workload, cluster, placement))
    return line.with_feed(feed_seconds(workload, cluster, placement))


def with_chunks(workload: Workload, placement: Placement) -> Placement:
    """The placement as the workload's pipeline schedule wants it: every node's share in several stages if interleaved.

    Raises:
        PlanError: too few places to cut, or a single node.
    """
    chunks = stages_per_node(workload.pipeline)
    if chunks == 1 or len(set(placement.nodes)) < len(placement.nodes):
        return placement
    if len(placement.nodes) == 1:
        raise PlanError(f"{workload.pipeline} on one node has nothing to overlap; use 1f1b")
    edges = [0, *placement.boundaries, len(workload.flops)]
    shares = [max(sum(workload.flops[a:b]) / chunks, 1e-9) for a, b in zip(edges, edges[1:])]
    boundaries = proportional(workload.cuts, workload.flops, shares * chunks)
    return Placement(nodes=placement.nodes * chunks, boundaries=tuple(boundaries))


def without_chunks(placement: Placement, num_ops: int) -> Placement:
    """One stage per node, as large as all it has: what searches compare an interleaved placement with."""
    count = len(set(placement.nodes))
    if count == len(placement.nodes):
        return placement
    edges = [0, *placement.boundaries, num_ops]
    sizes = [sum(edges[k + 1] - edges[k] for k in range(node, len(edges) - 1, count)) for node in range(count)]
    return Placement(nodes=placement.nodes[:count], boundaries=tuple(accumulate(sizes[:-1])))


def stage_memory(
    workload: Workload, placement: Placement, programs: Sequence[StageProgram]
) -> list[tuple[float, float, int]]:
    """Per stage: bytes of state, bytes of one microbatch's stash, and the most microbatches it holds at once."""
    edges = [0, *placement.boundaries, len(workload.flops)]
    return [
        (sum(workload.state_bytes[a:b]), sum(workload.stash_bytes[a:b]), most)
        for most, a, b in zip(most_held(programs), edges, edges[1:])
    ]


def most_held(programs: Sequence[StageProgram]) -> list[int]:
    """Per stage, the most microbatches of which something is kept at once."""
    most: dict[int, int] = {}
    for program in programs:
        held, splits = dict.fromkeys(program.stages, 0), program.splits
        for action in program.actions:
            held[action.stage_index] += _change(action, splits)
            most[action.stage_index] = max(most.get(action.stage_index, 0), held[action.stage_index])
    return [most[stage_index] for stage_index in sorted(most)]


def _change(action: Action, splits: bool) -> int:
    """Of microbatches held: one more with a forward, one less when nothing needs what was kept of it."""
    return (action.kind == "F") - (action.kind == ("W" if splits else "B"))


def node_memory(workload: Workload, placement: Placement, programs: Sequence[StageProgram]) -> list[float]:
    """Per program: the most bytes its node holds at once, state and stash of all its stages."""
    needs = stage_memory(workload, placement, programs)
    found = []
    for program in programs:
        held, most, splits = 0.0, 0.0, program.splits
        for action in program.actions:
            held += _change(action, splits) * needs[action.stage_index][1]
            most = max(most, held)
        found.append(sum(needs[k][0] for k in program.stages) + most)
    return found


def check_memory(workload: Workload, cluster: Cluster, placement: Placement, programs: Sequence[StageProgram]) -> None:
    """State and the stash of the microbatches in flight must fit each node. Raises PlanError naming the worst."""
    needs = node_memory(workload, placement, programs)
    limits = [cluster.nodes[placement.nodes[program.stage_index]].memory_bytes for program in programs]
    lacks = [(need - limit, k) for k, (need, limit) in enumerate(zip(needs, limits)) if need > limit * (1 + 1e-12)]
    if lacks:
        k = max(lacks)[1]
        raise PlanError(
            f"stage {k} needs {format_num_bytes(needs[k])} but node {cluster.nodes[placement.nodes[k]].name} has "
            f"{format_num_bytes(limits[k])}; use more stages, smaller microbatches or recompute"
        )
