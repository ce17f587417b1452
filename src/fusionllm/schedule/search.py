"""Local search: improve a placement by small moves, each judged by its replay, until none helps.

Pure decision. On the path: candidate points of the dynamic program -> **better points** -> planner. The dynamic program
knows a bound on a step, the replay knows the step; what lies between them is repaired here. Moves: shift a cut, shift a
stage, exchange two nodes, move a node, take another node in, leave one out, put one in another's stead, and keep one
microbatch more or less in flight where the pipeline schedule leaves that open.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import ceil, comb

import numpy as np

from fusionllm.schedule.pipeline import AHEAD
from fusionllm.schedule.tables import Point, Tables

#: How far cuts are shifted, in places.
SHIFTS = (1, 2, 3, 5, 8, 13, 21)
#: Unused nodes tried at each position, nearest by link.
NEAREST = 12
#: Ways to cut a path up to which all of them are tried.
MAX_RECUTS = 500


class Search:
    """Moves over the places and nodes of ``tables``."""

    def __init__(self, tables: Tables) -> None:
        self.tables, self.places = tables, tables.places
        finite = tables.cut_bytes[np.isfinite(tables.cut_bytes)]
        num_bytes = float(np.median(finite)) if len(finite) else 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = np.nan_to_num(num_bytes / tables.rate, nan=np.inf, posinf=np.inf)
        self.hop_s = seconds + seconds.T + 2 * tables.latency

    def improve(self, point: Point, step_s: float, max_rounds: int = 60) -> tuple[float, Point]:
        """Take the best move of each round while one helps. Returns the step in seconds and the point."""
        for _ in range(max_rounds):
            moves = list(dict.fromkeys(self.moves(point)))
            if self.tables.pipeline == AHEAD:
                moves += self.deepened(point)
            steps = self.tables.evaluate(moves, step_s, only_best=True)
            best = int(steps.argmin()) if len(moves) else 0
            if not moves or not steps[best] < step_s * (1 - 1e-9):
                break
            point, step_s = moves[best], float(steps[best])
        return step_s, point

    def polish(self, point: Point, step_s: float) -> tuple[float, Point]:
        """`improve`, where it is cheap with all cuts of every path of nodes that is one move away."""
        step_s, point = self.improve(point, step_s)
        while wide := list(self._recut(point)):
            steps = self.tables.evaluate(wide, step_s, only_best=True)
            best = int(steps.argmin())
            if not steps[best] < step_s * (1 - 1e-9):
                break
            step_s, point = self.improve(wide[best], float(steps[best]))
        return step_s, point

    def _recut(self, point: Point) -> Iterator[Point]:
        inner = self.places[1:-1]
        if comb(len(inner), min(len(point.nodes), len(inner) // 2)) > MAX_RECUTS:
            return
        paths = dict.fromkeys((move.nodes, move.depths) for move in (point, *self.moves(point)))
        for nodes, depths in paths:
            for chosen in combinations(inner, len(nodes) - 1):
                yield Point(nodes, (0, *chosen, self.places[-1]), depths)

    def moves(self, point: Point, others: Sequence[int] | None = None) -> Iterator[Point]:
        """Points one move away. ``others``: the nodes that may be taken in, all unused ones if not given."""
        yield from self._shift(point)
        yield from self._reorder(point)
        yield from self._leave_out(point)
        yield from self._take_in(point, others)
        if self.tables.pipeline == AHEAD:
            yield from self._deepen(point)

    def _at(self, edge: int, shift: int) -> int:
        """The place ``shift`` places away from an edge, kept inside."""
        index = bisect_left(self.places, edge) if shift > 0 else bisect_right(self.places, edge) - 1
        if self.places[index] != edge and shift < 0:
            shift += 1
        return self.places[min(max(index + shift, 1), len(self.places) - 2)]

    def _with_edges(self, point: Point, edges: tuple[int, ...]) -> Iterator[Point]:
        if all(a < b for a, b in zip(edges, edges[1:])):
            yield point._replace(edges=edges)

    def _shift(self, point: Point) -> Iterator[Point]:
        if len(self.places) < 3:
            return
        edges = point.edges
        for first in range(1, len(edges) - 1):
            for last in range(first, len(edges) - 1):
                if last - first > 1 and last != len(edges) - 2 and first != 1:
                    continue  # a cut, both cuts of a stage, or all cuts up to an end
                for size in SHIFTS if last - first < 2 else SHIFTS[:2]:
                    for shift in (size, -size):
                        moved = [self._at(edge, shift) for edge in edges[first : last + 1]]
                        yield from self._with_edges(point, (*edges[:first], *moved, *edges[last + 1 :]))

    def _reorder(self, point: Point) -> Iterator[Point]:
        nodes = point.nodes
        for a, b in combinations(range(len(nodes)), 2):
            swapped = list(nodes)
            swapped[a], swapped[b] = nodes[b], nodes[a]
            for order in (swapped, [*nodes[:a], *reversed(nodes[a : b + 1]), *nodes[b + 1 :]]):
                yield point._replace(nodes=tuple(order))
            # the work goes along with the node
            sizes = [y - x for x, y in zip(point.edges, point.edges[1:])]
            sizes[a], sizes[b] = sizes[b], sizes[a]
            edges = [0]
            for size in sizes:
                edges.append(edges[-1] + size)
            snapped = (0, *(self._at(edge, 0) for edge in edges[1:-1]), edges[-1])
            yield from self._with_edges(point._replace(nodes=tuple(swapped)), snapped)
            for i, j in ((a, b), (b, a)):
                order = list(nodes)
                order.insert(j, order.pop(i))
                yield point._replace(nodes=tuple(order))

    def _leave_out(self, point: Point) -> Iterator[Point]:
        nodes, edges, depths = point
        last = len(nodes) - 1
        for at in range(len(nodes)) if last else ():
            without = Point((*nodes[:at], *nodes[at + 1 :]), edges, self._depths_without(depths, at))
            if at > 0:  # its work goes to the stage before
                yield from self._with_edges(without, (*edges[:at], *edges[at + 1 :]))
            if at < last:  # to the stage after
                yield from self._with_edges(without, (*edges[: at + 1], *edges[at + 2 :]))
            if 0 < at < last:  # to both
                middle = self._at((edges[at] + edges[at + 1]) // 2, 0)
                yield from self._with_edges(without, (*edges[:at], middle, *edges[at + 2 :]))

    def _take_in(self, point: Point, others: Sequence[int] | None) -> Iterator[Point]:
        nodes, edges, depths = point
        free = np.setdiff1d(np.arange(len(self.tables.memory)) if others is None else np.array(others), nodes)
        for at in range(len(nodes) + 1):
            if not len(free):
                return
            near = self._near(free, [nodes[k] for k in (at - 1, at) if 0 <= k < len(nodes)])
            for node in near:
                if at < len(nodes):
                    yield point._replace(nodes=(*nodes[:at], node, *nodes[at + 1 :]))
                taken = (*nodes[:at], node, *nodes[at:])
                held = self._depths_with(depths, at)
                for edge, position in self._new_edges(edges, at, taken):
                    wider = (*edges[:position], edge, *edges[position:])
                    yield from self._with_edges(Point(taken, edges, held), wider)

    def _new_edges(self, edges: tuple[int, ...], at: int, taken: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Where to cut for a node taken in at a position: out of the stage after it, or out of the one before."""
        for stage, first in ((at, True), (at - 1, False)):
            if not 0 <= stage < len(edges) - 1:
                continue
            low, high = edges[stage], edges[stage + 1]
            own, other = (self.tables.speed[taken[k]] for k in (at, at + 1 if first else at - 1))
            share = own / (own + other)
            for part in (share, share / 3):
                split = low + (part if first else 1 - part) * (high - low)
                yield self._at(round(split), 0), stage + 1

    def _near(self, free: np.ndarray, neighbours: list[int]) -> list[int]:
        """Unused nodes with the shortest way to their neighbours, and some of the fastest."""
        if len(free) <= NEAREST:
            return [int(node) for node in free]
        hop_s = self.hop_s[free][:, neighbours].sum(axis=1)
        alone_s = 1 / self.tables.speed[free]
        chosen = [*free[np.argsort(hop_s, kind="stable")[: NEAREST // 2]]]
        chosen += [*free[np.argsort(hop_s + alone_s / 4, kind="stable")[: NEAREST // 2]]]
        return list(dict.fromkeys(int(node) for node in chosen))

    def _depths_with(self, depths: tuple[int, ...], at: int) -> tuple[int, ...]:
        most = self.tables.num_microbatches
        if self.tables.pipeline != AHEAD:
            return self.tables.default_depths(len(depths) + 1)
        own = min(most, depths[at] + 1) if at < len(depths) else 1
        return (*(min(most, max(depth + 1, own)) for depth in depths[:at]), own, *depths[at:])

    def _depths_without(self, depths: tuple[int, ...], at: int) -> tuple[int, ...]:
        if self.tables.pipeline != AHEAD:
            return self.tables.default_depths(len(depths) - 1)
        return (*depths[:at], *depths[at + 1 :])

    def _deepen(self, point: Point) -> Iterator[Point]:
        """One microbatch more, or less, in flight in the stages up to one."""
        most = self.tables.num_microbatches
        for end in range(1, len(point.depths) + 1):
            for change in (1, -1):
                depths = (*(min(most, max(1, d + change)) for d in point.depths[:end]), *point.depths[end:])
                if all(a >= b for a, b in zip(depths, depths[1:])):
                    yield point._replace(depths=depths)

    def deepened(self, point: Point, slacks: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)) -> list[Point]:
        """The point with as many microbatches in flight as the round trips ask for, or memory allows.

        ``slacks`` are microbatches beyond that, for what the order of a program makes wait.
        """
        tables, most = self.tables, self.tables.num_microbatches
        nodes, edges = np.array(point.nodes), np.array(point.edges)
        costs = tables.costs(nodes[:, None], edges[:, None])
        trip, period = costs.round_trip_s()[:, 0], float(costs.slowest_s()[0])
        if not (np.isfinite(trip).all() and period > 0):
            return []
        state, stash = (table[edges[1:]] - table[edges[:-1]] for table in (tables.state, tables.stash))
        room = (tables.memory[nodes] * (1 + 1e-12) - state) / np.maximum(stash, 1e-9)
        found = []
        for slack in slacks:
            depths, most_before = [], most
            for wanted, fits in zip(trip / period + slack, np.minimum(room, most)):
                most_before = min(most_before, max(1, ceil(wanted - 1e-9)), max(1, int(fits)))
                depths.append(most_before)
            depths[-1] = 1
            found.append(point._replace(depths=tuple(depths)))
        return found
