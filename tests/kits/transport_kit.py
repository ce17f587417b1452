"""The conformance kit that every transport passes, under an ``Endpoint``; join with a line in ``CASES``.

A check is a coroutine function of a ``Net``; ``tests/transport/test_conformance.py`` runs each on every case.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fusionllm.errors import LinkBroken, LinkClosed, LinkError, RemoteProtocolError, StallError, UserError
from fusionllm.protocol.session import SessionConfig
from fusionllm.transport import Endpoint, LinkShape, PeerAddress, issue_identity, make_authority
from fusionllm.transport.link import Owner
from fusionllm.transport.memory import MemoryHub, MemoryTransport
from fusionllm.transport.tls_transport import TlsTransport

AUTHORITY = make_authority()
HOST = "127.0.0.1"
WAIT_S = 20.0


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition; the deadline is only there for a test that has failed."""

    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), WAIT_S)


class Node:
    """An endpoint that remembers what came in."""

    def __init__(self, net: Net, name: str, consume: bool = True, **options: Any) -> None:
        self.name, self.consume = name, consume
        self.received: list[tuple[str, bytes, bytes]] = []
        self.lost: list[tuple[str, LinkError]] = []
        self.unconsumed: Counter[str] = Counter()
        options.setdefault("transport", net.transport(name))
        self.endpoint = Endpoint(
            name,
            issue_identity(AUTHORITY, name),
            on_message=self._on_message,
            on_peer_lost=lambda peer, error: self.lost.append((peer, error)),
            **options,
        )
        self.address: PeerAddress | None = None

    def _on_message(self, peer: str, meta: bytes, payload: bytearray) -> None:
        self.received.append((peer, meta, bytes(payload)))
        self.unconsumed[peer] += len(payload)
        if self.consume:
            self.consume_all()

    def consume_all(self) -> None:
        for peer, num_bytes in self.unconsumed.items():
            self.endpoint.consumed(peer, num_bytes)
        self.unconsumed.clear()


class Net:
    """Makes nodes of one kind of transport and closes them."""

    def __init__(self, transport: Callable[[str], Any]) -> None:
        self.transport = transport
        self.nodes: list[Node] = []

    async def node(self, name: str, **options: Any) -> Node:
        node = Node(self, name, **options)
        self.nodes.append(node)
        node.address = PeerAddress(*await node.endpoint.listen(HOST))
        return node

    async def pair(self, **options: Any) -> tuple[Node, Node]:
        """Nodes a and b with a session between them."""
        a, b = await self.node("a", **options), await self.node("b", **options)
        a.endpoint.expect({"b": b.address})
        b.endpoint.expect({"a": a.address})
        await asyncio.gather(a.endpoint.connect("b", WAIT_S), b.endpoint.connect("a", WAIT_S))
        return a, b

    async def close(self) -> None:
        for node in self.nodes:
            await node.endpoint.close()


def memory_net() -> Net:
    hub = MemoryHub(step_bytes=50_000)
    return Net(lambda name: MemoryTransport(name, hub))


def tls_net() -> Net:
    return Net(lambda name: TlsTransport(issue_identity(AUTHORITY, name)))


CASES: dict[str, Callable[[], Net]] = {"memory": memory_net, "tls": tls_net}


async def check_messages_travel_both_ways(net: Net) -> None:
    a, b = await net.pair(config=SessionConfig(window_bytes=1 << 20))
    big = os.urandom(3_000_000)  # larger than the window
    sent = [(b"empty", b""), (b"", b"x"), (bytes(4000), bytes(70_000)), (b"big", big)]
    for meta, payload in sent:
        await a.endpoint.send("b", meta, payload)
        await b.endpoint.send("a", meta, [memoryview(payload)[:10], b"", bytearray(payload[10:])])
    await a.endpoint.drain(WAIT_S)
    await b.endpoint.drain(WAIT_S)
    assert b.received == [("a", *message) for message in sent]
    assert a.received == [("b", *message) for message in sent]
    stats = a.endpoint.stats()["b"]
    assert stats.up and stats.messages_sent == stats.messages_received == len(sent)
    assert stats.bytes_sent > 3_074_001 and stats.queued_bytes == stats.reconnects == stats.duplicates == 0


