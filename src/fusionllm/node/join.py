"""Becoming a member: what a node and an owner both do before a job, and to reach the others of one."""

from __future__ import annotations

import asyncio
import platform
import secrets
import socket
from collections.abc import Mapping

from fusionllm import __version__
from fusionllm.compute import framework_versions
from fusionllm.errors import AdmissionError, RemoteProtocolError
from fusionllm.ir.ops import OPSET
from fusionllm.protocol import messages as m
from fusionllm.transport import Endpoint, Identity, PeerAddress, make_key, public_key_pem
from fusionllm.transport.control import ControlChannel

JOIN_TIMEOUT_S = 30.0
PEER_TIMEOUT_S = 60.0


def default_name() -> str:
    """A name for this machine: its host name, made fit, and a few random characters against twins."""
    host = "".join(c if c.isalnum() or c in "-" else "-" for c in socket.gethostname().split(".")[0]).strip("-")
    return f"{(host or 'node')[:40]}-{secrets.token_hex(3)}"


async def join_broker(
    channel: ControlChannel, *, role: m.Role, name: str, token: str, fence: str, backend: str = ""
) -> Identity:
    """Join through an open channel; returns this machine's identity. Raises AdmissionError with the broker's reason."""
    key = make_key()
    await channel.send(
        m.Join(
            version=m.CONTROL_VERSION,
            role=role,
            name=name,
            token=token,
            public_key_pem=public_key_pem(key),
            fence=fence,
            backend=backend,
            opset=OPSET,
            versions={"fusionllm": __version__, "python": platform.python_version(), **framework_versions()},
        )
    )
    answer = await channel.receive(JOIN_TIMEOUT_S)
    if isinstance(answer, m.Refused):
        raise AdmissionError(f"the broker refused {name!r}: {answer.reason}")
    if not isinstance(answer, m.Welcome):
        raise RemoteProtocolError(f"the broker answered Join with {type(answer).__name__}")
    return Identity(cert_pem=answer.cert_pem, key_pem=key, ca_pem=answer.ca_pem)


def expect_peers(endpoint: Endpoint, peers: Mapping[str, m.Peer]) -> None:
    """Let the peers of a job in, and no others; pace the links that the job wants paced."""
    endpoint.expect({name: PeerAddress(peer.host, peer.port) for name, peer in peers.items()})
    for name, peer in peers.items():
        endpoint.shape(name, peer.shape)


async def reach_peers(endpoint: Endpoint, peers: Mapping[str, m.Peer]) -> None:
    """Wait until there is a session with each. Raises StallError, LinkError."""
    await asyncio.gather(*(endpoint.connect(peer, PEER_TIMEOUT_S) for peer in peers))
