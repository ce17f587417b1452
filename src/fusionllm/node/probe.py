"""What a node measures: its device, and with real messages of a real session what the way to another can carry.

On the path: device, Endpoint -> **NodeProfile, LinkProfile** -> `schedule`, in the broker. Probes are
bounded in bytes and time; the broker sees to it that no two of them share a node.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import msgspec

from fusionllm.compute import calibrate
from fusionllm.errors import FusionError, RemoteProtocolError, UserError
from fusionllm.ir.cluster import NO_WAY, LinkProfile, NodeProfile
from fusionllm.node.codecs import can_compress
from fusionllm.protocol import messages as m
from fusionllm.schedule.ratios import LADDER, PRETRAINED
from fusionllm.transport import Endpoint, PeerAddress
from fusionllm.transport.wire import LinkStats
from fusionllm.units import KIB, MIB

#: The most a probe sends at once, and a message of it.
MAX_PROBE_BYTES = 32 * MIB
_PIECE_BYTES = 256 * KIB
#: Long enough to be past what buffers hide.
_LONG_S = 0.4
_CONNECT_S = 20.0
_ROUND_TRIPS = 4
_PROBE = m.TensorHeader("probe", "", 0, -1, "", "uint8", ())


def let_in(endpoint: Endpoint, probe: m.Probe) -> None:
    """Expect the other side of a probe, and nobody else."""
    peer = probe.address
    endpoint.expect({probe.peer: PeerAddress(peer.host, peer.port)})
    endpoint.shape(probe.peer, peer.shape)


def check_probe(peer: str, expected: str, num_bytes: int) -> None:
    """Refuse a probe message that nobody announced, or a large one. Raises RemoteProtocolError."""
    if peer != expected:
        raise RemoteProtocolError(f"{peer} sent a probe that the broker did not announce")
    if num_bytes > _PIECE_BYTES:
        raise RemoteProtocolError(f"a probe message of {num_bytes} bytes; they have {_PIECE_BYTES} at most")


def measure_device(backend: str, device: str, precision: str) -> NodeProfile:
    """What the device does in a second, and the codecs that a rule may choose on it."""
    try:
        profile = calibrate(backend, device, precision)
    except UserError:  # not one of this backend's, which a stage of it will say
        profile = calibrate(backend, device)
    if not can_compress():
        return profile
    from fusionllm.compress import measure_speed  # brings in torch

    speeds = {str(spec): measure_speed(spec, repeats=3) for spec in (*LADDER[1:], PRETRAINED[-1])}
    return msgspec.structs.replace(profile, codecs=speeds)


async def measure_link(endpoint: Endpoint, probe: m.Probe) -> m.Probed:
    """Round trips of small messages, then more and more bytes until they take long enough to tell the rate."""
    try:
        await endpoint.connect(probe.peer, _CONNECT_S)
        rtt_s = min([await _send(endpoint, probe.peer, 1) for _ in range(_ROUND_TRIPS)])
        num_bytes, seconds = 64 * KIB, 0.0
        while True:
            seconds = await _send(endpoint, probe.peer, num_bytes)
            if seconds > _LONG_S + rtt_s or num_bytes * 2 > min(probe.num_bytes, MAX_PROBE_BYTES):
                break
            num_bytes *= 2
    except FusionError as error:
        return m.Probed(peer=probe.peer, profile=NO_WAY, reason=str(error))
    rate = num_bytes / max(seconds - rtt_s, seconds / 4)
    return m.Probed(peer=probe.peer, profile=LinkProfile(bandwidth_bytes_per_s=rate, rtt_s=rtt_s))


def link_profiles(stats: Mapping[str, LinkStats]) -> dict[str, LinkProfile]:
    """The ways to peers as their traffic shows them."""
    return {
        peer: LinkProfile(bandwidth_bytes_per_s=link.goodput_bytes_per_s, rtt_s=link.rtt_s)
        for peer, link in stats.items()
        if link.goodput_bytes_per_s is not None and link.rtt_s is not None
    }


async def _send(endpoint: Endpoint, peer: str, num_bytes: int) -> float:
    """Seconds until so many random bytes were taken by the peer. Raises LinkError, StallError."""
    payload = os.urandom(min(num_bytes, _PIECE_BYTES))
    meta = m.encode_message(_PROBE)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    for first in range(0, num_bytes, _PIECE_BYTES):
        await endpoint.send(peer, meta, payload[: min(_PIECE_BYTES, num_bytes - first)])
    await endpoint.drain(60.0)
    return loop.time() - started_s
