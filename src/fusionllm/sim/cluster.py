"""Cluster files: machines one has, or would like to have, as a TOML. Read as hostile, checked once.

On the path: CLUSTER.toml -> ClusterSpec -> `schedule.placement.Cluster` -> planner. Knows the library of devices, no
tensor framework. `docs/planning.md` documents the file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from fusionllm.errors import UserError, known_names
from fusionllm.estimate.device import DeviceRates, lambda_rates
from fusionllm.estimate.library import LAMBDA
from fusionllm.ir.ops import OPS
from fusionllm.schedule.placement import Cluster, NodeModel, Owner, Pin, Share
from fusionllm.sim.devices import Device, check_device, device_block, find_device, known_devices
from fusionllm.store.atomic import write_atomic
from fusionllm.store.toml import convert_tree, parse_toml, read_text, read_toml
from fusionllm.units import parse_bandwidth_bytes_per_s, parse_duration_s, parse_num_bytes

MAX_NODES = 10_000
_NAME = re.compile(r"[\w][\w.+ -]{0,63}")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Fence(_Table, frozen=True, kw_only=True):
    """A site. ``bandwidth``, ``latency``: inside. ``uplink``, ``downlink``: what all its nodes share to outside."""

    name: str
    bandwidth: str = "1 Gbps"
    latency: str = "0.2 ms"
    uplink: str = ""
    downlink: str = ""


class Node(_Table, frozen=True, kw_only=True):
    """``count`` equal nodes of a fence: a known ``device``, or ``flops_per_s`` (achieved) and ``memory``.

    ``refuses``: names of operators that they do not run, e.g. because their backend lacks them; ``*`` for any part.
    ``uplink``, ``downlink``: what all links of each such node share; empty: no limit but the links'.
    """

    fence: str
    device: str = ""
    count: int = 1
    name: str = ""
    flops_per_s: float = 0.0
    memory: str = ""
    uplink: str = ""
    downlink: str = ""
    refuses: tuple[str, ...] = ()


class ClusterLink(_Table, frozen=True, kw_only=True):
    """Between two fences or two nodes; ``back_bandwidth`` from b to a where it differs."""

    a: str
    b: str
    bandwidth: str
    back_bandwidth: str = ""
    latency: str = "10 ms"


class Otherwise(_Table, frozen=True, kw_only=True):
    """The link of pairs of fences that no other line names."""

    bandwidth: str
    latency: str = "20 ms"


class PinnedStage(_Table, frozen=True, kw_only=True):
    """The ``first`` or ``last`` stage stays on a node or in a fence, where the data or the labels may be."""

    stage: Literal["first", "last"]
    to: str


class OwnerPlace(_Table, frozen=True, kw_only=True):
    """The fence of the machine that sends inputs and labels."""

    fence: str


class ClusterSpec(_Table, frozen=True, kw_only=True):
    """A cluster file. ``goodput``: part of a link's rate that payload gets. ``device``: those that were calibrated."""

    name: str = ""
    note: str = ""
    goodput: float = 0.9
    fence: tuple[Fence, ...]
    node: tuple[Node, ...]
    device: tuple[Device, ...] = ()
    link: tuple[ClusterLink, ...] = ()
    otherwise: Otherwise | None = None
    pin: tuple[PinnedStage, ...] = ()
    owner: OwnerPlace | None = None


