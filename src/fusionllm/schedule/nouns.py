"""Nouns of the planner: nodes and links in numbers, a graph in numbers, and who runs what.

Pure data. On the path: CostTable + Cluster -> **Workload, Cluster, Placement** -> planner. Knows no rule of placing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fusionllm.ir.cuts import Cut


class NodeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node as the planner sees it.

    Attributes:
        flops_per_s: achieved, not peak. memory_bytes: what a job may use.
        site: its fence; empty: unknown. device: its kind, a key of ``Workload.device_s`` where that has it.
        refuses: names of operators that it does not run, ``*`` for any part, e.g. those its backend lacks.
    """

    name: str
    flops_per_s: float
    memory_bytes: float = float("inf")
    site: str = ""
    device: str = ""
    refuses: tuple[str, ...] = ()


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line that several nodes have in common: all they send to others goes through it, and all they receive."""

    name: str
    nodes: tuple[int, ...]
    up_bytes_per_s: float
    down_bytes_per_s: float


class Pin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first operator (``op`` 0) or the last one (-1) runs on one of these nodes: where data or labels may be."""

    op: int
    nodes: tuple[int, ...]


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine that sends inputs and labels, some steps ahead.

    Attributes:
        bandwidth_bytes_per_s: to each node. line_bytes_per_s: of its site's uplink, for all ``beyond`` it together.
    """

    bandwidth_bytes_per_s: tuple[float, ...]
    line_bytes_per_s: float = float("inf")
    beyond: tuple[int, ...] = ()


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes and the links between them, ``[from][to]`` by index; 0 bytes per second means no way through."""

    nodes: tuple[NodeModel, ...]
    bandwidth_bytes_per_s: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]
    shares: tuple[Share, ...] = ()
    pins: tuple[Pin, ...] = ()
    owner: Owner | None = None


class Tied(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter that several operators use. Stages that hold it exchange its gradient once a step."""

    ops: tuple[int, ...]
    num_bytes: float


class Feed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input that the owner sends to every stage that has one of these operators, for each microbatch."""

    ops: tuple[int, ...]
    num_bytes: float


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A graph in numbers, one entry per anchored operator, for one microbatch.

    Attributes:
        flops: forward. state_bytes: weights, gradients and optimizer. stash_bytes: kept for backward per microbatch.
        device_s: forward seconds of each operator by kind of device, for kinds that are known better than by one rate.
        op_names: for nodes that refuse some. feeds: what the owner sends; empty: not counted.
        wire_dtype: of what crosses cuts. widths: elements of a row of it, per cut; codecs work on rows.
    """

    cuts: tuple[Cut, ...]
    flops: tuple[float, ...]
    state_bytes: tuple[float, ...]
    stash_bytes: tuple[float, ...]
    num_microbatches: int
    pipeline: str = "1f1b"
    tied: tuple[Tied, ...] = ()
    device_s: dict[str, tuple[float, ...]] = {}
    wire_dtype: str = "bfloat16"
    widths: tuple[int, ...] = ()
    op_names: tuple[str, ...] = ()
    feeds: tuple[Feed, ...] = ()


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Node of each stage in path order, the boundaries between them, and how many microbatches each keeps in flight.

    ``depths`` is empty where the pipeline schedule fixes them. An interleaved schedule goes through the nodes several
    times, always in the same order.
    """

    nodes: tuple[int, ...]
    boundaries: tuple[int, ...]
    depths: tuple[int, ...] = ()


def forward_seconds(workload: Workload, node: NodeModel) -> tuple[float, ...]:
    """Seconds of each operator on a node, forward, one microbatch."""
    known = workload.device_s.get(node.device)
    return known if known is not None else tuple(flops / node.flops_per_s for flops in workload.flops)


def link_rates(cluster: Cluster) -> NDArray[np.float64]:
    """[from, to] bytes per second, lines in common counted."""
    count = len(cluster.nodes)
    rate = np.array(cluster.bandwidth_bytes_per_s, dtype=float).reshape(count, -1)
    for share in cluster.shares:
        inside = np.isin(np.arange(count), share.nodes)
        rate[np.ix_(inside, ~inside)] = np.minimum(rate[np.ix_(inside, ~inside)], share.up_bytes_per_s)
        rate[np.ix_(~inside, inside)] = np.minimum(rate[np.ix_(~inside, inside)], share.down_bytes_per_s)
    return rate


def select_nodes(cluster: Cluster, indices: Sequence[int]) -> Cluster:
    """The cluster of these nodes only. A line in common to all of them stays with those it has."""
    where = {index: k for k, index in enumerate(indices)}
    shares = [msgspec.structs.replace(s, nodes=tuple(where[i] for i in s.nodes if i in where)) for s in cluster.shares]
    return Cluster(
        nodes=tuple(cluster.nodes[i] for i in indices),
        bandwidth_bytes_per_s=tuple(tuple(cluster.bandwidth_bytes_per_s[a][b] for b in indices) for a in indices),
        latency_s=tuple(tuple(cluster.latency_s[a][b] for b in indices) for a in indices),
        shares=tuple(share for share in shares if share.nodes),
        pins=tuple(
            msgspec.structs.replace(pin, nodes=tuple(k for k, index in enumerate(indices) if index in pin.nodes))
            for pin in cluster.pins
        ),
        owner=None if cluster.owner is None else _owner_of(cluster.owner, indices),
    )


def _owner_of(owner: Owner, indices: Sequence[int]) -> Owner:
    return msgspec.structs.replace(
        owner,
        bandwidth_bytes_per_s=tuple(owner.bandwidth_bytes_per_s[i] for i in indices),
        beyond=tuple(k for k, index in enumerate(indices) if index in owner.beyond),
    )
