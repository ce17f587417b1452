"""Advice: which single change would help a plan most. Each is tried by planning again.

On the path: Study -> **Advice** -> `fusionllm plan`. Changes tried: a link four times as fast or with a quarter of its
delay, twice the memory for nodes that are nearly full, one more node of each kind, twice or half the microbatches. What
counts is the time per row, so that a larger batch is no gain by itself. Knows no tensor framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from fusionllm.errors import PlanError
from fusionllm.schedule.placement import Cluster, Placement, Share, Workload, select_nodes
from fusionllm.schedule.planner import plan_placement
from fusionllm.sim.variants import with_copies
from fusionllm.units import format_bandwidth, format_duration, format_num_bytes

#: The workload of another microbatch size and count; None where the caller cannot say.
Rebuild = Callable[[int, int], Workload]
FASTER = 4.0
#: A node that is fuller than this may be what limits the depth of the pipeline.
FULL = 0.7
#: A change that gains less is not worth a line.
WORTH = 0.01
#: Larger clusters are advised on the fences that the plan uses.
MAX_NODES = 64
SHOWN = 3
#: Pairs of fences whose link is tried, busiest first.
MAX_LINKS = 6


class Advice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change in words, the step it would give, and how many times as fast a row would be trained."""

    change: str
    step_s: float
    speedup: float


def advise(
    workload: Workload,
    cluster: Cluster,
    placement: Placement,
    step_s: float,
    memory: list[tuple[float, float]],
    microbatch_size: int = 1,
    rebuild: Rebuild | None = None,
) -> tuple[Advice, ...]:
    """The best few changes, best first.

    Args:
        step_s: of the plan as it is. memory: per stage, bytes it needs and bytes there are.
    """
    if len(cluster.nodes) > MAX_NODES:
        sites = {cluster.nodes[i].site for i in placement.nodes}
        kept = [i for i, node in enumerate(cluster.nodes) if node.site in sites][:MAX_NODES]
        kept = sorted({*kept, *placement.nodes})
        where = {index: k for k, index in enumerate(kept)}
        cluster = select_nodes(cluster, kept)
        placement = msgspec.structs.replace(placement, nodes=tuple(where[i] for i in placement.nodes))
    tried: list[tuple[str, Workload, Cluster, float]] = [
        (words, workload, changed, 1.0)
        for words, changed in (
            *_faster_links(cluster, placement),
            *_more_memory(cluster, placement, memory),
            *_more_nodes(cluster, placement),
        )
    ]
    if rebuild is not None:
        for words, size, count in _microbatches(microbatch_size, workload.num_microbatches):
            rows = size * count / (microbatch_size * workload.num_microbatches)
            tried.append((words, rebuild(size, count), cluster, rows))
    found = []
    for words, changed_workload, changed, rows in tried:
        try:
            after_s = plan_placement(changed_workload, changed)[0].step_s
        except PlanError:
            continue
        found.append(Advice(change=words, step_s=after_s, speedup=step_s * rows / after_s))
    found = [one for one in found if one.speedup > 1 + WORTH]
    return tuple(sorted(found, key=lambda one: (-one.speedup, one.change))[:SHOWN])


