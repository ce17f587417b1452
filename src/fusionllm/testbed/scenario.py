"""Scenarios: hosts in fences and what lies between them, as a TOML. Read as hostile, checked once.

On the path: SCENARIO.toml -> Scenario -> `network.Network` (pipes by number) -> `bed.Testbed`. `docs/testbed.md`
documents the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from fusionllm.errors import UserError, known_names
from fusionllm.estimate.library import DEVICES
from fusionllm.sim.devices import find_device
from fusionllm.store.toml import convert_tree, read_toml
from fusionllm.testbed.nat import Kind
from fusionllm.testbed.pipe import PipeSpec
from fusionllm.units import parse_bandwidth_bytes_per_s, parse_duration_s, parse_num_bytes

MAX_HOSTS = 64
MAX_DELAY_S = 10.0
MAX_COMPUTE_S = 60.0
#: Names become network namespaces, folders and log files.
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,22}[a-z0-9])?")
CONGESTION = ("cubic", "reno", "bbr")


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Fence(_Table, frozen=True, kw_only=True):
    """A site. ``bandwidth``, ``latency``: between its hosts. ``uplink``, ``downlink``: what all share outwards."""

    name: str
    bandwidth: str = ""
    latency: str = "0.1 ms"
    uplink: str = ""
    downlink: str = ""


class Host(_Table, frozen=True, kw_only=True):
    """A machine.

    Attributes:
        cpu: cores it may use once throttled, 0 for all.
        role: broker and owner run on the owner's.
        nat: what stands in front of it: nothing, a ``preserving`` NAT, or a ``symmetric`` one.
        forward, backward: what a stage is to take for a microbatch where compute is emulated; programs see to it.
        gpu: or the device of `estimate.library` that it is to compute like.
    """

    name: str
    fence: str
    cpu: float = 0.0
    memory: str = ""
    uplink: str = ""
    downlink: str = ""
    role: Literal["node", "owner"] = "node"
    nat: Kind = ""
    forward: str = ""
    backward: str = ""
    gpu: str = ""


class ScenarioLink(_Table, frozen=True, kw_only=True):
    """Between two fences or two hosts; ``back_bandwidth`` from b to a where it differs."""

    a: str
    b: str
    bandwidth: str = ""
    back_bandwidth: str = ""
    latency: str = "0 ms"
    jitter: str = "0 ms"
    loss: float = 0.0
    queue: str = ""


class Otherwise(_Table, frozen=True, kw_only=True):
    """What lies between two fences that no link names."""

    bandwidth: str = ""
    latency: str = "0 ms"
    jitter: str = "0 ms"
    loss: float = 0.0
    queue: str = ""


class Scenario(_Table, frozen=True, kw_only=True):
    """A scenario file. ``congestion``: what TCP uses unless a program chooses otherwise."""

    name: str
    note: str = ""
    congestion: str = "cubic"
    fence: tuple[Fence, ...]
    host: tuple[Host, ...]
    link: tuple[ScenarioLink, ...] = ()
    otherwise: Otherwise = Otherwise()

    @property
    def nodes(self) -> list[Host]:
        """Hosts that compute."""
        return [host for host in self.host if host.role == "node"]

    @property
    def owner(self) -> Host:
        """Where broker and owner run: the host with that role, else the first."""
        return next((host for host in self.host if host.role == "owner"), self.host[0])

    @property
    def emulates_compute(self) -> bool:
        return any(host.forward or host.backward or host.gpu for host in self.host)


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises UserError naming the key, the value and what would be right."""
    return build_scenario(read_toml(path, "scenario"))


def build_scenario(raw: Mapping[str, Any]) -> Scenario:
    """Check a plain tree. Raises UserError."""
    scenario = convert_tree(raw, Scenario)
    _check_names(scenario)
    _check_values(scenario)
    return scenario


