"""Placement: which nodes, in which order, with which cuts. The paper's OP-Fence and the two plain baselines.

Pure decision: a workload and a cluster in numbers go in, a Placement comes out. On the path: CostTable + Cluster ->
**Placement** -> Plan. `schedule.planner` is the better default; these are kept by name to compare with.

OP-Fence after the FusionLLM paper (Tang et al. 2024): nodes joined by fast links form a fence (Louvain communities of
the bandwidth graph), consecutive parts of the model go to one fence, so that slow links are crossed once. Inside a
fence faster nodes come first; work is in proportion to speed. Differs: fence order is greedy from the best start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec
import networkx as nx

from fusionllm.errors import PlanError
from fusionllm.ir.cuts import Cut
from fusionllm.ir.program import StageProgram
from fusionllm.schedule.partition import equal_compute, equal_number, proportional
from fusionllm.schedule.pipeline import build_programs
from fusionllm.schedule.timeline import LinkModel, StageModel, Timeline, replay

#: A backward pass computes the gradients of both operands of each product.
BACKWARD_OVER_FORWARD = 2.0


class NodeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node as the planner sees it. ``flops_per_s`` is achieved, not peak; ``memory_bytes`` is what a job may use."""

    name: str
    flops_per_s: float
    memory_bytes: float = float("inf")
    site: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes and the links between them, ``[from][to]`` by index; 0 bytes per second means no way through."""

    nodes: tuple[NodeModel, ...]
    bandwidth_bytes_per_s: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A graph in numbers, one entry per anchored operator, for one microbatch.

    Attributes:
        flops: forward. state_bytes: weights, gradients and optimizer. stash_bytes: kept for backward per microbatch.
    """

    cuts: tuple[Cut, ...]
    flops: tuple[float, ...]
    state_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]
    num_microbatches: int
    pipeline: str = "1f1b"


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Indices of nodes in path order and the boundaries between them."""

    nodes: tuple[int, ...]
    boundaries: tuple[int, ...]


def find_fences(cluster: Cluster) -> list[list[int]]:
    """Groups of nodes joined by fast links: the declared sites, or Louvain communities where a site is unknown."""
    nodes = cluster.nodes
    if all(node.site for node in nodes):
        sites: dict[str, list[int]] = {}
        for index, node in enumerate(nodes):
            sites.setdefault(node.site, []).append(index)
        return list(sites.values())
    graph: nx.Graph = nx.Graph()
    graph.add_nodes_from(range(len(nodes)))
    for a in range(len(nodes)):
        for b in range(a):
            if (rate := _both_ways(cluster, a, b)) > 0:
                graph.add_edge(a, b, weight=rate)
    if not graph.edges:
        return [[index] for index in range(len(nodes))]
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
    """All nodes, fence by fence, FLOPs in proportion to speed."""
    order = fence_order(cluster, find_fences(cluster))
    shares = [cluster.nodes[i].flops_per_s for i in order]
    return Placement(nodes=tuple(order), boundaries=tuple(proportional(workload.cuts, workload.flops, shares)))


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
    prefix = [0.0, *accumulate(workload.flops)]
    cuts = {cut.boundary: cut for cut in workload.cuts}
    edges = [0, *placement.boundaries, len(workload.flops)]
    stages = []
    for index, first, end in zip(placement.nodes, edges, edges[1:]):
        forward_s = (prefix[end] - prefix[first]) / cluster.nodes[index].flops_per_s
        stages.append(StageModel(forward_s=forward_s, backward_s=forward_s * BACKWARD_OVER_FORWARD))
    links = []
    for a, b, boundary in zip(placement.nodes, placement.nodes[1:], placement.boundaries):
        links.append(
            LinkModel(
                forward_bytes=cuts[boundary].num_bytes,
                backward_bytes=cuts[boundary].num_bytes,
                bandwidth_bytes_per_s=cluster.bandwidth_bytes_per_s[a][b],
                back_bandwidth_bytes_per_s=cluster.bandwidth_bytes_per_s[b][a],
                latency_s=max(cluster.latency_s[a][b], cluster.latency_s[b][a]),
            )
        )
    return stages, links


def replay_placement(workload: Workload, cluster: Cluster, placement: Placement) -> Timeline:
    """One step of a placement. Raises PlanError when a link is missing or a node has too little memory."""
    programs = build_programs(workload.pipeline, len(placement.nodes), workload.num_microbatches)
    check_memory(workload, cluster, placement, programs)
    return replay(programs, *build_models(workload, cluster, placement))


def check_memory(workload: Workload, cluster: Cluster, placement: Placement, programs: Sequence[StageProgram]) -> None:
    """State and the stash of the microbatches in flight must fit each node. Raises PlanError naming the worst."""
    edges = [0, *placement.boundaries, len(workload.flops)]
    for stage_index, (node_index, first, end) in enumerate(zip(placement.nodes, edges, edges[1:])):
        held = most = 0
        for action in programs[stage_index].actions:
            held += (action.kind == "F") - (action.kind == "B")
            most = max(most, held)
        needed = sum(workload.state_bytes[first:end]) + most * sum(workload.stash_bytes[first:end])
        node = cluster.nodes[node_index]
        if needed > node.memory_bytes:
            raise PlanError(
                f"stage {stage_index} needs {needed / 2**30:.1f} GiB but node {node.name} has "
                f"{node.memory_bytes / 2**30:.1f} GiB; use more stages, smaller microbatches or recompute"
            )