def load_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file. Raises UserError naming the key, the value and what would be right."""
    return build_spec(read_toml(path, "cluster file"))


def append_device(path: Path, device: Device) -> None:
    """Write a device at the end of a cluster file, if the file with it is one. Raises UserError."""
    text = f"{read_text(path).rstrip()}\n\n{device_block(device)}"
    build_spec(parse_toml(text, path, "cluster file"))
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None


def build_spec(raw: dict[str, Any]) -> ClusterSpec:
    """Check a plain tree. Raises UserError."""
    spec = convert_tree(raw, ClusterSpec)
    check_spec(spec)
    return spec


def check_spec(spec: ClusterSpec) -> None:
    """Names unique and known, counts and rates in range. Raises UserError."""
    fences, names = [fence.name for fence in spec.fence], node_names(spec)
    for name in [*fences, *(node.name for node in spec.node if node.name)]:
        check_name(name, "a fence or node")
    for index, device in enumerate(spec.device):
        check_name(device.name, "a device")
        check_device(device, f"device[{index}]")
    known = known_devices(spec.device)
    if not 0 < spec.goodput <= 1:
        raise UserError(f"goodput is {spec.goodput}; it must lie above 0 and not above 1")
    for index, node in enumerate(spec.node):
        where = f"node[{index}]"
        if node.fence not in fences:
            raise UserError(f"{where}.fence is {node.fence[:80]!r}; {known_names(node.fence, fences)}")
        for pattern in node.refuses:
            _check_pattern(pattern, f"{where}.refuses")
        if node.device:
            find_device(node.device, known)
        if not 1 <= node.count <= MAX_NODES:
            raise UserError(f"{where}.count is {node.count}; it must lie between 1 and {MAX_NODES}")
        if not 0 <= node.flops_per_s < math.inf:
            raise UserError(f"{where}.flops_per_s is {node.flops_per_s}; it must be finite and above zero")
        if not node.device and not (node.flops_per_s and node.memory):
            raise UserError(f"{where} has neither a device nor both flops_per_s and memory")
    if not names or len(names) > MAX_NODES:
        raise UserError(f"a cluster of {len(names)} nodes; it must have between 1 and {MAX_NODES}")
    for what, given in (("fences or nodes", fences + names), ("devices", [device.name for device in spec.device])):
        for name, times in Counter(given).most_common(1):
            if times > 1:
                raise UserError(f"the name {name!r} stands for {times} {what}; give each its own")
    if spec.owner is not None and spec.owner.fence not in fences:
        raise UserError(f"owner.fence is {spec.owner.fence[:80]!r}; {known_names(spec.owner.fence, fences)}")
    for index, link in enumerate(spec.link):
        if link.a == link.b:
            raise UserError(
                f"link[{index}] joins {link.a[:80]!r} to itself; a fence's own bandwidth is in its [[fence]]"
            )
    named = [(f"link[{index}]", name) for index, link in enumerate(spec.link) for name in (link.a, link.b)]
    named += [(f"pin[{index}]", pin.to) for index, pin in enumerate(spec.pin)]
    for where, name in named:
        if name not in fences and name not in names:
            raise UserError(f"{where} names {name[:80]!r}, no fence or node; {known_names(name, [*fences, *names])}")


def _check_pattern(pattern: str, where: str) -> None:
    """It is of a library of one's own, or some listed operator is meant. Raises UserError."""
    library, dot, _ = pattern.partition(".")
    own = dot and library not in {name.partition(".")[0] for name in OPS} and "*" not in library
    if not own and not any(fnmatchcase(name, pattern) for name in OPS):
        raise UserError(f"{where} has {pattern[:80]!r}, no operator; docs/operators.md lists them, * is for any part")


def check_name(name: str, what: str) -> None:
    """Refuse what cannot stand in a file or a sentence. Raises UserError."""
    if _NAME.fullmatch(name) is None:
        raise UserError(f"{name[:80]!r} is no name for {what}; use letters, digits, dots and dashes")


def node_names(spec: ClusterSpec) -> list[str]:
    """Names of all nodes in order: as given, or the fence with a number."""
    names, counts = [], dict.fromkeys((fence.name for fence in spec.fence), 0)
    for node in spec.node:
        for k in range(node.count):
            given = node.name if node.count == 1 else f"{node.name}{k}" if node.name else ""
            names.append(given or f"{node.fence}{counts.get(node.fence, 0)}")
            counts[node.fence] = counts.get(node.fence, 0) + 1
    return names


def device_rates(spec: ClusterSpec, precision: str = "bfloat16") -> dict[str, DeviceRates]:
    """Achieved rates of all devices that the file may name: measured ones, and the library's by their datasheets."""
    return {name: device.rates(precision) for name, device in known_devices(spec.device).items()}


def unmeasured_devices(spec: ClusterSpec, precision: str) -> tuple[str, ...]:
    """Devices of the file's nodes that were not measured in that precision: their rates are those of float32."""
    named = sorted({entry.device for entry in spec.node if entry.device})
    devices = {device.name: device for device in spec.device}
    return tuple(
        name for name in named if precision != "float32" and name in devices and devices[name].bfloat16 is None
    )


def build_cluster(spec: ClusterSpec, precision: str = "bfloat16", device_model: str = "rates") -> Cluster:
    """The cluster in numbers.

    Args:
        precision: ``float32`` or ``bfloat16``, for the peaks of known devices.
        device_model: ``rates`` of the library per kind of operator, or the paper's one ``lambda``.

    Raises:
        UserError: an unknown device, or a rate, size or duration that is not one.
    """
    nodes = _build_nodes(spec, precision, device_model)
    rates, latencies = _build_links(spec, nodes)
    entries = [node for node in spec.node for _ in range(node.count)]
    members = {fence.name: tuple(i for i, n in enumerate(nodes) if n.site == fence.name) for fence in spec.fence}
    shares = [_share(fence.name, members[fence.name], fence, spec.goodput) for fence in spec.fence if _has_line(fence)]
    shares += [_share(n.name, (i,), e, spec.goodput) for i, (n, e) in enumerate(zip(nodes, entries)) if _has_line(e)]
    return Cluster(
        nodes=nodes,
        bandwidth_bytes_per_s=tuple(map(tuple, rates)),
        latency_s=tuple(map(tuple, latencies)),
        shares=tuple(shares),
        pins=tuple(
            Pin(
                op=0 if pin.stage == "first" else -1,
                nodes=tuple(i for i, node in enumerate(nodes) if pin.to in (node.name, node.site)),
            )
            for pin in spec.pin
        ),
        owner=None if spec.owner is None else _build_owner(spec, spec.owner.fence, nodes, shares),
    )


