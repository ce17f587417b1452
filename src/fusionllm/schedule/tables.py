"""Tables: a workload on a cluster as arrays, and what any number of candidate placements take, at once.

Pure decision. On the path: Workload + Cluster -> **Tables** -> dynamic program, local search, exhaustive search. Knows
what `schedule.placement` says in nouns; `schedule.batch` replays what it adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusionllm.ir.cluster import BACKWARD_OVER_FORWARD
from fusionllm.schedule.batch import Array, BatchCosts, replay_many
from fusionllm.schedule.limits import refused
from fusionllm.schedule.pipeline import AHEAD, ZERO_BUBBLE
from fusionllm.schedule.placement import (
    Cluster,
    Placement,
    Workload,
    forward_seconds,
    link_rates,
)

#: Places to cut that a search looks at; of a longer graph the cheapest per slice of equal cost are kept.
MAX_PLACES = 96
#: Placements replayed in one batch: bounds the memory of an exhaustive search.
BATCH = 8192


class Point(NamedTuple):
    """A candidate: nodes in path order, edges of their stages (first 0, last the number of operators), depths."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]
    depths: tuple[int, ...]

    def placement(self, pipeline: str) -> Placement:
        return Placement(nodes=self.nodes, boundaries=self.edges[1:-1], depths=self.depths if pipeline == AHEAD else ())