async def check_broken_wires_lose_nothing(net: Net) -> None:
    a, b = await net.pair()
    rng = random.Random(0)
    payloads = [rng.randbytes(rng.randrange(700_000)) for _ in range(40)]
    for index, payload in enumerate(payloads):
        await a.endpoint.send("b", b"%d" % index, payload, priority=index % 3)
        await b.endpoint.send("a", b"%d" % index, payload)
    for reconnects, breaker, count in ((1, a, 5), (2, b, 15), (3, a, 25)):
        await until(lambda count=count: len(b.received) >= count)
        breaker.endpoint.abort_wires()
        await until(lambda reconnects=reconnects: a.endpoint.stats()["b"].reconnects >= reconnects)
    await a.endpoint.drain(WAIT_S)
    await b.endpoint.drain(WAIT_S)
    expected = Counter((b"%d" % index, payload) for index, payload in enumerate(payloads))
    assert Counter((meta, payload) for _, meta, payload in b.received) == expected
    assert Counter((meta, payload) for _, meta, payload in a.received) == expected
    assert not a.lost and not b.lost


async def check_a_lazy_receiver_stops_the_sender(net: Net) -> None:
    config = SessionConfig(window_bytes=500_000, max_queue_bytes=400_000)
    a, b = await net.pair(config=config)
    b.consume = False
    for _ in range(12):
        await asyncio.wait_for(a.endpoint.send("b", b"", bytes(60_000)), WAIT_S)
    await until(lambda: sum(b.unconsumed.values()) + 60_512 > 500_000 - 8 * 512)
    with pytest.raises(LinkError, match="exceed the limit of 400000"):
        for _ in range(20):
            a.endpoint.send_nowait("b", b"", bytes(60_000))
    waiting = asyncio.ensure_future(a.endpoint.send("b", b"last", bytes(60_000)))
    await asyncio.sleep(0)
    assert sum(b.unconsumed.values()) <= 500_000 and not waiting.done()
    with pytest.raises(StallError, match="a waits for b to take"):
        await a.endpoint.drain(0.01)
    b.consume = True
    b.consume_all()
    await asyncio.wait_for(waiting, WAIT_S)
    await a.endpoint.drain(WAIT_S)
    assert b.received[-1][1] == b"last"


async def check_urgent_messages_overtake(net: Net) -> None:
    a, b = await net.pair()
    a.endpoint.send_nowait("b", b"bulk", bytes(30_000_000), priority=9)
    a.endpoint.send_nowait("b", b"urgent", b"!", priority=0)
    await a.endpoint.drain(WAIT_S)
    assert [meta for _, meta, _ in b.received] == [b"urgent", b"bulk"]


async def check_who_is_not_expected_is_refused(net: Net) -> None:
    a, b = await net.pair()
    stranger = await net.node("stranger")
    stranger.endpoint.expect({"b": b.address and PeerAddress(HOST, b.address.port, dial=True)})
    with pytest.raises(LinkBroken, match=r"stranger got no link to b at 127.0.0.1:.*b does not expect stranger"):
        await stranger.endpoint.connect("b", 0.5)
    a.endpoint.send_nowait("b", b"still works", b"")
    await a.endpoint.drain(WAIT_S)
    with pytest.raises(LinkClosed, match="a expects no peer 'nobody'; expected are b"):
        a.endpoint.send_nowait("nobody", b"", b"")


async def check_another_name_at_the_address_is_refused(net: Net) -> None:
    a, b = await net.node("a"), await net.node("b")
    b.endpoint.expect({"a": None})
    a.endpoint.expect({"c": b.address})
    with pytest.raises(LinkBroken, match=r"a got no link to c at .*'b'.*'c'"):
        await a.endpoint.connect("c", 0.5)


async def check_a_restarted_peer_is_told_and_welcome_again(net: Net) -> None:
    a, b = await net.pair()
    a.endpoint.send_nowait("b", b"1", b"for the first b")
    await a.endpoint.drain(WAIT_S)
    b.endpoint._links["a"]._finish(LinkBroken("killed"), b"")  # as a killed process: no goodbye
    await b.endpoint._transport.close()
    again = await net.node("b")
    again.endpoint.expect({"a": a.address and PeerAddress(HOST, a.address.port, dial=True)})
    await until(lambda: a.lost)
    assert a.lost[0][0] == "b" and isinstance(a.lost[0][1], LinkBroken) and "restarted" in str(a.lost[0][1])
    with pytest.raises(LinkBroken, match="restarted"):
        a.endpoint.send_nowait("b", b"", b"")
    a.endpoint.expect({"b": again.address})
    await a.endpoint.connect("b", WAIT_S)
    a.endpoint.send_nowait("b", b"2", b"for the second b")
    await a.endpoint.drain(WAIT_S)
    assert again.received == [("a", b"2", b"for the second b")] and len(a.lost) == 1


