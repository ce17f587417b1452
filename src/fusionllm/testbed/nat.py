"""A NAT in front of a host: lets in only what the host has asked for, and may show it under other ports.

Pure but for the choice of ports, which comes in. Works on packets of a TUN (`pipe`). A host keeps its address on both
sides; what others see differently is the port, and that nobody reaches it first. Both kinds filter by the other side's
address and port. TCP and UDP; of all else only replies between hosts that have spoken pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fusionllm.testbed.pipe import VNET_BYTES

Kind = Literal["", "preserving", "symmetric"]
_TCP, _UDP = 6, 17
_CHECKSUM_AT = {_TCP: 16, _UDP: 6}
_NEEDS_CHECKSUM = 1  # virtio_net_hdr: the sum so far is of addresses and length, and a port does not touch it
#: (protocol, port inside, address and port of the other side)
_Flow = tuple[int, int, bytes, int]
_FIRST_PORT, _PORTS = 1024, 64512


class Nat:
    """The NAT of one host.

    Args:
        kind: ``preserving``: ports stay as they are, so that both sides of a hole can be punched. ``symmetric``: each
            pair of ports gets one of its own that nobody can guess.
        draw: a number in [0, 1).
    """

    def __init__(self, kind: Kind, draw: Callable[[], float]) -> None:
        self._kind, self._draw = kind, draw
        self._out: dict[_Flow, int] = {}  # flow -> port outside
        self._in: dict[_Flow, int] = {}  # the same with the port outside -> port inside
        self._spoken: set[bytes] = set()

    def outbound(self, packet: bytes) -> bytes:
        """A packet of the host as the others see it."""
        protocol, at, other = packet[VNET_BYTES + 9], _transport_at(packet), packet[VNET_BYTES + 16 : VNET_BYTES + 20]
        self._spoken.add(other)
        if protocol not in _CHECKSUM_AT:
            return packet
        inside = _port(packet, at)
        flow = protocol, inside, other, _port(packet, at + 2)
        outside = self._out.get(flow)
        if outside is None:
            outside = self._out[flow] = inside if self._kind == "preserving" else self._free_port(flow)
            self._in[(protocol, outside, *flow[2:])] = inside
        return _with_port(packet, at, outside)

    def inbound(self, packet: bytes) -> bytes | None:
        """A packet for the host as it sees it, None for one it has not asked for."""
        protocol, at, other = packet[VNET_BYTES + 9], _transport_at(packet), packet[VNET_BYTES + 12 : VNET_BYTES + 16]
        if protocol not in _CHECKSUM_AT:
            return packet if other in self._spoken else None
        inside = self._in.get((protocol, _port(packet, at + 2), other, _port(packet, at)))
        return None if inside is None else _with_port(packet, at + 2, inside)

    def _free_port(self, flow: _Flow) -> int:
        used = {key[1] for key in self._in}
        port = _FIRST_PORT + int(self._draw() * _PORTS)
        while port in used or port == flow[1]:
            port = _FIRST_PORT + (port + 1 - _FIRST_PORT) % _PORTS
        return port


def _transport_at(packet: bytes) -> int:
    return VNET_BYTES + (packet[VNET_BYTES] & 15) * 4


def _port(packet: bytes, at: int) -> int:
    return int.from_bytes(packet[at : at + 2], "big")


def _with_port(packet: bytes, at: int, port: int) -> bytes:
    """The packet with another port at ``at``; its checksum follows (RFC 1624)."""
    old = _port(packet, at)
    if old == port:
        return packet
    out = bytearray(packet)
    out[at : at + 2] = port.to_bytes(2, "big")
    protocol = packet[VNET_BYTES + 9]
    place = _transport_at(packet) + _CHECKSUM_AT[protocol]
    before = _port(packet, place)
    if not packet[0] & _NEEDS_CHECKSUM and not (protocol == _UDP and before == 0):
        total = (~before & 0xFFFF) + (~old & 0xFFFF) + port
        total = (total & 0xFFFF) + (total >> 16)
        total = (total & 0xFFFF) + (total >> 16)
        after = ~total & 0xFFFF
        out[place : place + 2] = (after or (0xFFFF if protocol == _UDP else 0)).to_bytes(2, "big")
    return bytes(out)
