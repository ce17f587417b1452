"""Study: a graph on a cluster, planned and explained in numbers. What `fusionllm plan` prints.

On the path: OpGraph + Cluster -> **Study**. Everything is predicted: times from rates of devices and links, memory from
shapes; nothing is run. Knows no tensor framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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
    replay_placement,
    select_nodes,
    stage_memory,
    with_chunks,
    without_chunks,
)
from fusionllm.schedule.planner import plan_placement
from fusionllm.schedule.search import Search
from fusionllm.schedule.tables import Tables
from fusionllm.schedule.timeline import StageModel, Timeline
from fusionllm.sim.advice import Advice
from fusionllm.sim.codecs import CodedReport
from fusionllm.sim.misfit import explain_misfit

#: Stages and links named of a critical path.
MAX_ON_PATH = 4


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
    ``bottleneck``: the busiest stage or link. ``critical_path``: what the step takes its time for, both in words.
    """

    step_s: float
    sync_s: float
    pipeline: str
    num_microbatches: int
    bubble: float
    bottleneck: str
    critical_path: str
    fences: dict[str, list[str]]
    stages: tuple[StageReport, ...]
    links: tuple[LinkReport, ...]
    others: dict[str, float | str]
    left_out: tuple[LeftOut, ...]
    advice: tuple[Advice, ...] = ()
    coded: CodedReport | None = None


class Best(NamedTuple):
    """The best placement found, and its step as replayed."""

    placement: Placement
    line: Timeline


def best_plan(workload: Workload, cluster: Cluster, smaller: Iterable[tuple[str, Callable[[], Workload]]] = ()) -> Best:
    """Plan. ``smaller``: workloads to fall back on, by name, that are mentioned where they would fit.

    Raises:
        PlanError: nothing fits; the message says which stage lacks what where, and the smallest changes.
    """
    try:
        best = plan_placement(workload, cluster)[0].placement
    except PlanError as error:
        raise PlanError(f"{error}. {explain_misfit(workload, cluster, smaller)}") from None
    return Best(best, replay_placement(workload, cluster, best))


def study(workload: Workload, cluster: Cluster, found: Best | None = None) -> Study:
    """Plan, if that was not done, and explain. Raises PlanError as `best_plan` does."""
    best, line = found or best_plan(workload, cluster)
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
        critical_path=_path_words(line, cluster, best),
        fences={fence[0].site or f"fence {k}": [node.name for node in fence] for k, fence in enumerate(fences)},
        stages=_stage_reports(workload, cluster, best, name, models),
        links=_link_reports(workload, cluster, best, line.link_busy_s, line.step_s),
        others=compare(workload, cluster),
        left_out=explain_left_out(workload, cluster, best, line.step_s),
    )


def _in_names(bottleneck: str, cluster: Cluster, placement: Placement) -> str:
    """``link 0-1, busy ...`` with the nodes' names beside."""
    words, _, rest = bottleneck.partition(",")
    if words.startswith("owner"):
        return bottleneck
    kind, _, numbers = words.partition(" ")
    nodes = [cluster.nodes[placement.nodes[int(k)]].name for k in numbers.split("-")]
    return f"{kind} {numbers} ({' to '.join(nodes)}),{rest}"


def _path_words(line: Timeline, cluster: Cluster, placement: Placement) -> str:
    """``61 % stage 1 (pc), 30 % link 0-1 (lab0 to pc), 9 % the rest``."""
    path = line.critical_path()
    parts = [(_in_names(f"{name},", cluster, placement).rstrip(","), s) for name, s in path[:MAX_ON_PATH]]
    if rest := sum(s for _, s in path[MAX_ON_PATH:]):
        parts.append(("the rest", rest))
    return ", ".join(f"{s / line.step_s:.0%} {name}".replace("%", " %") for name, s in parts)


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
