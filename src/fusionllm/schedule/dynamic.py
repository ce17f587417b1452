"""Dynamic program: order of nodes, cuts and nodes left out together, for one bound on the time per microbatch.

Pure decision. On the path: Tables -> **candidate points** -> local search. The chain is built from its tail. The value
of a state, seconds from the start of a forward there until its backward is done, is then the round trip of the stage in
front, so that what must be in flight to hide it, hence memory, is known inside the program. A stage of W microbatches
in flight and a round trip R takes at least R / W per microbatch: states that break the bound this way are dropped.

States: which groups of equal nodes are used from here on, the node, the place. Inside a group nodes come in their
order; a path may leave a group early and goes through each group once. With every node its own group this is every
subset and order of the nodes; with one group and ``skip`` it is one order from which any may be left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusionllm.ir.cluster import BACKWARD_OVER_FORWARD
from fusionllm.schedule.batch import Array
from fusionllm.schedule.pipeline import AHEAD
from fusionllm.schedule.tables import Point, Tables

#: Ratio of the grid of bounds, on small clusters and on others.
GRID_RATIO = 1.06
COARSE_RATIO = 1.12
#: Different sets of groups kept per bound, best first.
KEPT_PER_BOUND = 12


class _State(NamedTuple):
    """Per set of groups, node and place: least seconds to the end, stages from here on, and the decisions."""

    value: Array
    depth: NDArray[np.int16]
    until: NDArray[np.int16]
    following: NDArray[np.int16]


class Dynamic:
    """The program over groups of nodes. ``groups``: indices of nodes, equal ones together, in order."""

    def __init__(
        self,
        tables: Tables,
        groups: Sequence[Sequence[int]],
        *,
        skip: bool = False,
        places: int = 96,
        ratio: float = GRID_RATIO,
    ) -> None:
        self.tables, self.skip, self.ratio = tables, skip, ratio
        self.nodes = np.array([node for group in groups for node in group])
        starts = np.cumsum([0, *(len(group) for group in groups)])
        self.groups = [list(range(a, b)) for a, b in zip(starts, starts[1:])]
        self.places = np.array(tables.thin(places))
        self._add_stages()
        self._add_links()

    def _add_stages(self) -> None:
        """Seconds of each range of places and the microbatches that fit beside its state, per kind of node."""
        at, tables = self.places, self.tables
        kinds: dict[tuple[int, float], int] = {}
        pairs = [(int(tables.kind[v]), float(tables.memory[v])) for v in self.nodes]
        self.kind = [kinds.setdefault(pair, len(kinds)) for pair in pairs]
        state = tables.state[at][None, :] - tables.state[at][:, None]
        stash = np.maximum(tables.stash[at][None, :] - tables.stash[at][:, None], 1e-9)
        empty = np.tril(np.ones_like(state, dtype=bool))
        self.work, self.room = [], []
        for kind, memory in kinds:
            sums = tables.forward_s[kind][at]
            seconds = (sums[None, :] - sums[:, None]) * (1 + BACKWARD_OVER_FORWARD)
            room = np.minimum(np.floor((memory * (1 + 1e-12) - state) / stash), tables.num_microbatches)
            least = tables.num_microbatches if tables.pipeline == "gpipe" else 1
            banned = tables.refused[kind][at][None, :] > tables.refused[kind][at][:, None]
            self.work.append(np.where(empty | banned | (room < least), np.inf, seconds))
            self.room.append(room)

    def _add_links(self) -> None:
        at, tables = self.places, self.tables
        num_bytes = np.where(np.isfinite(tables.cut_bytes[at]), tables.cut_bytes[at], 0.0)
        rate, latency = (table[np.ix_(self.nodes, self.nodes)] for table in (tables.rate, tables.latency))
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.nan_to_num(num_bytes / rate[:, :, None], nan=np.inf, posinf=np.inf)
        back = out.transpose(1, 0, 2)
        self.busy = np.maximum(out, back)
        self.trip = out + back + 2 * latency[:, :, None]

    def bounds(self) -> tuple[float, float]:
        """Seconds per microbatch if all nodes shared perfectly, and on the slowest alone."""
        whole = [work[0, -1] for work in self.work]
        total = [(self.tables.forward_s[int(self.tables.kind[v]), -1]) for v in self.nodes]
        shared = (1 + BACKWARD_OVER_FORWARD) / sum(1 / max(t, 1e-300) for t in total)
        slowest = max([(1 + BACKWARD_OVER_FORWARD) * max(total), *(w for w in whole if np.isfinite(w))])
        return max(float(shared), 1e-300), max(float(slowest), 1e-300)

    def candidates(self) -> Iterator[tuple[float, Point]]:
        """Points with an estimate of their step in seconds, over a grid of bounds from the least that can be kept."""
        rounds = self.tables.num_microbatches - 1
        low, high = self.bounds()
        low = max(low, high * 1e-6)
        limit = high * 1e4 + float(np.where(np.isfinite(self.trip), self.trip, 0).max())
        while not (found := self.solve(high)):
            if high > limit:
                return
            low, high = high, high * 2
        best = np.inf
        while high / low > self.ratio:
            middle = float(np.sqrt(low * high))
            solved = self.solve(middle)
            low, high, found = (low, middle, solved) if solved else (middle, high, found)
        fastest = min((found[0][0], *(v for v, _ in found)))
        while True:
            for value, point in found:
                best = min(best, value + rounds * high)
                fastest = min(fastest, value)
                yield value + rounds * high, point
            high *= self.ratio
            if rounds * high + self._alone_s() > best or high > limit:
                return
            found = self.solve(high)

    def _alone_s(self) -> float:
        """No path is shorter than the whole graph on the fastest node."""
        return float((1 + BACKWARD_OVER_FORWARD) * min(self.tables.forward_s[self.tables.kind[self.nodes], -1]))

    def solve(self, bound_s: float) -> list[tuple[float, Point]]:
        """The best paths whose stages and links keep ``bound_s`` seconds per microbatch; none when no path does."""
        count, width = 1 << len(self.groups), len(self.places)
        shape = (count, len(self.nodes), width)
        state = _State(
            np.full(shape, np.inf), np.zeros(shape, np.int16), np.zeros(shape, np.int16), np.zeros(shape, np.int16)
        )
        self.bounded_work = [np.where(work > bound_s, np.inf, work) for work in self.work]
        self.bounded_trip = np.where(self.busy > bound_s, np.inf, self.trip)
        self.room_s = [
            np.where(room < self.tables.num_microbatches, room * bound_s * (1 + 1e-9), np.inf) for room in self.room
        ]
        for mask in range(1, count):
            for index, group in enumerate(self.groups):
                if mask >> index & 1:
                    for v in reversed(group):
                        self._extend(state, mask, index, v, bound_s)
        starts = [
            (float(state.value[mask, group[0], 0]), mask, group[0])
            for mask in range(1, count)
            for index, group in enumerate(self.groups)
            if mask >> index & 1
        ]
        if self.skip:
            starts = [(float(state.value[1, v, 0]), 1, v) for v in self.groups[0]]
        starts = sorted(s for s in starts if np.isfinite(s[0]))[:KEPT_PER_BOUND]
        return [(value, self._path(state, mask, v)) for value, mask, v in starts]

    def _followers(self, mask: int, index: int, v: int) -> list[tuple[int, int]]:
        """(set of groups, node) that may come after ``v``."""
        group = self.groups[index]
        later = group[group.index(v) + 1 :] if self.skip else group[group.index(v) + 1 :][:1]
        rest = mask & ~(1 << index)
        return [(mask, u) for u in later] + [
            (rest, self.groups[h][0]) for h in range(len(self.groups)) if rest >> h & 1
        ]

    def _extend(self, state: _State, mask: int, index: int, v: int, bound_s: float) -> None:
        """Fill the states of node ``v``: what follows after each cut, then where to cut."""
        width = len(self.places)
        rest, depth = np.full(width, np.inf), np.zeros(width, np.int16)
        after = self._followers(mask, index, v)
        if after:
            masks, nodes = (np.array(part) for part in zip(*after))
            options = self.bounded_trip[v, nodes] + state.value[masks, nodes]
            best = options.argmin(axis=0)
            column = np.arange(width)
            rest = options[best, column]
            depth = state.depth[masks[best], nodes[best], column]
            state.following[mask, v] = nodes[best]
        rest[-1], depth[-1] = (0.0 if mask == 1 << index else np.inf), 0
        kind, most = self.kind[v], self.tables.num_microbatches
        total = self.bounded_work[kind] + rest[None, :]
        if self.tables.pipeline == AHEAD:
            total[total > self.room_s[kind]] = np.inf
        elif self.tables.pipeline != "gpipe":
            held = np.minimum(depth + 1, most)
            longest = np.where(held < most, held * (bound_s * (1 + 1e-9)), np.inf)
            total[(held[None, :] > self.room[kind]) | (total > longest[None, :])] = np.inf
        state.until[mask, v] = until = total.argmin(axis=1)
        state.value[mask, v] = total[np.arange(width), until]
        state.depth[mask, v] = depth[until] + 1

    def _path(self, state: _State, mask: int, v: int) -> Point:
        nodes, edges, place = [v], [0], 0
        group = {v: index for index, group in enumerate(self.groups) for v in group}
        while (place := int(state.until[mask, v, place])) < len(self.places) - 1:
            edges.append(int(self.places[place]))
            following = int(state.following[mask, v, place])
            if group[following] != group[v]:
                mask &= ~(1 << group[v])
            v = following
            nodes.append(v)
        tables = self.tables
        return Point(
            tuple(int(self.nodes[v]) for v in nodes), (*edges, tables.num_ops), tables.default_depths(len(nodes))
        )
