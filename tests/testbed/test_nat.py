"""NATs: who gets in, under which port, and that checksums stay right."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionllm.testbed.nat import Nat

TCP, UDP, ICMP = 6, 17, 1
HERE, THERE, ELSEWHERE = bytes([10, 88, 0, 1]), bytes([10, 88, 0, 2]), bytes([10, 88, 0, 3])


def ones_sum(data: bytes) -> int:
    total = sum(int.from_bytes(data[i : i + 2].ljust(2, b"\0"), "big") for i in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def pseudo(source: bytes, target: bytes, protocol: int, transport: bytes) -> bytes:
    return source + target + bytes([0, protocol]) + len(transport).to_bytes(2, "big") + transport


def packet(source, sport, target, dport, protocol=UDP, payload=b"hello", partial=False) -> bytes:
    ports = sport.to_bytes(2, "big") + dport.to_bytes(2, "big")
    if protocol == TCP:
        head, at = ports + bytes(8) + bytes([0x50, 0x10]) + bytes(6), 16
    else:
        head, at = ports + (8 + len(payload)).to_bytes(2, "big") + bytes(2), 6
    transport = bytearray(head + payload)
    if not partial:
        transport[at : at + 2] = (~ones_sum(pseudo(source, target, protocol, bytes(transport))) & 0xFFFF).to_bytes(
            2, "big"
        )
    return (
        bytes([int(partial)])
        + bytes(9)
        + bytes([0x45])
        + bytes(8)
        + bytes([protocol, 0, 0])
        + source
        + target
        + bytes(transport)
    )


def seen(raw: bytes) -> tuple[bytes, int, bytes, int]:
    return raw[22:26], int.from_bytes(raw[30:32], "big"), raw[26:30], int.from_bytes(raw[32:34], "big")


def checksum_is_right(raw: bytes) -> bool:
    return ones_sum(pseudo(raw[22:26], raw[26:30], raw[19], raw[30:])) == 0xFFFF


@pytest.mark.parametrize("kind", ["preserving", "symmetric"])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_only_answers_get_in(kind, protocol):
    nat = Nat(kind, random.Random(1).random)
    assert nat.inbound(packet(THERE, 7, HERE, 5000, protocol)) is None
    out = nat.outbound(packet(HERE, 5000, THERE, 7, protocol))
    assert checksum_is_right(out) and (seen(out)[1] == 5000) == (kind == "preserving")
    assert nat.outbound(packet(HERE, 5000, THERE, 7, protocol)) == out
    back = nat.inbound(packet(THERE, 7, HERE, seen(out)[1], protocol))
    assert back is not None and seen(back) == (THERE, 7, HERE, 5000) and checksum_is_right(back)
    assert nat.inbound(packet(THERE, 8, HERE, seen(out)[1], protocol)) is None
    assert nat.inbound(packet(ELSEWHERE, 7, HERE, seen(out)[1], protocol)) is None


def test_a_symmetric_nat_shows_another_port_to_everyone():
    nat = Nat("symmetric", random.Random(1).random)
    ports = {seen(nat.outbound(packet(HERE, 5000, THERE, other)))[1] for other in range(1, 200)}
    assert len(ports) == 199 and 5000 not in ports


def test_other_protocols_pass_between_hosts_that_have_spoken():
    nat = Nat("symmetric", random.random)
    ping = packet(THERE, 0, HERE, 0, ICMP)
    assert nat.inbound(ping) is None
    assert nat.outbound(packet(HERE, 0, THERE, 0, ICMP)) and nat.inbound(ping) == ping


@given(st.binary(min_size=0, max_size=40), st.integers(1, 65535), st.floats(0, 0.999), st.booleans())
def test_checksums_stay_right_and_unfinished_ones_untouched(payload, port, draw, partial):
    nat = Nat("symmetric", lambda: draw)
    before = packet(HERE, port, THERE, 9, TCP, payload, partial)
    after = nat.outbound(before)
    assert after[46:48] == before[46:48] if partial else checksum_is_right(after)
