"""Partitioners: where to cut the sequence of anchored operators into stages.

Pure decision: takes cuts and costs as numbers, knows no graph execution, device or link.
On the path: CostTable -> **boundaries** -> `ir.cuts.split_graph`.

All partitioners share one rule. Around each balanced target lies a window of 30 % of a stage to either side. The cuts
of fewest bytes in each window are the candidates, and among these the largest stage is made as small as possible. When
a window holds no cut (few or very unequal operators), all cuts are candidates: any count up to the operators works.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from fusionllm.errors import PlanError, UserError, known_names
from fusionllm.ir.cuts import Cut, anchored_ops, list_cuts
from fusionllm.ir.graph import OpGraph

#: Half width of the window around a balanced target, in parts of the smaller neighbouring stage.
#: Below 0.5, so that windows never overlap.
WINDOW = 0.3

Partitioner = Callable[[Sequence[Cut], Sequence[float], int], list[int]]


def equal_number(cuts: Sequence[Cut], costs: Sequence[float], num_stages: int) -> list[int]:
    """Stages of about the same number of operators. Of ``costs`` only the length is used."""
    return equal_compute(cuts, [1.0] * len(costs), num_stages)


def equal_compute(cuts: Sequence[Cut], costs: Sequence[float], num_stages: int) -> list[int]:
    """Stages of about the same cost: `proportional` with equal shares."""
    if num_stages < 1:
        raise PlanError(f"num_stages is {num_stages}; it must be at least 1")
    return proportional(cuts, costs, [1.0] * num_stages)


def proportional(cuts: Sequence[Cut], costs: Sequence[float], shares: Sequence[float]) -> list[int]:
    """Stages whose costs are in proportion to ``shares``, cut where few bytes cross.

    Args:
        cuts: the legal cuts in order, as `ir.cuts.list_cuts` gives them.
        costs: one number >= 0 per anchored operator, in any unit, e.g. forward FLOPs.
        shares: one number > 0 per stage, e.g. the speed of its node.

    Returns:
        ``len(shares) - 1`` increasing boundaries into the sequence of anchored operators.

    Raises:
        PlanError: more stages than there are operators, or places to cut.
    """
    num_stages = len(shares)
    if num_stages > len(cuts) + 1:
        raise PlanError(
            f"more stages than operators: {num_stages} stages, but the graph can be cut into at most {len(cuts) + 1}; "
            f"lower num_stages to {len(cuts) + 1} or fewer"
        )
    if min(shares) <= 0:
        raise PlanError(f"a stage with share {min(shares)}; every share must be above zero")
    if num_stages == 1:
        return []
    prefix = [0.0, *accumulate(float(c) for c in costs)]
    if prefix[-1] < 1e-200:  # nothing to balance, or too small to divide
        prefix = [float(i) for i in range(len(costs) + 1)]
    # what each stage should cost
    fair = [prefix[-1] * share / sum(shares) for share in shares]
    windows = _windows(cuts, prefix, fair)
    if all(windows):
        return _best_of_windows(windows, prefix, fair)
    return _smallest_bottleneck(cuts, prefix, fair)


def _windows(cuts: Sequence[Cut], prefix: Sequence[float], fair: Sequence[float]) -> list[list[int]]:
    """Per target, the boundaries of fewest bytes within the window."""
    places = [prefix[c.boundary] for c in cuts]
    windows = []
    for target, left, right in zip(accumulate(fair), fair, fair[1:]):
        reach = WINDOW * min(left, right)
        inside = cuts[bisect_right(places, target - reach) : bisect_right(places, target + reach)]
        least = min(((c.num_bytes, len(c.values)) for c in inside), default=None)
        windows.append([c.boundary for c in inside if (c.num_bytes, len(c.values)) == least])
    return windows


def _best_of_windows(windows: Sequence[Sequence[int]], prefix: Sequence[float], fair: Sequence[float]) -> list[int]:
    """One boundary per window: the largest stage as small as possible, then the most even (least sum of squares)."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for window, wanted in zip([*windows, [len(prefix) - 1]], fair):
        best = {
            end: min(
                (max(top, load := (prefix[end] - prefix[start]) / wanted), squares + load * load, (*path, end))
                for start, (top, squares, path) in best.items()
            )
            for end in window
        }
    ((_, _, path),) = best.values()
    return list(path[:-1])