class Tables:
    """Sums over operators, rates and memory as arrays.

    Attributes:
        forward_s: [D, L + 1] seconds of the first operators, forward, per kind of device. kind: [K] row of each node.
        places: boundaries a search may cut at, with 0 and L; cut_bytes: [L + 1], infinite where there is no cut.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self.num_ops, self.num_microbatches = len(workload.flops), workload.num_microbatches
        self.pipeline, self.tied = workload.pipeline, workload.tied
        rows: dict[tuple[tuple[float, ...], bytes], int] = {}
        table = refused(workload, cluster)
        keys = [(forward_seconds(workload, node), row.tobytes()) for node, row in zip(cluster.nodes, table)]
        self.kind = np.array([rows.setdefault(key, len(rows)) for key in keys])
        self.forward_s = np.array([[0.0, *accumulate(row)] for row, _ in rows])
        first = [keys.index(key) for key in rows]
        self.refused = np.concatenate([np.zeros((len(rows), 1), int), table[first].cumsum(axis=1)], axis=1)
        self.owner, self.feeds = cluster.owner, workload.feeds
        self.state = np.array([0.0, *accumulate(workload.state_bytes)])
        self.stash = np.array([0.0, *accumulate(workload.stash_bytes)])
        self.memory = np.array([node.memory_bytes for node in cluster.nodes])
        self.rate = link_rates(cluster)
        latency = np.array(cluster.latency_s, dtype=float).reshape(len(self.memory), -1)
        self.latency = np.maximum(latency, latency.T)
        self.shares = [(np.isin(np.arange(len(self.memory)), s.nodes), s) for s in cluster.shares]
        self.cut_bytes = np.full(self.num_ops + 1, np.inf)
        for cut in workload.cuts:
            self.cut_bytes[cut.boundary] = cut.num_bytes
        self.speed = 1 / np.maximum(self.forward_s[self.kind, -1], 1e-300)
        self.places = self.thin(MAX_PLACES)

    def thin(self, most: int) -> tuple[int, ...]:
        """0, at most about ``most`` boundaries, and L: of each slice of equal cost the cut of fewest bytes."""
        cuts = [int(b) for b in np.flatnonzero(np.isfinite(self.cut_bytes))]
        if len(cuts) > most:
            share = self.forward_s.mean(axis=0) / max(float(self.forward_s.mean(axis=0)[-1]), 1e-300)
            slices: dict[int, int] = {}
            for boundary in cuts:
                at = int(share[boundary] * most)
                if at not in slices or self.cut_bytes[boundary] < self.cut_bytes[slices[at]]:
                    slices[at] = boundary
            cuts = sorted(slices.values())
        return (0, *cuts, self.num_ops)

    def default_depths(self, num_stages: int) -> tuple[int, ...]:
        """Microbatches in flight per stage, as the pipeline schedule has them when nobody chooses."""
        if self.pipeline == "gpipe":
            return (self.num_microbatches,) * num_stages
        ahead = 2 if self.pipeline == AHEAD else 1
        return tuple(min(self.num_microbatches, 1 + ahead * k) for k in range(num_stages - 1, -1, -1))

    def point(self, placement: Placement) -> Point:
        depths = placement.depths or self.default_depths(len(placement.nodes))
        return Point(placement.nodes, (0, *placement.boundaries, self.num_ops), depths)

    def costs(self, nodes: NDArray[np.intp], edges: NDArray[np.intp]) -> BatchCosts:
        """Of ``nodes`` [S, B] with stages between ``edges`` [S + 1, B]."""
        kind = self.kind[nodes]
        forward = np.maximum(self.forward_s[kind, edges[1:]] - self.forward_s[kind, edges[:-1]], 0.0)
        sender, receiver, num_bytes = nodes[:-1], nodes[1:], self.cut_bytes[edges[1:-1]]
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.nan_to_num(num_bytes / self.rate[sender, receiver], nan=np.inf, posinf=np.inf)
            back = np.nan_to_num(num_bytes / self.rate[receiver, sender], nan=np.inf, posinf=np.inf)
        latency = self.latency[sender, receiver]
        return BatchCosts(forward, forward * BACKWARD_OVER_FORWARD, out, back, latency)

    def fits(self, nodes: NDArray[np.intp], edges: NDArray[np.intp], depths: Sequence[int]) -> NDArray[np.bool_]:
        """[B]: state and the stash of the microbatches in flight fit each node."""
        state = self.state[edges[1:]] - self.state[edges[:-1]]
        stash = self.stash[edges[1:]] - self.stash[edges[:-1]]
        held = [min(len(depths), self.num_microbatches)] * len(depths) if self.pipeline == ZERO_BUBBLE else depths
        needed = state + np.array(held)[:, None] * stash
        fits = needed <= self.memory[nodes] * (1 + 1e-12)
        if self.refused[:, -1].any():
            fits &= self.refused[self.kind[nodes], edges[1:]] == self.refused[self.kind[nodes], edges[:-1]]
        return np.asarray(fits.all(axis=0))

    def extra_s(self, nodes: NDArray[np.intp], edges: NDArray[np.intp]) -> Array:
        """[B]: seconds at the end of a step in which stages exchange the gradients of tied parameters."""
        extra = np.zeros(nodes.shape[1])
        column = np.arange(nodes.shape[1])
        for tied in self.tied:
            at = [(edges[1:-1] <= op).sum(axis=0) for op in (tied.ops[0], tied.ops[-1])]
            first, last = (nodes[a, column] for a in at)
            rate = np.minimum(self.rate[first, last], self.rate[last, first])
            with np.errstate(divide="ignore"):
                seconds = tied.num_bytes / rate + self.latency[first, last]
            extra += np.where(at[0] == at[1], 0.0, seconds)
        return extra

    def shared_s(self, nodes: NDArray[np.intp], edges: NDArray[np.intp]) -> Array:
        """[B]: seconds per microbatch of the busiest shared up- or downlink."""
        busiest = np.zeros(nodes.shape[1])
        num_bytes = self.cut_bytes[edges[1:-1]]
        for inside, share in self.shares:
            leaves = inside[nodes[:-1]] & ~inside[nodes[1:]]
            enters = ~inside[nodes[:-1]] & inside[nodes[1:]]
            crossed = (num_bytes * (leaves | enters)).sum(axis=0)  # one way the activation, the other the gradient
            busiest = np.maximum(busiest, crossed / min(share.up_bytes_per_s, share.down_bytes_per_s))
        return busiest

    def feed_s(self, nodes: NDArray[np.intp], edges: NDArray[np.intp]) -> Array:
        """[B]: seconds per microbatch of the owner's busiest line; as `schedule.limits.feed_seconds`."""
        if self.owner is None or not self.feeds:
            return np.zeros(nodes.shape[1])
        sent = np.zeros(nodes.shape)
        for feed in self.feeds:
            count = np.zeros(self.num_ops + 1, int)
            count[np.array(feed.ops, int) + 1] = 1
            count = count.cumsum()
            sent += feed.num_bytes * (count[edges[1:]] > count[edges[:-1]])
        rate = np.maximum(np.array(self.owner.bandwidth_bytes_per_s), 1e-300)
        beyond = np.isin(nodes, self.owner.beyond)
        together = (sent * beyond).sum(axis=0) / self.owner.line_bytes_per_s
        return np.asarray(np.maximum((sent / rate[nodes]).max(axis=0), together))

    def evaluate(self, points: Sequence[Point], below_s: float = np.inf, *, only_best: bool = False) -> Array:
        """Seconds of a step of each candidate as replayed; infinite where it does not fit or is not below a bound.

        ``only_best``: infinite too where a candidate replayed before is at least as good.
        """
        steps = np.full(len(points), np.inf)
        shapes: dict[tuple[int, ...], list[int]] = {}
        for index, point in enumerate(points):
            shapes.setdefault(point.depths, []).append(index)
        batches: list[tuple[float, int, _Batch, NDArray[np.intp]]] = []
        for depths, members in shapes.items():
            for first in range(0, len(members), BATCH):
                chosen = np.array(members[first : first + BATCH])
                nodes = np.array([points[i].nodes for i in chosen]).T
                edges = np.array([points[i].edges for i in chosen]).T
                batch = _Batch(self, nodes, edges, depths)
                if len(batch.keep):
                    batches.append((float(batch.bound_s.min()), len(batches), batch, chosen))
        for _, _, batch, chosen in sorted(batches, key=lambda b: b[:2]):
            at, seconds = batch.replay(below_s)
            steps[chosen[at]] = seconds
            if only_best and len(at):
                below_s = min(below_s, float(seconds.min()))
        return steps

    def evaluate_arrays(
        self, nodes: NDArray[np.intp], edges: NDArray[np.intp], depths: tuple[int, ...], below_s: float = np.inf
    ) -> Array:
        """As `evaluate`, of one shape: ``nodes`` [S, B], ``edges`` [S + 1, B]."""
        steps = np.full(nodes.shape[1], np.inf)
        at, seconds = _Batch(self, nodes, edges, depths).replay(below_s)
        steps[at] = seconds
        return steps


