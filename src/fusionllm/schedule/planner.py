"""Planner: choose nodes, order and cuts together; leave out what slows the step down.

Pure decision. On the path: CostTable + Cluster -> **Placement** -> Plan. `schedule.dynamic` proposes, `schedule.search`
improves what it proposes and what the baselines do, `schedule.timeline` replays the finalists and ranks them. The
baselines are always among them, and the fastest fences by themselves, so the choice is never slower than any of them.

Schedules that nodes do not execute yet are searched as 1F1B and ranked by their own programs.

Small clusters are solved with every node by itself. In large ones equal nodes of a fence form a group; of many groups
those around each of the strongest are solved together, and the nodes along a few orders, any of which may be left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from math import comb, perm
from typing import NamedTuple

import msgspec
import numpy as np

from fusionllm.errors import PlanError
from fusionllm.ir.cluster import BACKWARD_OVER_FORWARD
from fusionllm.schedule.dynamic import COARSE_RATIO, Dynamic
from fusionllm.schedule.pipeline import AHEAD
from fusionllm.schedule.placement import (
    BASELINES,
    Cluster,
    NodeModel,
    Placement,
    Workload,
    fence_order,
    find_fences,
    forward_seconds,
    replay_placement,
    select_nodes,
    with_chunks,
)
from fusionllm.schedule.search import Search
from fusionllm.schedule.tables import BATCH, Point, Tables

#: Nodes solved by themselves at once, groups of equal nodes at once, nodes in these groups, places with many groups.
MAX_SINGLE = 6
MAX_GROUPS = 6
MAX_GROUPED = 48
FEWER_PLACES = 40
#: In a large cluster: neighbourhoods solved, groups around the first of each, nodes of an order that is walked.
MAX_SEEDS = 4
MAX_PARTNERS = 4
MAX_WALKED = 48
#: Points that local search starts from, on small clusters and on others.
STARTS = 12
FEWER_STARTS = 4
#: Placements that exhaustive search replays: some minutes.
MAX_PLACEMENTS = 5_000_000
#: How the best plan of one fence by itself is called among candidates, and how many fences are tried.
ONE_FENCE = "one-fence"
MOST_FENCES = 8
#: On others, starts that take so many times as long as the best one are not worth a search.
MAX_WORSE = 2.0


class Candidate(NamedTuple):
    """A placement, how it was found, and the seconds of a step as replayed."""

    method: str
    placement: Placement
    step_s: float


def plan_placement(workload: Workload, cluster: Cluster) -> list[Candidate]:
    """Rank placements by replayed step time, best first; the first of each method is its best.

    Raises:
        PlanError: no placement fits; names the constraint that the last one broke.
    """
    if not cluster.nodes:
        raise PlanError("no nodes to plan for; let at least one node join")
    found: dict[Placement, str] = {}
    reason = ""
    for method, place in BASELINES.items():
        try:
            found.setdefault(place(workload, cluster), method)
        except PlanError as error:
            reason = str(error)
    for placement in place_dp(workload, cluster, tuple(found)):
        found.setdefault(placement, "dp")
    ranked = []
    for searched, method in found.items():
        try:
            placement = with_chunks(workload, searched)
            step_s = float(replay_placement(workload, cluster, placement).step_s)
            ranked.append(Candidate(method, placement, step_s))
        except PlanError as error:
            reason = str(error)
    ranked = [candidate for candidate in ranked if candidate.step_s < float("inf")]
    ranked += _one_fence(workload, cluster, min((candidate.step_s for candidate in ranked), default=float("inf")))
    if not ranked:
        raise PlanError(f"no placement on {len(cluster.nodes)} nodes fits: {reason}")
    return sorted(ranked, key=lambda c: (c.step_s, len(c.placement.nodes), c.placement.nodes))


def _one_fence(workload: Workload, cluster: Cluster, step_s: float) -> Iterator[Candidate]:
    """The best plan of each of the fastest fences, unless its nodes compute for longer than the best step so far."""
    fences = [fence for fence in find_fences(cluster) if 1 < len(fence) < len(cluster.nodes)]
    bounds = [_compute_seconds(workload, [cluster.nodes[i] for i in fence]) for fence in fences]
    for bound_s, fence in sorted(zip(bounds, fences))[:MOST_FENCES]:
        if bound_s >= step_s:
            break
        try:
            best = plan_placement(workload, select_nodes(cluster, fence))[0]
        except PlanError:
            continue
        step_s = min(step_s, best.step_s)
        nodes = tuple(fence[k] for k in best.placement.nodes)
        yield Candidate(ONE_FENCE, msgspec.structs.replace(best.placement, nodes=nodes), best.step_s)


def _compute_seconds(workload: Workload, nodes: Sequence[NodeModel]) -> float:
    """A step on these nodes is not shorter: each operator is done in parts by all, as fast as the best of them can."""
    seconds = np.array([forward_seconds(workload, node) for node in nodes])
    speed = 1 / np.maximum(seconds.sum(axis=1), 1e-300)
    shared = (seconds * (speed / speed.sum())[:, None]).min(axis=0).sum()
    return float(shared * (1 + BACKWARD_OVER_FORWARD) * workload.num_microbatches)


def place_dp(workload: Workload, cluster: Cluster, others: Sequence[Placement] = ()) -> list[Placement]:
    """The best few placements of dynamic program and local search, best first; ``others`` are starting points too."""
    tables = Tables(workload, cluster)
    search = Search(tables)
    small = len(cluster.nodes) <= MAX_SINGLE
    estimates: dict[Point, float] = {}
    for estimate, point in _proposals(tables, cluster):
        estimates[point] = min(estimate, estimates.get(point, estimate))
    points = [tables.point(placement) for placement in (*others, *_alone(tables))]
    points += sorted(estimates, key=lambda point: estimates[point])[: 1000 if small else 64]
    if tables.pipeline == AHEAD:
        points += [deeper for point in points for deeper in search.deepened(point, (0.5,))]
    steps = tables.evaluate(points)
    order = [int(i) for i in np.argsort(steps, kind="stable") if np.isfinite(steps[i])]
    if order and not small:
        order = [i for i in order if steps[i] <= MAX_WORSE * steps[order[0]]]
    finished: dict[Point, float] = {}
    groups = _equal_groups(tables, find_fences(cluster))
    for index in _diverse(order, points, groups, STARTS if small else FEWER_STARTS):
        step_s, point = search.improve(points[index], float(steps[index]))
        finished[point] = step_s
    best = sorted(finished, key=lambda point: (finished[point], len(point.nodes), point))[:4]
    polished = {
        point: step_s for step_s, point in (search.polish(p, finished[p]) for p in best[: len(best) if small else 1])
    }
    best = [*sorted(polished, key=lambda point: polished[point]), *best]
    return [point.placement(workload.pipeline) for point in dict.fromkeys(best)]


def _alone(tables: Tables) -> Iterator[Placement]:
    """The whole model on one node, for the roomiest of each kind: often the answer where links are slow."""
    roomiest: dict[int, int] = {}
    for node, kind in enumerate(tables.kind):
        best = roomiest.setdefault(int(kind), node)
        if tables.memory[node] > tables.memory[best]:
            roomiest[int(kind)] = node
    for node in roomiest.values():
        yield Placement(nodes=(node,), boundaries=())


def _diverse(
    order: Sequence[int], points: Sequence[Point], groups: Sequence[Sequence[int]], count: int
) -> list[int]:  # fmt: skip
    """The first of each path of nodes, in order; equal nodes in each other's stead are no other path."""
    group = {node: k for k, nodes in enumerate(groups) for node in nodes}
    chosen: dict[tuple[int, ...], int] = {}
    for index in order:
        chosen.setdefault(tuple(group[node] for node in points[index].nodes), index)
    return list(chosen.values())[:count]


