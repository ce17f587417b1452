"""Planner: choose nodes, order and cuts together; leave out what slows the step down.

Pure decision. On the path: CostTable + Cluster -> **Placement** -> Plan. For a bound T on what any stage or link may
take per microbatch, a dynamic program from the tail of the chain finds the placement of least fill time among those
that keep T; T runs over a geometric grid. It walks along an order of nodes and may skip any of them; several orders
are tried: all of them on small clusters, else orders of fences. The step of a candidate is what `schedule.timeline`
replays, and the baselines are always among the candidates, so the choice is never slower than any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, islice, permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusionllm.errors import PlanError
from fusionllm.ir.cuts import Cut
from fusionllm.schedule.placement import (
    BACKWARD_OVER_FORWARD,
    BASELINES,
    Cluster,
    Placement,
    Workload,
    fence_order,
    find_fences,
    replay_placement,
)

#: Places to cut that the dynamic program looks at; of a longer graph the cheapest per slice of equal FLOPs are kept.
MAX_PLACES = 96
#: Orders of nodes tried, steps of the grid, and its ratio.
MAX_ORDERS = 24
GRID_RATIO = 1.12
#: Up to this many nodes every order is tried.
SMALL_CLUSTER = 4

_Array = NDArray[np.float64]


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
    for placement in place_dp(workload, cluster):
        found.setdefault(placement, "dp")
    ranked = []
    for placement, method in found.items():
        try:
            ranked.append(Candidate(method, placement, replay_placement(workload, cluster, placement).step_s))
        except PlanError as error:
            reason = str(error)
    if not ranked:
        raise PlanError(f"no placement on {len(cluster.nodes)} nodes fits: {reason}")
    return sorted(ranked, key=lambda c: (c.step_s, len(c.placement.nodes), c.placement.nodes))


def place_exhaustive(workload: Workload, cluster: Cluster) -> Candidate:
    """The oracle: every subset, order and cut, replayed. For a handful of nodes and places. Raises PlanError."""
    best: Candidate | None = None
    boundaries = [cut.boundary for cut in workload.cuts]
    for count in range(1, min(len(cluster.nodes), len(boundaries) + 1) + 1):
        for nodes in permutations(range(len(cluster.nodes)), count):
            for chosen in combinations(boundaries, count - 1):
                placement = Placement(nodes=nodes, boundaries=chosen)
                try:
                    step_s = replay_placement(workload, cluster, placement).step_s
                except PlanError:
                    continue
                if best is None or step_s < best.step_s:
                    best = Candidate("exhaustive", placement, step_s)
    if best is None:
        raise PlanError("no placement fits: every one exceeds a node's memory or needs a missing link")
    return best


def place_dp(workload: Workload, cluster: Cluster) -> list[Placement]:
    """Candidates of the dynamic program: the best few bounds of each order."""
    tables = _Tables(workload, cluster)
    placements: dict[Placement, None] = {}
    for order in _orders(cluster):
        scored = []
        for bound_s in tables.grid():
            result = tables.solve(order, bound_s)
            if result is not None:
                fill_s, placement = result
                scored.append((fill_s + (workload.num_microbatches - 1) * bound_s, placement))
        for _, placement in sorted(scored, key=lambda pair: pair[0])[:4]:
            placements[placement] = None
    return list(placements)


def _orders(cluster: Cluster) -> Iterable[tuple[int, ...]]:
    count = len(cluster.nodes)
    if count <= SMALL_CLUSTER:
        return permutations(range(count))
    fences = find_fences(cluster)
    by_speed = tuple(sorted(range(count), key=lambda i: (-cluster.nodes[i].flops_per_s, i)))
    chain = tuple(fence_order(cluster, fences))
    orders = {chain: None, chain[::-1]: None, by_speed: None, by_speed[::-1]: None}
    inside = [sorted(f, key=lambda i: (-cluster.nodes[i].flops_per_s, i)) for f in fences]
    for path in islice(permutations(inside), MAX_ORDERS):
        orders[tuple(i for fence in path for i in fence)] = None
    return list(orders)[:MAX_ORDERS]


def _thin(cuts: tuple[Cut, ...], prefix: _Array) -> list[Cut]:
    """At most MAX_PLACES cuts: the cheapest of each slice of the FLOPs."""
    if len(cuts) <= MAX_PLACES:
        return list(cuts)
    slices: dict[int, Cut] = {}
    for cut in cuts:
        at = int(prefix[cut.boundary] / max(prefix[-1], 1e-30) * MAX_PLACES)
        if at not in slices or cut.num_bytes < slices[at].num_bytes:
            slices[at] = cut
    return [slices[at] for at in sorted(slices)]


class _Tables:
    """Sums over operators at the places where the graph may be cut (0 and the end included), as arrays."""

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        flops = np.concatenate([[0.0], np.cumsum(workload.flops)])
        cuts = _thin(workload.cuts, flops)
        self.places = [0, *(c.boundary for c in cuts), len(workload.flops)]
        self.cut_bytes = np.array([0.0, *(float(c.num_bytes) for c in cuts), 0.0])
        self.work = self._between(flops) * (1 + BACKWARD_OVER_FORWARD)
        self.state = self._between(np.concatenate([[0.0], np.cumsum(workload.state_bytes)]))
        self.stash = self._between(np.concatenate([[0.0], np.cumsum(workload.stash_bytes)]))
        self.empty = np.tril(np.ones_like(self.work, dtype=bool))
        self.speed = np.array([node.flops_per_s for node in cluster.nodes])
        self.memory = np.array([node.memory_bytes for node in cluster.nodes])
        self.rate = np.array(cluster.bandwidth_bytes_per_s, dtype=float).reshape(len(self.speed), -1)
        self.latency = np.array(cluster.latency_s, dtype=float).reshape(len(self.speed), -1)
        self.num_microbatches = workload.num_microbatches
        self.deep = workload.pipeline == "gpipe"

    def _between(self, sums: _Array) -> _Array:
        """[from place, to place]: the sum of what lies between."""
        at = sums[self.places]
        return np.asarray(at[None, :] - at[:, None], dtype=float)

    def grid(self) -> Iterator[float]:
        """Bounds in seconds per microbatch, from all nodes perfectly shared to the slowest alone."""
        total = float(self.work[0, -1])
        bound_s, last_s = total / float(self.speed.sum()), total / float(self.speed.min()) * GRID_RATIO
        bound_s = max(bound_s, last_s * 1e-4, 1e-12)
        while bound_s <= last_s or bound_s <= 1e-12:
            yield bound_s
            bound_s *= GRID_RATIO

    def solve(self, order: tuple[int, ...], bound_s: float) -> tuple[float, Placement] | None:
        """Least fill time in seconds of a chain along ``order`` whose stages and links all keep the bound."""
        num_places, count = len(self.places), len(order)
        fill = np.full((count, num_places), np.inf)
        depth = np.zeros((count, num_places))
        until = np.zeros((count, num_places), dtype=int)
        following = np.full((count, num_places), -1)
        for at in range(count - 1, -1, -1):
            rest, rest_depth = self._best_next(order, at, bound_s, fill, depth, following)
            node = order[at]
            seconds = self.work / self.speed[node]
            in_flight = np.minimum(self.num_microbatches, rest_depth + 1)
            if self.deep:
                in_flight = np.full_like(in_flight, self.num_microbatches)
            needed = self.state + in_flight[None, :] * self.stash
            total = np.where(self.empty | (seconds > bound_s) | (needed > self.memory[node]), np.inf, seconds + rest)
            until[at] = total.argmin(axis=1)
            fill[at] = total.min(axis=1)
            depth[at] = rest_depth[until[at]] + 1
        start = int(fill[:, 0].argmin())
        if not np.isfinite(fill[start, 0]):
            return None
        return float(fill[start, 0]), self._backtrack(order, start, until, following)

    def _best_next(
        self, order: tuple[int, ...], at: int, bound_s: float, fill: _Array, depth: _Array, following: NDArray[np.int64]
    ) -> tuple[_Array, _Array]:
        """Per place: the least fill time of what comes after a cut there, its depth; notes whose turn it is."""
        rest = np.full(len(self.places), np.inf)
        rest[-1] = 0.0
        rest_depth = np.zeros(len(self.places))
        later = np.array(order[at + 1 :], dtype=int)
        if later.size:
            node = order[at]
            out, back = self.rate[node, later], self.rate[later, node]
            with np.errstate(divide="ignore", invalid="ignore"):
                out_s = np.where(out[:, None] > 0, self.cut_bytes[None, :] / out[:, None], np.inf)
                back_s = np.where(back[:, None] > 0, self.cut_bytes[None, :] / back[:, None], np.inf)
            trip = out_s + back_s + (2 * np.maximum(self.latency[node, later], self.latency[later, node]))[:, None]
            total = np.where(np.maximum(out_s, back_s) <= bound_s, trip + fill[at + 1 :], np.inf)
            best = total.argmin(axis=0)
            columns = np.arange(len(self.places) - 1)
            rest[:-1] = total[best[:-1], columns]
            rest_depth[:-1] = depth[at + 1 + best[:-1], columns]
            following[at] = at + 1 + best
        return rest, rest_depth

    def _backtrack(
        self, order: tuple[int, ...], at: int, until: NDArray[np.int64], following: NDArray[np.int64]
    ) -> Placement:
        nodes, boundaries, place = [order[at]], [], 0
        while (place := int(until[at, place])) < len(self.places) - 1:
            boundaries.append(self.places[place])
            at = int(following[at, place])
            nodes.append(order[at])
        return Placement(nodes=tuple(nodes), boundaries=tuple(boundaries))