class _Batch:
    """Candidates of one shape: which can run at all (``keep``), and a lower bound on the step of each of these."""

    def __init__(
        self, tables: Tables, nodes: NDArray[np.intp], edges: NDArray[np.intp], depths: tuple[int, ...]
    ) -> None:
        self.depths, self.num_microbatches = depths, tables.num_microbatches
        keep = np.flatnonzero(tables.fits(nodes, edges, depths))
        costs = tables.costs(nodes[:, keep], edges[:, keep])
        joined = np.flatnonzero(np.isfinite(costs.out_s + costs.back_s + costs.latency_s).all(axis=0))
        self.keep, self.costs = keep[joined], costs.select(joined)
        nodes, edges = nodes[:, self.keep], edges[:, self.keep]
        bound = self.costs.lower_bound_s(depths, self.num_microbatches)
        self.extra_s = tables.extra_s(nodes, edges) if tables.tied else np.zeros_like(bound)
        self.shared_s = self.num_microbatches * tables.shared_s(nodes, edges) if tables.shares else bound
        self.feed_s = self.num_microbatches * tables.feed_s(nodes, edges)
        self.bound_s = np.maximum(np.maximum(bound, self.shared_s) + self.extra_s, self.feed_s)

    def replay(self, below_s: float) -> tuple[NDArray[np.intp], Array]:
        """Columns whose bound is below, and their steps in seconds."""
        worth = np.flatnonzero(self.bound_s < below_s)
        if not len(worth):
            return self.keep[worth], np.zeros(0)
        replayed = replay_many(self.costs.select(worth), self.depths, self.num_microbatches)
        steps = np.maximum(replayed, self.shared_s[worth]) + self.extra_s[worth]
        return self.keep[worth], np.maximum(steps, self.feed_s[worth])