async def check_both_sides_may_dial_at_once(net: Net) -> None:
    a, b = await net.node("a"), await net.node("b")
    a.endpoint.expect({"b": b.address and PeerAddress(HOST, b.address.port, dial=True)})
    b.endpoint.expect({"a": a.address and PeerAddress(HOST, a.address.port, dial=True)})
    for index in range(20):
        await asyncio.gather(
            a.endpoint.send("b", b"%d" % index, bytes(50_000)), b.endpoint.send("a", b"%d" % index, b"")
        )
    await asyncio.gather(a.endpoint.drain(WAIT_S), b.endpoint.drain(WAIT_S))
    assert [len(a.received), len(b.received)] == [20, 20] and not a.lost and not b.lost


async def check_the_larger_name_dials_when_only_it_can(net: Net) -> None:
    a, b = await net.node("a"), await net.node("b")
    a.endpoint.expect({"b": None})
    b.endpoint.expect({"a": a.address})
    await asyncio.gather(a.endpoint.connect("b", WAIT_S), b.endpoint.connect("a", WAIT_S))


async def check_closing_tells_the_peer(net: Net) -> None:
    a, b = await net.pair()
    a.endpoint.send_nowait("b", b"last words", bytes(1_000_000))
    await a.endpoint.drain(WAIT_S)
    await a.endpoint.close()
    await until(lambda: b.lost)
    assert len(b.received) == 1 and not a.lost
    assert isinstance(b.lost[0][1], LinkClosed) and "a is closing" in str(b.lost[0][1])


async def check_admit_refuses_before_memory_is_taken(net: Net) -> None:
    def admit(peer: str, meta: bytes, total: int) -> None:
        if meta != b"welcome":
            raise RemoteProtocolError(f"no {meta!r} from {peer} wanted")

    a, b = await net.pair(admit=admit)
    a.endpoint.send_nowait("b", b"welcome", b"1")
    a.endpoint.send_nowait("b", b"intruder", bytes(10_000_000))
    await until(lambda: a.lost and b.lost)
    assert b.received == [("a", b"welcome", b"1")]
    assert "no b'intruder' from a wanted" in str(b.lost[0][1]) and isinstance(a.lost[0][1], LinkClosed)


async def check_a_failing_handler_ends_the_link_with_its_reason(net: Net) -> None:
    a, b = await net.pair()
    b.consume_all = lambda: 1 // 0  # type: ignore[method-assign]
    a.endpoint.send_nowait("b", b"", b"")
    await until(lambda: a.lost and b.lost)
    assert "ZeroDivisionError" in str(b.lost[0][1]) and "ZeroDivisionError" in str(a.lost[0][1])


async def check_a_shape_can_change_while_bytes_flow(net: Net) -> None:
    a, b = await net.pair()
    a.endpoint.shape("b", LinkShape(2e6, 0.01))
    for index in range(30):
        a.endpoint.send_nowait("b", b"%d" % index, bytes(100_000))
    await until(lambda: len(b.received) >= 2)
    assert len(b.received) < 30
    a.endpoint.shape("b", None)
    await a.endpoint.drain(WAIT_S)
    assert [meta for _, meta, _ in b.received] == [b"%d" % index for index in range(30)]


async def check_other_threads_may_send_and_consume(net: Net) -> None:
    a, b = await net.pair(config=SessionConfig(window_bytes=100_000))
    b.consume = False

    def work() -> None:
        for index in range(20):
            a.endpoint.send_threadsafe("b", b"%d" % index, bytes(30_000))
        for _ in range(20):
            taken.acquire(timeout=WAIT_S)
            b.endpoint.consumed_threadsafe("a", 30_000)

    taken, b._on_message = (
        threading.Semaphore(0),
        lambda *message: (b.received.append(message), taken.release()),
    )
    b.endpoint._links["a"]._owner = Owner(b._on_message, lambda *_: None)
    await asyncio.get_running_loop().run_in_executor(None, work)
    await a.endpoint.drain(WAIT_S)
    assert [meta for _, meta, _ in b.received] == [b"%d" % index for index in range(20)]


async def check_a_new_address_is_dialled(net: Net) -> None:
    a, b = await net.node("a"), await net.node("b")
    a.endpoint.expect({"b": None})
    b.endpoint.expect({"a": None})
    a.endpoint.expect({"b": PeerAddress(HOST, 1)})
    a.endpoint.send_nowait("b", b"queued early", b"")
    a.endpoint.expect({"b": b.address})
    await a.endpoint.connect("b", WAIT_S)
    await a.endpoint.drain(WAIT_S)
    assert [meta for _, meta, _ in b.received] == [b"queued early"]


async def check_a_taken_port_is_named(net: Net) -> None:
    a = await net.node("a")
    other = Node(net, "other")
    net.nodes.append(other)
    assert a.address is not None
    with pytest.raises(UserError, match=f"port {a.address.port} on 127.0.0.1 is in use"):
        await other.endpoint.listen(HOST, a.address.port)


CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}