def _faster_links(cluster: Cluster, placement: Placement) -> Iterator[tuple[str, Cluster]]:
    """Links between the sites of the plan, and from these to the others; each by rate and by delay."""
    site = [node.site or node.name for node in cluster.nodes]
    used = list(dict.fromkeys(site[i] for i in placement.nodes))
    hops = list(zip(placement.nodes, placement.nodes[1:]))
    crossed = dict.fromkeys((min(site[a], site[b]), max(site[a], site[b])) for a, b in hops)
    others = [name for name in dict.fromkeys(site) if name not in used]
    pairs = [*crossed, *((min(u, o), max(u, o)) for o in others for u in used)]
    for a, b in list(dict.fromkeys(pairs))[:MAX_LINKS]:
        left, right = ([i for i, name in enumerate(site) if name == end] for end in (a, b))
        rate = max(cluster.bandwidth_bytes_per_s[i][k] for i in left for k in right)
        delay_s = max(cluster.latency_s[i][k] for i in left for k in right)
        where = f"inside {a}" if a == b else f"between {a} and {b}"
        if rate > 0:
            faster = format_bandwidth(rate * FASTER)
            yield f"the link {where} {FASTER:.0f} times as fast ({faster})", _faster(cluster, left, right, FASTER, 1.0)
        if delay_s >= 1e-3 and rate > 0:
            shorter = format_duration(delay_s / FASTER)
            yield f"a quarter of the delay {where} ({shorter})", _faster(cluster, left, right, 1.0, 1 / FASTER)


def _faster(cluster: Cluster, left: list[int], right: list[int], rate: float, delay: float) -> Cluster:
    """Both directions between two groups, the lines that they share with others included."""
    ends = (set(left), set(right))

    def joins(a: int, b: int) -> bool:
        return (a in ends[0] and b in ends[1]) or (a in ends[1] and b in ends[0])

    def scaled(rows: tuple[tuple[float, ...], ...], factor: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(x * factor if joins(a, b) else x for b, x in enumerate(row)) for a, row in enumerate(rows))

    def share(line: Share) -> Share:
        if not (ends[0] | ends[1]) & set(line.nodes):
            return line
        up, down = line.up_bytes_per_s * rate, line.down_bytes_per_s * rate
        return msgspec.structs.replace(line, up_bytes_per_s=up, down_bytes_per_s=down)

    return msgspec.structs.replace(
        cluster,
        bandwidth_bytes_per_s=scaled(cluster.bandwidth_bytes_per_s, rate),
        latency_s=scaled(cluster.latency_s, delay),
        shares=tuple(share(line) for line in cluster.shares),
    )


def _kinds(cluster: Cluster) -> dict[str, list[int]]:
    """Nodes that are alike, by what people call them."""
    kinds: dict[tuple[str, str, float, float], list[int]] = {}
    for index, node in enumerate(cluster.nodes):
        kinds.setdefault((node.site, node.device, node.flops_per_s, node.memory_bytes), []).append(index)
    named = {}
    for (site, device, *_), members in kinds.items():
        words = device or f"node like {cluster.nodes[members[0]].name}"
        named[f"{words} in {site}" if site else words] = members
    return named


def _more_memory(
    cluster: Cluster, placement: Placement, memory: list[tuple[float, float]]
) -> Iterator[tuple[str, Cluster]]:
    full = {i for i, (need, limit) in zip(placement.nodes, memory) if need > FULL * limit}
    for words, members in _kinds(cluster).items():
        if full.intersection(members):
            nodes = list(cluster.nodes)
            for i in members:
                nodes[i] = msgspec.structs.replace(nodes[i], memory_bytes=2 * nodes[i].memory_bytes)
            more = format_num_bytes(nodes[members[0]].memory_bytes)
            yield f"twice the memory ({more}) on every {words}", msgspec.structs.replace(cluster, nodes=tuple(nodes))


def _more_nodes(cluster: Cluster, placement: Placement) -> Iterator[tuple[str, Cluster]]:
    """One more of each kind of which the plan uses all there are."""
    for words, members in _kinds(cluster).items():
        if set(members) <= set(placement.nodes):
            yield f"one more {words}", with_copies(cluster, members[0], 1)


def _microbatches(size: int, count: int) -> Iterator[tuple[str, int, int]]:
    yield f"{2 * count} microbatches a step, twice the batch", size, 2 * count
    if size % 2 == 0:
        yield f"microbatches of {size // 2}, {2 * count} a step", size // 2, 2 * count
    if count % 2 == 0:
        yield f"microbatches of {2 * size}, {count // 2} a step", 2 * size, count // 2
