"""Shaped links under a virtual clock: exact rates and delays, without waiting for them."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.kits.transport_kit import Net

from fusionllm.errors import LinkBroken, LocalProtocolError
from fusionllm.node.probe import measure_link
from fusionllm.protocol.messages import Peer, Probe
from fusionllm.protocol.session import SessionConfig
from fusionllm.transport import LinkShape
from fusionllm.transport.memory import MemoryHub, MemoryTransport


class VirtualClock(selectors.SelectSelector):
    """Never waits: what the loop would wait for, the clock is set forward by."""

    now_s = 1000.0

    def select(self, timeout=None):
        if timeout is None:
            raise RuntimeError("nothing will ever happen any more")
        self.now_s += max(0.0, timeout)
        return super().select(0)


def run_virtual(work, step_bytes: int = 50_000) -> None:
    clock = VirtualClock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s
    hub = MemoryHub(step_bytes)

    async def run() -> None:
        net = Net(lambda name: MemoryTransport(name, hub))
        try:
            await work(net, loop.time, hub)
        finally:
            await net.close()

    try:
        loop.run_until_complete(run())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


@pytest.mark.parametrize(("megabits", "latency_s", "num_bytes"), [(8, 0.025, 1 << 20), (100, 0.05, 8 << 20)])
def test_a_message_takes_latency_plus_bytes_over_rate(megabits, latency_s, num_bytes):
    async def work(net, now, hub):
        a, b = await net.pair()
        a.endpoint.shape("b", LinkShape(megabits * 1e6 / 8, latency_s))
        begun_s = now()
        a.endpoint.send_nowait("b", b"m", bytes(num_bytes))
        while not b.received:
            await asyncio.sleep(0.0005)
        expected_s = latency_s + num_bytes / (megabits * 1e6 / 8)
        assert now() - begun_s == pytest.approx(expected_s, rel=0.02)

    run_virtual(work)


def test_an_urgent_message_waits_for_what_is_in_the_pacer_only():
    async def work(net, now, hub):
        a, b = await net.pair()
        a.endpoint.shape("b", LinkShape(1e6, 0.1))
        a.endpoint.send_nowait("b", b"bulk", bytes(5_000_000), priority=9)
        await asyncio.sleep(1.0)
        begun_s = now()
        a.endpoint.send_nowait("b", b"urgent", b"!", priority=0)
        while not b.received:
            await asyncio.sleep(0.001)
        assert b.received[0][1] == b"urgent"
        assert 0.1 <= now() - begun_s <= 0.1 + 0.15

    run_virtual(work)


def test_only_the_shaped_direction_is_slow_and_the_round_trip_shows_it():
    async def work(net, now, hub):
        a, b = await net.pair()
        a.endpoint.shape("b", LinkShape(1e6, 0.3))
        begun_s = now()
        b.endpoint.send_nowait("a", b"", bytes(1_000_000))
        while not a.received:
            await asyncio.sleep(0.001)
        assert now() - begun_s < 0.01
        await asyncio.sleep(5)
        assert 0.3 <= a.endpoint.stats()["b"].rtt_s <= 0.35

    run_virtual(work)


def test_a_cut_on_a_shaped_link_loses_nothing():
    async def work(net, now, hub):
        a, b = await net.pair()
        a.endpoint.shape("b", LinkShape(1e6, 0.2))
        for index in range(20):
            a.endpoint.send_nowait("b", b"%d" % index, bytes(100_000))
        for _ in range(3):
            await asyncio.sleep(0.4)
            b.endpoint.abort_wires()
        await a.endpoint.drain(60)
        assert sorted(int(meta) for _, meta, _ in b.received) == list(range(20))
        assert a.endpoint.stats()["b"].reconnects == 3

    run_virtual(work)


def test_a_goodbye_crosses_a_slow_link():
    async def work(net, now, hub):
        a, b = await net.pair()
        a.endpoint.shape("b", LinkShape(1e6, 0.2))
        await a.endpoint.close()
        while not b.lost:
            await asyncio.sleep(0.01)
        assert "a is closing" in str(b.lost[0][1])

    run_virtual(work)


def test_a_peer_that_never_comes_back_is_lost_after_keep_s():
    async def work(net, now, hub):
        a, b = await net.pair(config=SessionConfig(keep_s=30))
        await b.endpoint._transport.close()
        b.endpoint._links["a"]._finish(LinkBroken("killed"), b"")
        begun_s = now()
        while not a.lost:
            await asyncio.sleep(0.1)
        assert 30 <= now() - begun_s <= 32
        assert "no wire for 30 s" in str(a.lost[0][1]) and "nobody listens" in str(a.lost[0][1])

    run_virtual(work)


def test_a_silent_wire_is_replaced():
    async def work(net, now, hub):
        a, b = await net.pair()
        for wire in hub.wires:
            wire.write = lambda buffers: None  # a black hole
        a.endpoint.send_nowait("b", b"m", b"through the second wire")
        begun_s = now()
        while not b.received:
            await asyncio.sleep(0.1)
        assert 6 <= now() - begun_s <= 11

    run_virtual(work)


def test_a_shape_that_lets_nothing_through_is_refused():
    async def work(net, now, hub):
        a, _ = await net.pair()
        for shape in (LinkShape(0, 0), LinkShape(1e6, -1)):
            with pytest.raises(LocalProtocolError, match="bandwidth must be above 0"):
                a.endpoint.shape("b", shape)

    run_virtual(work)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 30_000), max_size=6), st.integers(200, 20_000), st.integers(0, 1 << 32))
def test_endpoints_survive_wires_cut_at_any_byte(cuts, step_bytes, seed):
    rng = random.Random(seed)

    async def work(net, now, hub):
        hub.cut_after_bytes.extend(cuts)
        config = SessionConfig(chunk_bytes=5000, window_bytes=20_000)
        a, b = await net.node("a", config=config), await net.node("b", config=config)
        a.endpoint.expect({"b": b.address})
        b.endpoint.expect({"a": a.address})
        sent = {"a": Counter(), "b": Counter()}
        for index in range(12):
            for node, peer in ((a, "b"), (b, "a")):
                payload, meta = rng.randbytes(rng.choice((0, 100, 4000, 30_000))), b"%d" % index
                await node.endpoint.send(peer, meta, payload, priority=rng.randrange(3))
                sent[peer][meta, payload] += 1
        await a.endpoint.drain(200)
        await b.endpoint.drain(200)
        for node in (a, b):
            assert Counter((meta, payload) for _, meta, payload in node.received) == sent[node.name]

    run_virtual(work, step_bytes)


@pytest.mark.parametrize(("megabits", "latency_s"), [(8, 0.025), (100, 0.05), (1000, 0.0)])
def test_the_goodput_of_traffic_is_the_rate_of_the_link(megabits, latency_s):
    rate = megabits * 1e6 / 8

    async def work(net, now, hub):
        a, b = await net.pair()
        a.endpoint.shape("b", LinkShape(rate, latency_s))
        b.endpoint.shape("a", LinkShape(rate, latency_s))
        assert a.endpoint.stats()["b"].goodput_bytes_per_s is None
        await asyncio.sleep(5)  # a heartbeat, for the round trip
        for _ in range(3):
            for _ in range(4):
                await a.endpoint.send("b", b"", bytes(1 << 20))
            await a.endpoint.drain(60)
            await asyncio.sleep(3)
        assert a.endpoint.stats()["b"].goodput_bytes_per_s == pytest.approx(rate, rel=0.05)

    run_virtual(work)


@pytest.mark.parametrize(("megabits", "latency_s"), [(8, 0.025), (100, 0.05), (1000, 0.005)])
def test_a_probe_finds_the_rate_and_the_round_trip(megabits, latency_s):
    rate = megabits * 1e6 / 8

    async def work(net, now, hub):
        a, b = await net.pair()
        for end, other in ((a, "b"), (b, "a")):
            end.endpoint.shape(other, LinkShape(rate, latency_s))
        probe = Probe(peer="b", address=Peer("", 0), measure=True, num_bytes=16 << 20)
        found = await measure_link(a.endpoint, probe)
        assert found.reason == "" and found.profile.rtt_s == pytest.approx(2 * latency_s, rel=0.1, abs=0.001)
        assert found.profile.bandwidth_bytes_per_s == pytest.approx(rate, rel=0.1)

    run_virtual(work)
