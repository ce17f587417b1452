"""The control plane's wire: msgspec messages over a WebSocket over TLS 1.3, pinned by the ticket's fingerprint.

Knows nothing of jobs. A newcomer has no certificate yet: it checks that the broker's certificate has the fingerprint
named in its ticket before it says a word, then is given its own certificate for the data plane.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage
from websockets.frames import CloseCode

from fusionllm.errors import AdmissionError, LinkBroken, LinkClosed, RemoteProtocolError, UserError
from fusionllm.protocol.messages import (
    MAX_CONTROL_BYTES,
    MAX_JOIN_BYTES,
    Control,
    Ticket,
    decode_control,
    encode_message,
)
from fusionllm.transport.tls import Identity, server_context

CONNECT_TIMEOUT_S = 20.0
_OPTIONS: dict[str, Any] = {"compression": None, "ping_interval": 5, "ping_timeout": 30}


class ControlChannel:
    """One end of a control connection. Every message is checked when it is read."""

    def __init__(self, socket: ClientConnection | ServerConnection, peer: str) -> None:
        self._socket = socket
        self.peer = peer

    @property
    def remote_host(self) -> str:
        address = self._socket.remote_address
        return str(address[0]) if address else "an address that is gone already"

    def admitted(self, peer: str) -> None:
        """The newcomer is ``peer`` now: it may send messages of full size."""
        self.peer = peer
        self._socket.protocol.max_message_size = MAX_CONTROL_BYTES

    async def send(self, message: Any) -> None:
        """Raises LinkBroken when the other side is gone."""
        try:
            await self._socket.send(encode_message(message))
        except ConnectionClosed as error:
            raise LinkBroken(f"control connection with {self.peer} ended: {_reason(error)}") from None

    async def receive(self, timeout_s: float | None = None) -> Control:
        """Raises LinkClosed or LinkBroken at the end, RemoteProtocolError on a bad message, asyncio.TimeoutError."""
        try:
            data = await asyncio.wait_for(self._socket.recv(), timeout_s)
        except ConnectionClosed as error:
            kind = LinkClosed if error.rcvd is not None and error.rcvd.code == 1000 else LinkBroken
            raise kind(f"control connection with {self.peer} ended: {_reason(error)}") from None
        if isinstance(data, str):
            raise RemoteProtocolError(f"{self.peer} sent text on the control connection, which speaks msgpack")
        return decode_control(data)

    async def close(self, reason: str = "") -> None:
        await self._socket.close(1000, reason[:100])


def _reason(error: ConnectionClosed) -> str:
    frame = error.rcvd or error.sent
    if frame is not None and frame.code == CloseCode.GOING_AWAY:
        return "it was stopped there"
    return frame.reason or f"code {frame.code}" if frame is not None else "the connection dropped"


async def serve_control(
    host: str, port: int, identity: Identity, handle: Callable[[ControlChannel], Awaitable[None]]
) -> Server:
    """Listen for control connections; ``handle`` runs for each. Raises UserError for a port in use."""
    context = server_context(identity)
    context.verify_mode = ssl.CERT_NONE

    async def accept(socket: ServerConnection) -> None:
        await handle(ControlChannel(socket, "newcomer"))

    try:
        return await serve(accept, host, port, ssl=context, max_size=MAX_JOIN_BYTES, **_OPTIONS)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port with --port, or 0 for any"
        ) from None


@asynccontextmanager
async def connect_control(ticket: Ticket) -> AsyncIterator[ControlChannel]:
    """Connect to a broker and check that it is the one the ticket names. Raises UserError or AdmissionError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host = f"[{ticket.host}]" if ":" in ticket.host else ticket.host
    address = f"{ticket.host}:{ticket.port}"
    try:
        socket = await connect(
            f"wss://{host}:{ticket.port}/",
            ssl=context,
            open_timeout=CONNECT_TIMEOUT_S,
            proxy=None,
            max_size=MAX_CONTROL_BYTES,
            **_OPTIONS,
        )
    except (OSError, asyncio.TimeoutError, InvalidHandshake, InvalidMessage, EOFError) as error:
        raise UserError(
            f"no broker answers at {address} ({error or type(error).__name__}); "
            "is it running, is the port open, is the ticket current?"
        ) from None
    try:
        certificate = socket.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        if not hmac.compare_digest(hashlib.sha256(certificate or b"").hexdigest(), ticket.fingerprint):
            raise AdmissionError(f"the machine at {address} is not the broker of this ticket (other certificate)")
        yield ControlChannel(socket, f"broker {address}")
    finally:
        await socket.close()
