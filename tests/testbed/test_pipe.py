"""Pipes: rates, queues, delays and losses as numbers; what a packet is charged."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fusionllm.testbed.pipe import Pipe, PipeSpec, charged_bytes, queue_bytes

TCP, UDP = 6, 17


def packet(payload_bytes: int, part_bytes: int, protocol: int = TCP, options: int = 12) -> bytes:
    """A virtio_net_hdr, IPv4 without options, a transport header, a payload."""
    vnet = bytes([0, 1 if part_bytes else 0, 0, 0]) + part_bytes.to_bytes(2, "little") + bytes(4)
    ip = bytes([0x45]) + bytes(8) + bytes([protocol]) + bytes(10)
    transport = bytes(12) + bytes([(20 + options) // 4 << 4]) + bytes(7 + options) if protocol == TCP else bytes(8)
    return vnet + ip + transport + bytes(payload_bytes)


def test_a_whole_segment_pays_for_the_headers_of_all_its_parts():
    assert charged_bytes(packet(1448, 0)) == 1500
    assert charged_bytes(packet(1448 * 40, 1448)) == 1500 * 40
    assert charged_bytes(packet(1448 * 2 + 1, 1448)) == 1500 * 2 + 53
    assert charged_bytes(packet(1472 * 3, 1472, UDP)) == 1500 * 3


@given(
    rate=st.floats(1e3, 1e9), delay=st.floats(0, 1), jitter=st.floats(0, 0.1), loss=st.floats(0, 0.5),
    gaps=st.lists(st.tuples(st.floats(0, 0.1), st.integers(40, 65_000)), min_size=1, max_size=60), seed=st.integers(0),
)  # fmt: skip
def test_a_pipe_never_exceeds_its_rate_nor_reorders(rate, delay, jitter, loss, gaps, seed):
    pipe, chance = Pipe(PipeSpec(rate_bytes_per_s=rate, delay_s=delay, jitter_s=jitter, loss=loss)), random.Random(seed)
    now = 0.0
    sent = 0
    arrivals = [0.0]
    for gap, num_bytes in gaps:
        now += gap
        arrival = pipe.admit(now, num_bytes, chance.random())
        if arrival is None:
            continue
        sent += num_bytes
        assert arrival >= now + num_bytes / rate + delay - 1e-9
        assert arrival >= arrivals[-1]
        assert arrival >= sent / rate + delay - 1e-6  # from the first byte on
        assert (
            arrival - now <= (queue_bytes(pipe.spec) + 2 * 65_000) / rate + delay + jitter + 1e-6 or arrivals[-1] > now
        )
        arrivals.append(arrival)
    stats = pipe.stats
    assert stats.num_bytes == sent and stats.num_packets + stats.num_dropped == len(gaps)


def test_a_full_queue_drops_and_drains():
    pipe = Pipe(PipeSpec(rate_bytes_per_s=1e6, queue_bytes=3000))
    assert [pipe.admit(0.0, 1500, 0.5) is not None for _ in range(6)] == [True, True, True, False, False, False]
    assert pipe.admit(0.0045, 1500, 0.5) == 0.006
    assert pipe.stats.num_dropped == 3


def test_loss_is_a_share_of_the_packets_and_down_drops_all():
    pipe, chance = Pipe(PipeSpec(loss=0.1)), random.Random(1)
    lost = sum(pipe.admit(0.0, 100, chance.random()) is None for _ in range(10_000))
    assert 850 < lost < 1150
    pipe.change(PipeSpec(up=False))
    assert pipe.admit(1.0, 100, 0.9) is None


def test_a_faster_rate_counts_at_once():
    pipe = Pipe(PipeSpec(rate_bytes_per_s=1e3))
    first = pipe.admit(0.0, 1000, 0.5)
    pipe.change(PipeSpec(rate_bytes_per_s=1e6))
    assert pipe.admit(0.0, 1000, 0.5) == first  # behind what is on its way
    assert pipe.admit(first, 1000, 0.5) < first + 0.01
