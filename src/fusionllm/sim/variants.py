"""Variants: clusters like another one, with more memory or with more nodes of a kind.

On the path: Cluster -> **Cluster** -> planner, for what `sim.study`, `sim.advice` and `sim.misfit` compare.
"""

from __future__ import annotations

import msgspec

from fusionllm.schedule.placement import Cluster, select_nodes


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """``factor`` times the memory on every node."""
    nodes = tuple(msgspec.structs.replace(n, memory_bytes=n.memory_bytes * factor) for n in cluster.nodes)
    return msgspec.structs.replace(cluster, nodes=nodes)


def with_copies(cluster: Cluster, index: int, count: int) -> Cluster:
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
    new = tuple(range(len(cluster.nodes), len(order)))
    own = [share for share in cluster.shares if share.name == node.name]  # every copy has a line like it
    shares = [
        msgspec.structs.replace(s, nodes=(*s.nodes, *new)) if index in s.nodes and s not in own else s
        for s in cluster.shares
    ]
    shares += [msgspec.structs.replace(s, name=c.name, nodes=(k,)) for s in own for c, k in zip(copies, new)]
    return msgspec.structs.replace(
        grown,
        shares=tuple(shares),
        nodes=(*cluster.nodes, *copies),
        bandwidth_bytes_per_s=tuple(tuple(rate(a, b) for b in size) for a in size),
    )