def _proposals(tables: Tables, cluster: Cluster) -> Iterator[tuple[float, Point]]:
    """Points and estimates of the dynamic programs that suit the size of the cluster."""
    count = len(cluster.nodes)
    if count <= MAX_SINGLE:
        yield from Dynamic(tables, [[node] for node in range(count)]).candidates()
        return
    fences = find_fences(cluster)
    groups = _equal_groups(tables, fences)
    if len(groups) <= MAX_GROUPS and count <= MAX_GROUPED:
        yield from Dynamic(tables, groups, places=FEWER_PLACES, ratio=COARSE_RATIO).candidates()
    else:
        for chosen in _neighbourhoods(tables, groups):
            yield from Dynamic(tables, chosen, places=FEWER_PLACES, ratio=COARSE_RATIO).candidates()
    by_speed = [int(i) for i in np.argsort(-tables.speed, kind="stable")[:MAX_WALKED]]
    chain = [node for node in fence_order(cluster, fences) if node in set(by_speed)]
    for walk in (chain, chain[::-1], by_speed, by_speed[::-1]):
        yield from Dynamic(tables, [walk], skip=True, places=FEWER_PLACES, ratio=COARSE_RATIO).candidates()


def _equal_groups(tables: Tables, fences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Nodes of one fence that are alike in speed, memory and links among them; most memory first."""
    groups: list[list[int]] = []
    for fence in fences:
        kinds: dict[tuple[int, float], list[int]] = {}
        for node in fence:
            kinds.setdefault((int(tables.kind[node]), float(tables.memory[node])), []).append(node)
        for nodes in kinds.values():
            inside = tables.rate[np.ix_(nodes, nodes)][~np.eye(len(nodes), dtype=bool)]
            alike = not len(inside) or inside.min() > 0.5 * inside.max()
            groups += [nodes] if alike else [[node] for node in nodes]
    return groups


def _neighbourhoods(tables: Tables, groups: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Around each of the strongest groups, those that bring most speed over the link between them."""
    first = np.array([group[0] for group in groups])
    speed = np.array([tables.speed[list(group)].sum() for group in groups])
    finite = tables.cut_bytes[np.isfinite(tables.cut_bytes)]
    num_bytes = float(np.median(finite)) if len(finite) else 0.0
    rate = tables.rate[np.ix_(first, first)]
    # a partner's speed, damped by what the link carries while the seed computes a microbatch
    with np.errstate(divide="ignore", invalid="ignore"):
        feed = np.minimum(rate, rate.T) / (speed[:, None] * 3 * max(num_bytes, 1e-9))
    gain = speed[None, :] * np.minimum(1.0, feed)
    np.fill_diagonal(gain, -1.0)
    most = MAX_PARTNERS
    strength = speed + np.sort(gain, axis=1)[:, -most:].sum(axis=1)
    chosen: dict[tuple[int, ...], None] = {}
    for seed in np.argsort(-strength, kind="stable")[: 3 * MAX_SEEDS]:
        partners = np.argsort(-gain[seed], kind="stable")[:most]
        chosen[tuple(sorted({int(seed), *(int(p) for p in partners if p != seed)}))] = None
    kept = list(chosen)[:MAX_SEEDS]
    share = max(1, MAX_GROUPED // MAX_GROUPS)
    return [[list(groups[k])[: share * 2] for k in members] for members in kept]


def place_exhaustive(workload: Workload, cluster: Cluster) -> Candidate:
    """The oracle: every subset, order and cut, replayed. For a handful of nodes and places.

    Raises:
        PlanError: no placement fits, or there are too many.
    """
    places = len(workload.cuts)
    total = sum(perm(len(cluster.nodes), k) * comb(places, k - 1) for k in range(1, len(cluster.nodes) + 1))
    if total > MAX_PLACEMENTS:
        raise PlanError(
            f"exhaustive would replay {total} placements of {places} cuts on {len(cluster.nodes)} nodes, at most "
            f"{MAX_PLACEMENTS}; use dp"
        )
    tables = Tables(workload, cluster)
    boundaries = [cut.boundary for cut in workload.cuts]
    best = (np.inf, Point((), (), ()))
    for count in range(1, min(len(cluster.nodes), len(boundaries) + 1) + 1):
        edges = np.array([(0, *chosen, tables.num_ops) for chosen in combinations(boundaries, count - 1)]).T
        depths = tables.default_depths(count)
        orders = list(permutations(range(len(cluster.nodes)), count))
        at_once = max(1, BATCH // edges.shape[1])
        for first in range(0, len(orders), at_once):
            some = np.array(orders[first : first + at_once]).T
            nodes = np.repeat(some, edges.shape[1], axis=1)
            tiled = np.tile(edges, (1, some.shape[1]))
            steps = tables.evaluate_arrays(nodes, tiled, depths, best[0])
            if len(steps) and steps.min() < best[0]:
                at = int(steps.argmin())
                best = (float(steps[at]), Point(tuple(map(int, nodes[:, at])), tuple(map(int, tiled[:, at])), depths))
    if not np.isfinite(best[0]):
        raise PlanError("no placement fits: every one exceeds a node's memory or needs a missing link")
    return Candidate("exhaustive", best[1].placement(workload.pipeline), best[0])
