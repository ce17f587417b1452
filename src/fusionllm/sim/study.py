"""Study: a graph on a cluster, planned and explained in numbers. What `fusionllm plan` prints.

On the path: OpGraph + Cluster -> **Study**. Everything is predicted: times from rates of devices and links, memory from
shapes; nothing is run. Knows no tensor framework.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fusionllm.errors import PlanError
from fusionllm.schedule.pipeline import build_programs, pipeline_name
from fusionllm.schedule.placement import (
    BASELINES,
    Cluster,
    Placement,
    Workload,
    build_models,
    find_fences,
    node_memory,
    replay_placement,
    stage_memory,
    with_chunks,
    without_chunks,
)
from fusionllm.schedule.planner import plan_placement
from fusionllm.schedule.search import Search
from fusionllm.schedule.tables import Tables
from fusionllm.schedule.timeline import StageModel
from fusionllm.units import format_num_bytes


class StageReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage: anchored operators ``first_op`` to ``end_op``, seconds per microbatch, bytes, microbatches held."""

    node: str
    fence: str
    device: str
    first_op: int
    end_op: int
    compute_s: float
    memory_bytes: float
    limit_bytes: float
    in_flight: int


class LinkReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between a stage and the next: bytes of an activation, the rate in the direction of activations, busy share."""

    num_bytes: float
    bandwidth_bytes_per_s: float
    latency_s: float
    busy: float


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one fence and kind that the plan does not use, and why."""

    count: int
    fence: str
    device: str
    reason: str


