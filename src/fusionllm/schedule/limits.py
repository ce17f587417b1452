"""Limits: which node may run which operator, and how long the owner's lines are busy with inputs and labels.

Pure decision. On the path: Workload + Cluster -> **limits** -> placements. The owner sends some steps ahead, so what it
sends delays nobody; but no step is shorter than its lines are busy with one.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from fusionllm.errors import PlanError
from fusionllm.schedule.nouns import Cluster, Placement, Workload


def refused(workload: Workload, cluster: Cluster) -> NDArray[np.bool_]:
    """[node, operator]: whether the node does not run it, by what it refuses or because it is pinned elsewhere."""
    table = np.zeros((len(cluster.nodes), len(workload.flops)), dtype=bool)
    by_patterns: dict[tuple[str, ...], NDArray[np.bool_]] = {}
    for index, node in enumerate(cluster.nodes):
        if node.refuses and workload.op_names:
            if node.refuses not in by_patterns:
                names = {n: any(fnmatchcase(n, p) for p in node.refuses) for n in set(workload.op_names)}
                by_patterns[node.refuses] = np.array([names[name] for name in workload.op_names])
            table[index] = by_patterns[node.refuses]
    for pin in cluster.pins:
        elsewhere = ~np.isin(np.arange(len(cluster.nodes)), pin.nodes)
        table[elsewhere, pin.op] = True
    return table


def check_allowed(workload: Workload, cluster: Cluster, placement: Placement) -> None:
    """Every node may run what it got. Raises PlanError naming the node, the operator and why not."""
    if not cluster.pins and not any(node.refuses for node in cluster.nodes):
        return
    table = refused(workload, cluster)
    edges = [0, *placement.boundaries, len(workload.flops)]
    for stage_index, (index, first, end) in enumerate(zip(placement.nodes, edges, edges[1:])):
        if not table[index, first:end].any():
            continue
        at = first + int(table[index, first:end].argmax())
        node, name = cluster.nodes[index], workload.op_names[at] if workload.op_names else f"operator {at}"
        if any(fnmatchcase(name, pattern) for pattern in node.refuses):
            why = f"refuses {name}"
        else:
            pin = next(p for p in cluster.pins if p.op % len(workload.flops) == at and index not in p.nodes)
            there = ", ".join(cluster.nodes[k].name for k in pin.nodes[:8]) or "no node that is there"
            why = f"has the {'first' if pin.op == 0 else 'last'} operator, which is pinned to {there}"
        raise PlanError(f"stage {stage_index} on {node.name} {why}; put it on another node or lift the limit")


def feed_seconds(workload: Workload, cluster: Cluster, placement: Placement) -> float:
    """Of a step, the busiest of the owner's lines."""
    owner = cluster.owner
    if owner is None or not workload.feeds:
        return 0.0
    edges = [0, *placement.boundaries, len(workload.flops)]
    sent: dict[int, float] = {}
    for index, first, end in zip(placement.nodes, edges, edges[1:]):
        num_bytes = sum(feed.num_bytes for feed in workload.feeds if any(first <= op < end for op in feed.ops))
        sent[index] = sent.get(index, 0.0) + num_bytes
    busy = [num_bytes / max(owner.bandwidth_bytes_per_s[k], 1e-300) for k, num_bytes in sent.items() if num_bytes]
    together = sum(num_bytes for k, num_bytes in sent.items() if k in owner.beyond)
    return workload.num_microbatches * max([*busy, together / owner.line_bytes_per_s], default=0.0)
