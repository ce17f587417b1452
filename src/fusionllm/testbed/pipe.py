"""One shaped pipe: a rate with a queue before it, a delay behind it, loss. Pure: time and chance come in as numbers.

On the path of a packet: uplinks -> pair -> downlinks, a `Pipe` each (`emulator`). Knows no socket and no clock.
"""

from __future__ import annotations

import math

import msgspec

from fusionllm.units import KIB

#: Queue of a rate when none is given: as much as 100 ms or one round trip bring, and some segments of 64 KiB.
_QUEUE_S = 0.1
_MIN_QUEUE_BYTES = 256 * KIB
VNET_BYTES = 10  # struct virtio_net_hdr, before every packet of a TUN with IFF_VNET_HDR
_TCP, _UDP = 6, 17
_UDP_HEADER_BYTES = 8


class PipeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pipe does.

    Attributes:
        rate_bytes_per_s: 0 for no limit. delay_s, jitter_s: one way; jitter is added, uniform, and never reorders.
        loss: probability for each packet. queue_bytes: 0 for a queue that suits rate and delay.
        up: False drops everything.
    """

    rate_bytes_per_s: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int = 0
    up: bool = True


class PipeStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters since the start: bytes let through (every segment's headers counted), packets, packets dropped."""

    num_bytes: int = 0
    num_packets: int = 0
    num_dropped: int = 0


class Pipe:
    """A pipe and its counters. ``spec`` can change at any time."""

    __slots__ = ("_arrival_s", "_free_s", "_num_bytes", "_num_dropped", "_num_packets", "spec")

    def __init__(self, spec: PipeSpec) -> None:
        self.spec = spec
        self._free_s = self._arrival_s = -math.inf
        self._num_bytes = self._num_packets = self._num_dropped = 0

    def admit(self, now_s: float, num_bytes: int, chance: float) -> float | None:
        """When a packet that comes now arrives at the other end; None when it is lost.

        Args:
            now_s: never less than at the call before.
            chance: uniform in [0, 1), decides loss and jitter.
        """
        spec = self.spec
        if not spec.up or chance < spec.loss:
            self._num_dropped += 1
            return None
        arrival_s = now_s
        if spec.rate_bytes_per_s:
            waiting_s = max(0.0, self._free_s - now_s)
            if waiting_s * spec.rate_bytes_per_s > queue_bytes(spec):
                self._num_dropped += 1
                return None
            self._free_s = arrival_s = now_s + waiting_s + num_bytes / spec.rate_bytes_per_s
        jitter_s = spec.jitter_s * (chance - spec.loss) / (1 - spec.loss) if spec.jitter_s else 0.0
        self._arrival_s = max(self._arrival_s, arrival_s + spec.delay_s + jitter_s)
        self._num_bytes += num_bytes
        self._num_packets += 1
        return self._arrival_s

    def change(self, spec: PipeSpec) -> None:
        """Another spec from now on; what waits in the queue of an old rate does not block a new one."""
        if spec.rate_bytes_per_s != self.spec.rate_bytes_per_s:
            self._free_s = -math.inf
        self.spec = spec

    @property
    def stats(self) -> PipeStats:
        return PipeStats(self._num_bytes, self._num_packets, self._num_dropped)


def queue_bytes(spec: PipeSpec) -> int:
    """Bytes that may wait before a pipe."""
    if spec.queue_bytes:
        return spec.queue_bytes
    return max(_MIN_QUEUE_BYTES, int(spec.rate_bytes_per_s * max(_QUEUE_S, 2 * spec.delay_s)))


def charged_bytes(packet: bytes) -> int:
    """Bytes a packet of a TUN costs on a link: a segment that the kernel left whole pays for the headers of all its
    parts, as it would on a wire (44 of them in 64 KiB, 3 % of it).

    Args:
        packet: virtio_net_hdr (10 bytes), then IPv4. The header's own length field is a hint, so the real headers
            are measured.
    """
    num_bytes = len(packet) - VNET_BYTES
    part_bytes = int.from_bytes(packet[4:6], "little")
    if packet[1] == 0 or part_bytes == 0:
        return num_bytes
    ip_bytes = (packet[VNET_BYTES] & 15) * 4
    protocol = packet[VNET_BYTES + 9]
    if protocol == _TCP:
        transport_bytes = (packet[VNET_BYTES + ip_bytes + 12] >> 4) * 4
    elif protocol == _UDP:
        transport_bytes = _UDP_HEADER_BYTES
    else:
        return num_bytes
    header_bytes = ip_bytes + transport_bytes
    parts = math.ceil((num_bytes - header_bytes) / part_bytes)
    return num_bytes + max(0, parts - 1) * header_bytes
