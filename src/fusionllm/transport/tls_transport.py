"""Wires over TLS 1.3 and TCP: listening, dialling, and finding out who is on the other side.

Both sides show a certificate of the job's authority; the name in it is the peer's name. A wire is made only
after that is settled. Every step has a deadline. Knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

from fusionllm.errors import AdmissionError, LinkBroken, UserError
from fusionllm.transport.tls import Identity, client_context, peer_name, server_context
from fusionllm.transport.tls_wire import LINGER_S, TlsWire, describe_failure
from fusionllm.transport.wire import OnWire, PeerAddress, Wire
from fusionllm.units import KIB

log = logging.getLogger(__name__)

_LINGER_TURNS = 200
_HANDSHAKE_S = 5.0
_MAX_HANDSHAKES = 128
#: Set where the system has them: no Nagle; a peer that acknowledges nothing for 8 s is gone; the kernel
#: queues little unsent, so that an urgent message overtakes; bbr keeps the rate on lossy paths (93 against
#: 2.3 Mbps for cubic at 1 % loss, 50 ms).
_TCP_OPTIONS: list[tuple[str, Any]] = [
    ("TCP_NODELAY", 1), ("TCP_USER_TIMEOUT", 8000), ("TCP_NOTSENT_LOWAT", 512 * KIB),
    ("TCP_CONGESTION", b"bbr"),
]  # fmt: skip


class TlsTransport:
    """Wires over TLS and TCP under one identity."""

    def __init__(self, identity: Identity) -> None:
        self._server, self._client = server_context(identity), client_context(identity)
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wires: set[TlsWire] = set()

    async def listen(self, host: str, port: int, on_wire: OnWire) -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        listener = None
        try:
            family, kind, proto, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
            listener = socket.socket(family, kind, proto)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            if listener is not None:
                listener.close()
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} on {host} is in use; choose another, or 0 for any free one") from None
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        self._listener = listener
        self._spawn(self._accept_all(listener, on_wire))
        bound_host, bound_port = listener.getsockname()[:2]
        return str(bound_host), int(bound_port)

    async def dial(self, address: PeerAddress, peer: str) -> Wire:
        loop = asyncio.get_running_loop()
        try:
            sock = await asyncio.wait_for(_connect(loop, address), _HANDSHAKE_S)
            secured, found = await _secure(loop, sock, self._client, server_side=False)
        except (OSError, asyncio.TimeoutError, AdmissionError) as error:
            raise LinkBroken(f"cannot connect to {peer} at {address}: {describe_failure(error)}") from None
        if found != peer:
            secured.close()
            raise LinkBroken(f"the node at {address} has the certificate of {found!r}, expected was {peer!r}")
        return TlsWire(loop, secured, self._wires)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for _ in range(_LINGER_TURNS):
            if not self._wires:
                return
            await asyncio.sleep(LINGER_S / _LINGER_TURNS)
        for wire in list(self._wires):
            wire.abort()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_all(self, listener: socket.socket, on_wire: OnWire) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, or a connection that is gone again
                log.warning("accepting a connection failed: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) > _MAX_HANDSHAKES:
                sock.close()
                continue
            self._spawn(self._welcome(loop, sock, address, on_wire))

    async def _welcome(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, address: Any, on_wire: OnWire
    ) -> None:
        try:
            secured, found = await _secure(loop, sock, self._server, server_side=True)
        except (OSError, AdmissionError, asyncio.TimeoutError) as error:
            log.warning("refused a connection from %s: %s", address[:2], describe_failure(error))
            return
        on_wire(TlsWire(loop, secured, self._wires), found)


async def _connect(loop: asyncio.AbstractEventLoop, address: PeerAddress) -> socket.socket:
    last: OSError = OSError(f"no address for {address.host}")
    for family, kind, proto, _, target in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, target)
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise last


async def _secure(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, context: ssl.SSLContext, server_side: bool
) -> tuple[ssl.SSLSocket, str]:
    """Do the handshake on a connected socket.

    Returns the secured socket and the name the peer proved; owns ``sock``.
    """
    try:
        sock.setblocking(False)
        for name, value in _TCP_OPTIONS:
            if hasattr(socket, name):
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock = secured = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        await asyncio.wait_for(_handshake(loop, secured), _HANDSHAKE_S)
        return secured, peer_name(secured.getpeercert())
    except BaseException:
        with contextlib.suppress(OSError):  # unread bytes would turn closing into a reset that outruns our alert
            socket.socket.recv(sock, 64 * KIB)
        sock.close()
        raise


async def _handshake(loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket) -> None:
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            await _ready(loop.add_reader, loop.remove_reader, sock.fileno())
        except ssl.SSLWantWriteError:
            await _ready(loop.add_writer, loop.remove_writer, sock.fileno())


async def _ready(add: Callable[..., object], remove: Callable[[int], object], fd: int) -> None:
    """Wait until the socket can be read, or written."""
    ready = asyncio.Event()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)