def _check_names(scenario: Scenario) -> None:
    fences, hosts = [f.name for f in scenario.fence], [h.name for h in scenario.host]
    for name in (scenario.name, *fences, *hosts):
        if NAME.fullmatch(name) is None:
            raise UserError(f"the name {name[:80]!r}: use 1 to 24 small letters, digits, dots and dashes")
    if not 1 <= len(hosts) <= MAX_HOSTS:
        raise UserError(f"{len(hosts)} hosts; a scenario has 1 to {MAX_HOSTS}")
    name, times = Counter(fences + hosts).most_common(1)[0]
    if times > 1:
        raise UserError(f"the name {name!r} stands for {times} fences or hosts; give each its own")
    for host in scenario.host:
        if host.fence not in fences:
            raise UserError(f"host {host.name} is in {host.fence[:80]!r}, no fence; {known_names(host.fence, fences)}")
    for index, link in enumerate(scenario.link):
        for end in (link.a, link.b):
            if end not in fences and end not in hosts:
                known = known_names(end, [*fences, *hosts])
                raise UserError(f"link[{index}] names {end[:80]!r}, no fence or host; {known}")
        if link.a == link.b:
            raise UserError(f"link[{index}] joins {link.a} to itself; the fence's own bandwidth is in [[fence]]")
        if (link.a in fences) != (link.b in fences):
            raise UserError(f"link[{index}] joins a fence and a host; name two fences or two hosts")
    if sum(host.role == "owner" for host in scenario.host) > 1:
        raise UserError("more than one host has role = 'owner'; there is one owner")
    if not scenario.nodes:
        raise UserError("no host has role = 'node'; nobody would compute")


def _check_values(scenario: Scenario) -> None:
    if scenario.congestion not in CONGESTION:
        raise UserError(f"congestion is {scenario.congestion[:80]!r}; {known_names(scenario.congestion, CONGESTION)}")
    for host in scenario.host:
        with _named(f"host {host.name}"):
            _check_host(host)
    for fence in scenario.fence:
        with _named(f"fence {fence.name}"):
            pair_spec(ScenarioLink(a="", b="", bandwidth=fence.bandwidth, latency=fence.latency), fence.bandwidth)
            rate_spec(fence.uplink), rate_spec(fence.downlink)
    for index, link in enumerate(scenario.link):
        with _named(f"link[{index}] ({link.a}, {link.b})"):
            pair_spec(link, link.bandwidth), rate_spec(link.back_bandwidth)
    with _named("otherwise"):
        pair_spec(scenario.otherwise, scenario.otherwise.bandwidth)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """What is wrong, and of what."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _check_host(host: Host) -> None:
    if not 0 <= host.cpu <= 1024 or 0 < host.cpu < 0.01:
        raise UserError(f"cpu is {host.cpu}; give cores, 0.01 or more, or 0 for no limit")
    if host.memory and parse_num_bytes(host.memory) < 16 << 20:
        raise UserError(f"memory is {host.memory!r}; no program starts in less than 16 MiB")
    rate_spec(host.uplink), rate_spec(host.downlink)
    if host.gpu:
        find_device(host.gpu, DEVICES)
    for text in filter(None, (host.forward, host.backward)):
        if parse_duration_s(text) > MAX_COMPUTE_S:
            raise UserError(f"a microbatch takes {text!r}; the most is {MAX_COMPUTE_S:g} s")


def rate_spec(bandwidth: str) -> PipeSpec:
    """A pipe of a rate alone; an empty text is no limit. Raises UserError."""
    return PipeSpec(rate_bytes_per_s=parse_bandwidth_bytes_per_s(bandwidth) if bandwidth else 0.0)


def pair_spec(link: ScenarioLink | Otherwise, bandwidth: str) -> PipeSpec:
    """The pipe of one direction of a link. Raises UserError."""
    delay_s, jitter_s = parse_duration_s(link.latency), parse_duration_s(link.jitter)
    for name, value in (("latency", delay_s), ("jitter", jitter_s)):
        if value > MAX_DELAY_S:
            raise UserError(f"{name} is {value:g} s; the most is {MAX_DELAY_S:g} s")
    if not 0 <= link.loss < 1:
        raise UserError(f"loss is {link.loss}; it is a probability for each packet, from 0 to below 1")
    return PipeSpec(
        rate_bytes_per_s=rate_spec(bandwidth).rate_bytes_per_s,
        delay_s=delay_s,
        jitter_s=jitter_s,
        loss=link.loss,
        queue_bytes=parse_num_bytes(link.queue) if link.queue else 0,
    )