def _smallest_bottleneck(cuts: Sequence[Cut], prefix: Sequence[float], fair: Sequence[float]) -> list[int]:
    """Any of the cuts: bisect how far stages may exceed their fair cost, then even out below that."""
    sums = [0.0, *(prefix[cut.boundary] for cut in cuts), prefix[-1]]

    def fits(limit: float) -> bool:
        at = 0
        for k, cost in enumerate(fair[:-1], 1):
            furthest = min(bisect_right(sums, sums[at] + limit * cost) - 1, len(sums) - 1 - (len(fair) - k))
            if furthest <= at:
                return False
            at = furthest
        return sums[-1] - sums[at] <= limit * fair[-1]

    low, high = 1.0, prefix[-1] / min(fair) * (1 + 1e-9)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return [cuts[k - 1].boundary for k in _even(sums, [0, *(cut.num_bytes for cut in cuts)], fair, high)]


def _even(sums: Sequence[float], num_bytes: Sequence[int], fair: Sequence[float], limit: float) -> list[int]:
    """Indices into ``sums`` at which stages end: no stage above ``limit`` times its fair cost, each near its share.

    Near means within a window, and in that where fewest bytes cross.

    What lies between two places and costs more than a mean stage counts as one, so that it takes a stage for itself and
    does not let all the others be as unequal.
    """
    count, end = len(fair), len(sums) - 1
    pieces = [b - a for a, b in zip(sums, sums[1:])]
    whole = sums[-1]
    for _ in range(30):
        whole = sum(min(piece, whole / count) for piece in pieces)
    counted = [0.0, *accumulate(min(piece, whole / count) for piece in pieces)]
    earliest = [0] * count + [end]  # from which the stages from here on can do all the rest
    for k in range(count - 1, 0, -1):
        least = bisect_left(sums, sums[earliest[k + 1]] - limit * fair[k] * (1 + 1e-9))
        earliest[k] = max(k, min(least, earliest[k + 1] - 1))
    chosen, at, left = [], 0, sum(fair)
    for k in range(count - 1):
        target = counted[at] + (counted[end] - counted[at]) * fair[k] / left
        last = min(bisect_right(sums, sums[at] + limit * fair[k] * (1 + 1e-9)) - 1, end - (count - 1 - k))
        reach = WINDOW * (counted[end] - counted[at]) * min(fair[k : k + 2]) / left
        first = max(at + 1, earliest[k + 1])
        inside = range(
            max(first, bisect_left(counted, target - reach)), min(last, bisect_right(counted, target + reach) - 1) + 1
        )
        nearest = max(first, min(last, bisect_left(counted, target)))
        at = min(inside or [nearest], key=lambda i: (num_bytes[i], abs(counted[i] - target)))
        chosen.append(at)
        left -= fair[k]
    return chosen


#: Partitioners by the name used in a run's configuration.
PARTITIONERS: dict[str, Partitioner] = {"equal-number": equal_number, "equal-compute": equal_compute}
#: Those that look at devices and links: the paper's, ours, and every placement of a few nodes and cuts.
SURVEYED = ("op-fence", "dp", "exhaustive")


def partition_graph(
    graph: OpGraph,
    num_stages: int,
    method: str,
    symbols: Mapping[str, int],
    costs: Sequence[float] | None = None,
) -> list[int]:
    """Boundaries for `ir.cuts.split_graph`.

    Args:
        method: a name of ``PARTITIONERS``.
        symbols: concrete sizes to count bytes with, e.g. ``{"B": microbatch_size}``.
        costs: cost of each anchored operator, e.g. `estimate.flops.anchored_flops`; equal-number needs none.

    Raises:
        UserError: unknown method. PlanError: more stages than operators, costs missing or for another graph.
    """
    partitioner = PARTITIONERS.get(method)
    if partitioner is None:
        raise UserError(f"unknown partitioner {method!r}; {known_names(method, PARTITIONERS)}")
    num_ops = len(anchored_ops(graph))
    if costs is None and method != "equal-number":
        raise PlanError(
            f"{method} needs the operators' costs; pass costs=estimate.flops.anchored_flops(graph, symbols)"
        )
    if costs is not None and len(costs) != num_ops:
        raise PlanError(f"{len(costs)} costs for a graph of {num_ops} operators to distribute; give one per operator")
    return partitioner(list_cuts(graph, symbols), [1.0] * num_ops if costs is None else costs, num_stages)