class Study(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan and what it is measured against.

    ``sync_s``: of a step, for the gradients of tied parameters. ``others``: seconds of a step, or why there is none.
    """

    step_s: float
    sync_s: float
    pipeline: str
    num_microbatches: int
    bubble: float
    bottleneck: str
    fences: dict[str, list[str]]
    stages: tuple[StageReport, ...]
    links: tuple[LinkReport, ...]
    others: dict[str, float | str]
    left_out: tuple[LeftOut, ...]


def study(workload: Workload, cluster: Cluster) -> Study:
    """Plan and explain. Raises PlanError when nothing fits; the message says what would make it fit."""
    try:
        ranked = plan_placement(workload, cluster)
    except PlanError as error:
        raise PlanError(f"{error}. {explain_misfit(workload, cluster)}") from None
    best = ranked[0].placement
    line = replay_placement(workload, cluster, best)
    fences = [[cluster.nodes[i] for i in fence] for fence in find_fences(cluster)]
    name = pipeline_name(workload.pipeline, best.depths)
    models, _ = build_models(workload, cluster, best)
    return Study(
        step_s=line.step_s,
        sync_s=max(model.update_s for model in models),
        pipeline=name,
        num_microbatches=workload.num_microbatches,
        bubble=line.bubble,
        bottleneck=_in_names(line.bottleneck, cluster, best),
        fences={fence[0].site or f"fence {k}": [node.name for node in fence] for k, fence in enumerate(fences)},
        stages=_stage_reports(workload, cluster, best, name, models),
        links=_link_reports(workload, cluster, best, line.link_busy_s, line.step_s),
        others=compare(workload, cluster),
        left_out=explain_left_out(workload, cluster, best, line.step_s),
    )


def _in_names(bottleneck: str, cluster: Cluster, placement: Placement) -> str:
    """``link 0-1, busy ...`` with the nodes' names beside."""
    words, _, rest = bottleneck.partition(",")
    kind, _, numbers = words.partition(" ")
    nodes = [cluster.nodes[placement.nodes[int(k)]].name for k in numbers.split("-")]
    return f"{kind} {numbers} ({' to '.join(nodes)}),{rest}"


def _stage_reports(
    workload: Workload, cluster: Cluster, placement: Placement, pipeline: str, models: Sequence[StageModel]
) -> tuple[StageReport, ...]:
    programs = build_programs(pipeline, len(placement.nodes), workload.num_microbatches)
    edges = (0, *placement.boundaries, len(workload.flops))
    reports = []
    for k, (state, stash, held) in enumerate(stage_memory(workload, placement, programs)):
        node = cluster.nodes[placement.nodes[k]]
        reports.append(
            StageReport(
                node=node.name, fence=node.site, device=node.device, first_op=edges[k], end_op=edges[k + 1],
                compute_s=models[k].forward_s + models[k].backward_s, memory_bytes=state + held * stash,
                limit_bytes=node.memory_bytes, in_flight=held,
            )
        )  # fmt: skip
    return tuple(reports)


def _link_reports(
    workload: Workload, cluster: Cluster, placement: Placement, busy_s: Sequence[float], step_s: float
) -> tuple[LinkReport, ...]:
    num_bytes = {cut.boundary: cut.num_bytes for cut in workload.cuts}
    return tuple(
        LinkReport(
            num_bytes=num_bytes[boundary], bandwidth_bytes_per_s=cluster.bandwidth_bytes_per_s[a][b],
            latency_s=cluster.latency_s[a][b], busy=busy / step_s,
        )
        for a, b, boundary, busy in zip(placement.nodes, placement.nodes[1:], placement.boundaries, busy_s)
    )  # fmt: skip


def compare(workload: Workload, cluster: Cluster) -> dict[str, float | str]:
    """Seconds of a step of each baseline and of the best single fence and node, or why there is none."""
    others: dict[str, float | str] = {}
    for method, place in BASELINES.items():
        try:
            placement = with_chunks(workload, place(workload, cluster))
            others[method] = replay_placement(workload, cluster, placement).step_s
        except PlanError as error:
            others[method] = str(error)
    for title, groups in (
        ("best single fence", find_fences(cluster)),
        ("best single node", [[i] for i in _one_of_each(cluster)]),
    ):
        steps: list[float] = []
        reason = ""
        for group in groups:
            try:
                steps.append(plan_placement(workload, select_nodes(cluster, group))[0].step_s)
            except PlanError as error:
                reason = str(error)
        others[title] = min(steps) if steps else reason
    return others


def _one_of_each(cluster: Cluster) -> list[int]:
    """The first node of each kind and size of memory."""
    first: dict[tuple[str, float, float], int] = {}
    for index, node in enumerate(cluster.nodes):
        first.setdefault((node.device, node.flops_per_s, node.memory_bytes), index)
    return list(first.values())


def select_nodes(cluster: Cluster, indices: Sequence[int]) -> Cluster:
    """The cluster of these nodes only. A line in common to all of them stays with those it has."""
    where = {index: k for k, index in enumerate(indices)}
    shares = [msgspec.structs.replace(s, nodes=tuple(where[i] for i in s.nodes if i in where)) for s in cluster.shares]
    return Cluster(
        nodes=tuple(cluster.nodes[i] for i in indices),
        bandwidth_bytes_per_s=tuple(tuple(cluster.bandwidth_bytes_per_s[a][b] for b in indices) for a in indices),
        latency_s=tuple(tuple(cluster.latency_s[a][b] for b in indices) for a in indices),
        shares=tuple(share for share in shares if share.nodes),
    )


def explain_left_out(workload: Workload, cluster: Cluster, placement: Placement, step_s: float) -> tuple[LeftOut, ...]:
    """Per fence and kind: the step if one such node were taken in too, everything else as near as can be."""
    search = Search(Tables(workload, cluster))
    point = search.tables.point(without_chunks(placement, len(workload.flops)))
    groups: dict[tuple[str, str, float], list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        if index not in placement.nodes:
            groups.setdefault((node.site, node.device, node.memory_bytes), []).append(index)
    found = []
    for (site, device, _), nodes in groups.items():
        moves = [move for move in search.moves(point, nodes[:1]) if len(move.nodes) > len(point.nodes)]
        with_it = float(min(search.tables.evaluate(moves, only_best=True), default=float("inf")))
        if with_it == float("inf"):
            reason = "no stage that it could hold has a way to the others"
        elif with_it > step_s * 2:
            reason = f"one of them taken in makes a step {with_it / step_s:.1f} times as long"
        elif with_it > step_s * 1.001:
            reason = f"one of them taken in makes a step {with_it / step_s - 1:.1%} longer"
        else:
            reason = "one of them taken in gains nothing"
        found.append(LeftOut(count=len(nodes), fence=site, device=device, reason=reason))
    return tuple(found)


def explain_misfit(workload: Workload, cluster: Cluster) -> str:
    """Which stage needs how much where, and the smallest change found that makes a plan fit."""
    needed, there = sum(workload.state_bytes), sum(node.memory_bytes for node in cluster.nodes)
    low, high, best = 1.0, 64.0, None
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        try:
            best, high = plan_placement(workload, _with_memory(cluster, middle))[0].placement, middle
        except PlanError:
            low = middle
    total = (
        f"State of {format_num_bytes(needed)} stands against {format_num_bytes(there)} on {len(cluster.nodes)} nodes"
    )
    if best is None:
        return f"{total}; even {high:.0f} times the memory would not do: some node has no way to the others"
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
        f"{_more_nodes(workload, cluster)}"
    )


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    nodes = tuple(msgspec.structs.replace(n, memory_bytes=n.memory_bytes * factor) for n in cluster.nodes)
    return msgspec.structs.replace(cluster, nodes=nodes)


def _more_nodes(workload: Workload, cluster: Cluster) -> str:
    """``, or 2 more nodes like big0`` where up to four more of the largest node make it fit."""
    largest = max(range(len(cluster.nodes)), key=lambda i: cluster.nodes[i].memory_bytes)
    for count in range(1, 5):
        try:
            plan_placement(workload, _with_copies(cluster, largest, count))
        except PlanError:
            continue
        return f", or {count} more node{'s' * (count > 1)} like {cluster.nodes[largest].name}"
    return ""


def _with_copies(cluster: Cluster, index: int, count: int) -> Cluster:
    """The cluster with ``count`` more nodes like one, beside it: linked as its nearest neighbour in its fence is."""
    old = range(len(cluster.nodes))
    order = [*old, *[index] * count]
    rates, node = cluster.bandwidth_bytes_per_s, cluster.nodes[index]
    near = max(max(rates[index]), 1.0)
    grown = select_nodes(msgspec.structs.replace(cluster, shares=()), order)

    def rate(a: int, b: int) -> float:
        return near if order[a] == order[b] == index else grown.bandwidth_bytes_per_s[a][b]

    copies = tuple(msgspec.structs.replace(node, name=f"{node.name}+{k}") for k in range(1, count + 1))
    size = range(len(order))
    return msgspec.structs.replace(
        grown,
        nodes=(*cluster.nodes, *copies),
        bandwidth_bytes_per_s=tuple(tuple(rate(a, b) for b in size) for a in size),
    )
