"""Survey: what devices and links can do, measured when a job wants to be planned by it.

Owns the waiting, not the sockets: it sends orders through the broker and is told the answers. What was measured is kept
while the node stays, except over emulated links, which belong to a job. On the path: nodes -> **Survey** ->
`schedule.placement.Cluster`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from fusionllm.broker.planning import Surveyed
from fusionllm.errors import GraphError, PlanError, RemoteProtocolError
from fusionllm.estimate.device import fit_rates
from fusionllm.ir.cluster import NO_WAY, LinkProfile, NodeProfile, Precision, check_link_profile, check_node_profile
from fusionllm.protocol import messages as m
from fusionllm.protocol.membership import Member
from fusionllm.schedule.placement import Cluster, NodeModel

log = logging.getLogger(__name__)

CALIBRATE_S = 180.0
PROBE_S = 90.0
PROBE_BYTES = 16 << 20
#: With more nodes than this only the first of each fence are probed; other pairs are taken to be like theirs.
MAX_PROBED = 32
PROBED_PER_FENCE = 2

Send = Callable[[str, object], Awaitable[None]]
Pair = tuple[str, str]


class Survey:
    """Profiles by name.

    Args:
        send: a control message to a node.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._devices: dict[str, dict[Precision, NodeProfile]] = {}
        self._asked: dict[str, Precision] = {}
        self._links: dict[Pair, LinkProfile] = {}
        self._waits: dict[Pair, asyncio.Future[None]] = {}

    # told by the broker

    def handle(self, name: str, message: m.Calibrated | m.Probed) -> None:
        """Take an answer. Raises RemoteProtocolError for one that no device or link could have given."""
        try:
            if isinstance(message, m.Calibrated):
                profile = check_node_profile(message.profile)
                if message.precision == self._asked.get(name):
                    self._devices.setdefault(name, {})[message.precision] = profile
                    self._wake((name, ""))
            elif (name, message.peer) in self._waits:
                self._links[name, message.peer] = check_link_profile(message.profile)
                self._wake((name, message.peer))
                if message.reason:
                    log.warning("%s cannot reach %s: %s", name, message.peer, message.reason)
        except GraphError as error:
            raise RemoteProtocolError(f"{name} reported a {error}") from None

    def observe(self, name: str, links: Mapping[str, LinkProfile]) -> None:
        """What a job's traffic shows of ways already measured. Raises RemoteProtocolError."""
        for peer, profile in links.items():
            if (name, peer) in self._links:
                try:
                    self._links[name, peer] = check_link_profile(profile)
                except GraphError as error:
                    raise RemoteProtocolError(f"{name} reported a {error}") from None

    def forget(self, name: str) -> None:
        """A node is gone; who waits for it waits no longer."""
        self._devices.pop(name, None)
        self._asked.pop(name, None)
        for pair in [pair for pair in self._links if name in pair]:
            del self._links[pair]
        for pair in [pair for pair in self._waits if name in pair]:
            self._wake(pair)

    # asked by the broker

    async def measure(
        self, nodes: Sequence[Member], precision: Precision, shapes: Callable[[Member, Member], m.LinkShape | None]
    ) -> None:
        """Measure what is not known yet: all devices at once, then links, no node in two probes at a time.

        Args:
            precision: devices are measured as they train in it.
            shapes: the emulated link from one node to another, None for a real one.
        """
        fresh = [node.name for node in nodes if precision not in self._devices.get(node.name, ())]
        self._asked.update(dict.fromkeys(fresh, precision))
        await asyncio.gather(*(self._ask(name, "", m.Calibrate(precision=precision), CALIBRATE_S) for name in fresh))
        probed = _to_probe(nodes)
        for turn in _rounds(len(probed)):
            await asyncio.gather(
                *(self._probe_both_ways(probed[a], probed[b], shapes(probed[a], probed[b])) for a, b in turn)
            )

    def view(self, nodes: Sequence[Member], precision: Precision) -> Surveyed:
        """These nodes in numbers. Raises PlanError naming one that could not be measured."""
        models, rates, speeds = [], {}, {}
        for node in nodes:
            profile = self._devices.get(node.name, {}).get(precision)
            if profile is None:
                raise PlanError(f"{node.name} has not measured its device; look into its log, or let it join again")
            rates[node.name], speeds[node.name] = fit_rates(profile.samples), profile.codecs
            models.append(
                NodeModel(
                    name=node.name, flops_per_s=rates[node.name].matmul, memory_bytes=profile.memory_bytes,
                    site=node.fence, device=node.name,
                )
            )  # fmt: skip
        links = [[self.link(a, b, nodes) if a != b else NO_WAY for b in nodes] for a in nodes]
        if inferred := sum(link.inferred for row in links for link in row):
            log.info(
                "%d of %d ways are not measured but taken from others between their fences",
                inferred,
                len(nodes) * (len(nodes) - 1),
            )
        cluster = Cluster(
            nodes=tuple(models),
            bandwidth_bytes_per_s=tuple(tuple(link.bandwidth_bytes_per_s for link in row) for row in links),
            latency_s=tuple(tuple(link.rtt_s / 2 for link in row) for row in links),
        )
        return Surveyed(cluster, rates, speeds)

    def link(self, a: Member, b: Member, nodes: Sequence[Member]) -> LinkProfile:
        """Measured from ``a`` to ``b``, or inferred from a measured pair of ``nodes`` between the same fences."""
        if (a.name, b.name) in self._links:
            return self._links[a.name, b.name]
        for c in nodes:
            for d in nodes:
                if (c.fence, d.fence) == (a.fence, b.fence) and (known := self._links.get((c.name, d.name))):
                    return LinkProfile(
                        bandwidth_bytes_per_s=known.bandwidth_bytes_per_s, rtt_s=known.rtt_s, inferred=True
                    )
        return NO_WAY

    # inside

    async def _probe_both_ways(self, a: Member, b: Member, shape: m.LinkShape | None) -> None:
        if shape is None and (a.name, b.name) in self._links and (b.name, a.name) in self._links:
            return
        for sender, receiver in ((a, b), (b, a)):
            self._links.pop((sender.name, receiver.name), None)
            await self._send(receiver.name, _order(sender, shape, measure=False))
            await self._ask(sender.name, receiver.name, _order(receiver, shape, measure=True), PROBE_S)

    async def _ask(self, name: str, about: str, order: object, timeout_s: float) -> None:
        answered = self._waits[name, about] = asyncio.get_running_loop().create_future()
        try:
            await self._send(name, order)
            await asyncio.wait_for(answered, timeout_s)
        except asyncio.TimeoutError:
            what = f"its way to {about}" if about else "its device"
            log.warning("%s has not measured %s within %.0f s", name, what, timeout_s)
        finally:
            self._waits.pop((name, about), None)

    def _wake(self, pair: Pair) -> None:
        waiting = self._waits.get(pair)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def _order(peer: Member, shape: m.LinkShape | None, *, measure: bool) -> m.Probe:
    return m.Probe(peer=peer.name, address=m.Peer(peer.host, peer.port, shape), measure=measure, num_bytes=PROBE_BYTES)


def _to_probe(nodes: Sequence[Member]) -> list[Member]:
    """All nodes, or of many the first few of each fence."""
    if len(nodes) <= MAX_PROBED:
        return list(nodes)
    by_fence: dict[str, list[Member]] = {}
    for node in nodes:
        by_fence.setdefault(node.fence, []).append(node)
    return [node for fence in by_fence.values() for node in fence[:PROBED_PER_FENCE]]


def _rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs in as few rounds as can be, in each of which nobody takes part twice (the circle method)."""
    ring = [*range(count), -1] if count % 2 else list(range(count))
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        yield [(a, b) for a, b in zip(ring[:half], reversed(ring[half:])) if -1 not in (a, b)]
        ring = [ring[0], ring[-1], *ring[1:-1]]
