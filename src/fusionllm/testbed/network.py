"""From a scenario to pipes: who passes through what. Pure; the emulator gets this as one JSON.

A packet of another fence goes through its host's uplink, its fence's uplink, the pair's own pipe, then the receiver's
fence's and host's downlinks. Inside a fence only the hosts' own and the pair's.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from fusionllm.testbed.nat import Kind
from fusionllm.testbed.pipe import PipeSpec
from fusionllm.testbed.scenario import Scenario, ScenarioLink, pair_spec, rate_spec

_HOSTS_PER_NET = 250


class HostAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a host is. ``namespace``: its network namespace."""

    name: str
    fence: str
    namespace: str
    address: str
    nat: Kind = ""


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """All the emulator needs.

    Attributes:
        pipes: name -> spec; ``a>b`` for a pair of hosts, ``NAME:up`` and ``NAME:down`` of a host or fence.
        offload: let the kernel hand over segments of up to 64 KiB; off where packets are lost, since a lost one would
            be 45 at once.
    """

    hosts: tuple[HostAddress, ...]
    pipes: dict[str, PipeSpec]
    offload: bool = True

    def host(self, name: str) -> HostAddress:
        return next(host for host in self.hosts if host.name == name)

    def route(self, source: HostAddress, target: HostAddress) -> list[str]:
        """Names of the pipes from one host to another, in order."""
        names = [f"{source.name}:up", f"{source.name}>{target.name}", f"{target.name}:down"]
        if source.fence != target.fence:
            names = [names[0], f"{source.fence}:up", names[1], f"{target.fence}:down", names[2]]
        return [name for name in names if name in self.pipes]


def paced_settings(scenario: Scenario) -> list[str]:
    """What a run is told to pace links by itself (`transport.shaped`), where no testbed can be made: KEY=VALUE of its
    TOML. All pairs of fences get the slowest rate and the longest delay of any; loss, jitter and queues are left out.
    """
    network, nodes = build_network(scenario, ""), {host.name for host in scenario.nodes}
    hosts = [host for host in network.hosts if host.name in nodes]
    sizes = Counter(host.fence for host in hosts)
    pairs = [(a, b) for a in hosts for b in hosts if a.fence != b.fence]
    rates = [network.pipes[name].rate_bytes_per_s for pair in pairs for name in network.route(*pair)]
    settings = [f"cluster.nodes={len(hosts)}", f"cluster.fences={list(sizes.values())}"]
    if slow := min(filter(None, rates), default=0.0):
        delay_s = max(network.pipes[f"{a.name}>{b.name}"].delay_s for a, b in pairs)
        settings += [
            f"cluster.slow_link.bandwidth={slow * 8e-6:g} Mbps",
            f"cluster.slow_link.latency={delay_s * 1e3:g} ms",
        ]
    return settings


def build_network(scenario: Scenario, bed: str) -> Network:
    """The network of a scenario. ``bed``: name of the testbed, which the namespaces carry."""
    hosts = tuple(
        HostAddress(
            name=host.name,
            fence=host.fence,
            namespace=f"{bed}.{host.name}",
            nat=host.nat,
            address=f"10.88.{index // _HOSTS_PER_NET}.{index % _HOSTS_PER_NET + 1}",
        )
        for index, host in enumerate(scenario.host)
    )
    pipes: dict[str, PipeSpec] = {}
    shared = [(host.name, host.uplink, host.downlink) for host in scenario.host]
    shared += [(fence.name, fence.uplink, fence.downlink) for fence in scenario.fence]
    for name, uplink, downlink in shared:
        for side, text in (("up", uplink), ("down", downlink)):
            if text:
                pipes[f"{name}:{side}"] = rate_spec(text)
    for source in hosts:
        for target in hosts:
            if source != target:
                pipes[f"{source.name}>{target.name}"] = _between(scenario, source, target)
    return Network(hosts=hosts, pipes=pipes, offload=not any(spec.loss for spec in pipes.values()))


def _between(scenario: Scenario, source: HostAddress, target: HostAddress) -> PipeSpec:
    """The later and the more exact line wins: hosts, then fences, then otherwise."""
    for ends in ((source.name, target.name), (source.fence, target.fence)):
        for link in reversed(scenario.link):
            if (link.a, link.b) == ends:
                return pair_spec(link, link.bandwidth)
            if (link.b, link.a) == ends:
                return pair_spec(link, link.back_bandwidth or link.bandwidth)
    if source.fence == target.fence:
        fence = next(fence for fence in scenario.fence if fence.name == source.fence)
        return pair_spec(ScenarioLink(a="", b="", latency=fence.latency), fence.bandwidth)
    return pair_spec(scenario.otherwise, scenario.otherwise.bandwidth)