def _has_line(entry: Fence | Node) -> bool:
    return bool(entry.uplink or entry.downlink)


def _share(name: str, nodes: tuple[int, ...], entry: Fence | Node, goodput: float) -> Share:
    """The line of a fence or a node; the direction that is left out is as the other."""
    texts = entry.uplink or entry.downlink, entry.downlink or entry.uplink
    up, down = (parse_bandwidth_bytes_per_s(text) * goodput for text in texts)
    return Share(name=name, nodes=nodes, up_bytes_per_s=up, down_bytes_per_s=down)


def _build_owner(spec: ClusterSpec, fence: str, nodes: tuple[NodeModel, ...], shares: list[Share]) -> Owner:
    """Its rates to all nodes, and its fence's uplink, which those outside have in common."""
    between = _rates(spec)
    rates = [between("", fence, node)[0] for node in nodes]
    beyond = tuple(i for i, node in enumerate(nodes) if node.site != fence)
    line = min((share.up_bytes_per_s for share in shares if share.name == fence), default=math.inf)
    for share in shares:
        if share.name != fence:
            rates = [min(r, share.down_bytes_per_s) if i in share.nodes else r for i, r in enumerate(rates)]
    return Owner(bandwidth_bytes_per_s=tuple(rates), line_bytes_per_s=line, beyond=beyond)


def _build_nodes(spec: ClusterSpec, precision: str, device_model: str) -> tuple[NodeModel, ...]:
    names, devices = iter(node_names(spec)), known_devices(spec.device)
    nodes = []
    for entry in spec.node:
        flops_per_s, memory_bytes = entry.flops_per_s, float(parse_num_bytes(entry.memory)) if entry.memory else 0.0
        if entry.device:
            device = find_device(entry.device, devices)
            lam = lambda_rates(device.peak(precision), LAMBDA) if device_model == "lambda" else device.rates(precision)
            flops_per_s, memory_bytes = flops_per_s or lam.matmul, memory_bytes or device.usable_bytes
        if memory_bytes <= 0:
            raise UserError(f"a node of fence {entry.fence} has no memory; give it like memory = '24 GB'")
        known = "" if entry.flops_per_s or device_model == "lambda" else entry.device
        for _ in range(entry.count):
            nodes.append(
                NodeModel(
                    name=next(names),
                    flops_per_s=flops_per_s,
                    memory_bytes=memory_bytes,
                    site=entry.fence,
                    device=known,
                    refuses=entry.refuses,
                )
            )
    return tuple(nodes)


def _build_links(spec: ClusterSpec, nodes: tuple[NodeModel, ...]) -> tuple[list[list[float]], list[list[float]]]:
    """Rates and latencies, [from][to]."""
    between = _rates(spec)
    table = [[between(a.name, a.site, b) for b in nodes] for a in nodes]
    return [[rate for rate, _ in row] for row in table], [[latency for _, latency in row] for row in table]


def _rates(spec: ClusterSpec) -> Callable[[str, str, NodeModel], tuple[float, float]]:
    """Rate and latency from a name in a site to a node; the later and more exact line wins, nodes before fences."""

    def numbers(bandwidth: str, latency: str) -> tuple[float, float]:
        return parse_bandwidth_bytes_per_s(bandwidth) * spec.goodput, parse_duration_s(latency)

    fences: dict[tuple[str, str], tuple[float, float]] = {}
    pairs: dict[tuple[str, str], tuple[float, float]] = {}
    site_names = {fence.name for fence in spec.fence}
    for fence in spec.fence:
        fences[fence.name, fence.name] = numbers(fence.bandwidth, fence.latency)
    for link in spec.link:
        into = fences if link.a in site_names and link.b in site_names else pairs
        into[link.a, link.b] = numbers(link.bandwidth, link.latency)
        into[link.b, link.a] = numbers(link.back_bandwidth or link.bandwidth, link.latency)
    rest = numbers(spec.otherwise.bandwidth, spec.otherwise.latency) if spec.otherwise is not None else (0.0, 0.0)

    def between(name: str, site: str, b: NodeModel) -> tuple[float, float]:
        for key in ((name, b.name), (name, b.site), (site, b.name)):
            if key in pairs:
                return pairs[key]
        return fences.get((site, b.site), rest)

    return between
