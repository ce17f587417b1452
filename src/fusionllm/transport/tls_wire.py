"""TLS 1.3 over TCP as a wire, straight on non-blocking sockets.

Where it differs from asyncio's own TLS: that one moves every byte through two memory BIOs; here OpenSSL
reads from and writes to the socket itself and decrypts into the receiver's buffer, which keeps a link within
a few percent of a plain blocking TLS socket. It needs a loop with ``add_reader`` (uvloop, or asyncio's
selector loop; on Windows choose ``SelectorEventLoop``). Knows nothing of frames; names are taken from
certificates only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fusionllm.errors import AdmissionError, LinkBroken, UserError
from fusionllm.transport.tls import Identity, client_context, peer_name, server_context
from fusionllm.transport.wire import OnWire, PeerAddress, Receiver, Wire
from fusionllm.units import KIB, MIB

log = logging.getLogger(__name__)

_RECORD_BYTES = 16 * KIB  # the most plaintext in one TLS record
_SMALL_BYTES = 4 * KIB
_READ_BUDGET_BYTES = 2 * MIB  # then other wires get their turn
_ROOM_BYTES = 256 * KIB
_LINGER_S = 1.0
_HANDSHAKE_S = 5.0
_MAX_HANDSHAKES = 128
#: (level, option, value) set where the system has them: no Nagle; a peer that acknowledges nothing for 8 s is
#: gone; the kernel queues little unsent, so that an urgent message overtakes; bbr keeps the rate on lossy
#: paths (93 against 2.3 Mbps for cubic at 1 % loss, 50 ms).
_TCP_OPTIONS: list[tuple[str, Any]] = [
    ("TCP_NODELAY", 1), ("TCP_USER_TIMEOUT", 8000), ("TCP_NOTSENT_LOWAT", 512 * KIB), ("TCP_CONGESTION", b"bbr"),
]  # fmt: skip


class TlsWire:
    """A wire on a connected ``ssl.SSLSocket`` in non-blocking mode whose handshake is done."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket, wires: set[TlsWire]) -> None:
        self._loop, self._sock, self._fd = loop, sock, sock.fileno()
        self._wires = wires  # all that are open, for the transport to end
        wires.add(self)
        self._receiver: Receiver | None = None
        self._pending: deque[Any] = deque()
        self._writing = self._closed = self._failed = False

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)

    def room(self) -> int:
        return 0 if self._pending or self._closed or self._failed else _ROOM_BYTES

    def write(self, buffers: Sequence[Any]) -> None:
        if self._closed or self._failed:
            return
        self._pending.extend(_join_small(buffers))
        if not self._writing:
            self._flush()

    def close(self) -> None:
        if self._closed:
            return
        self._receiver = None
        if not self._failed:
            self._flush()
        if self._failed:
            self.abort()
        elif not self._pending:
            self._half_close()
        self._loop.call_later(_LINGER_S, self.abort)

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._receiver = None
        self._pending.clear()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._wires.discard(self)

    def _half_close(self) -> None:
        """All is written: say so, then swallow what the peer still sends, lest a reset destroys our last bytes."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.abort()
            return
        self._loop.remove_reader(self._fd)
        self._loop.add_reader(self._fd, self._swallow)

    def _swallow(self) -> None:
        try:
            if self._sock.recv(64 * KIB):
                return
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            pass
        self.abort()

    def _readable(self) -> None:
        budget = _READ_BUDGET_BYTES
        while budget > 0 and self._receiver is not None and not self._failed:
            target = self._receiver.get_buffer()
            filled, more = self._fill(target)
            if filled and self._receiver is not None:
                self._receiver.received(filled)
            if not more:
                return
            budget -= filled
        if self._receiver is not None and not self._failed and self._sock.pending():
            self._loop.call_soon(self._readable)  # inside OpenSSL already: the socket will not wake us for it

    def _fill(self, target: memoryview) -> tuple[int, bool]:
        """Read into ``target``. Returns the bytes read, and whether there may be more now."""
        read, size, filled = self._sock.read, len(target), 0
        try:
            while filled < size:
                num_bytes: Any = read(size - filled, target[filled:])  # type: ignore[arg-type]
                if num_bytes == 0:
                    self._fail("the peer closed the connection")
                    return filled, False
                filled += num_bytes
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return filled, False
        except (OSError, ValueError) as error:
            self._fail(describe_failure(error))
            return filled, False
        return filled, True

    def _flush(self) -> None:
        pending, write = self._pending, self._sock.write
        try:
            while pending:
                head = pending[0]
                num_bytes = write(head)
                if num_bytes == len(head):
                    pending.popleft()
                else:
                    pending[0] = memoryview(head)[num_bytes:]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError, BlockingIOError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._fd, self._writable)
        except (OSError, ValueError) as error:
            self._fail(describe_failure(error))

    def _writable(self) -> None:
        self._flush()
        if self._pending or self._closed or self._failed:
            return
        self._writing = False
        self._loop.remove_writer(self._fd)
        if self._receiver is not None:
            self._receiver.writable()
        else:
            self._half_close()

    def _fail(self, reason: str) -> None:
        if self._failed or self._closed:
            return
        self._failed = True
        self._pending.clear()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._loop.call_soon(self._report, reason)  # later: the owner may be in the middle of a write

    def _report(self, reason: str) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.lost(reason)


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
                raise UserError(
                    f"port {port} on {host} is in use; choose another, or 0 for any free one"
                ) from None
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        self._listener = listener
        self._spawn(self._accept_all(listener, on_wire))
        return listener.getsockname()[:2]

    async def dial(self, address: PeerAddress, peer: str) -> Wire:
        loop = asyncio.get_running_loop()
        try:
            sock = await asyncio.wait_for(_connect(loop, address), _HANDSHAKE_S)
            tls, found = await _secure(loop, sock, self._client, server_side=False)
        except (OSError, asyncio.TimeoutError, AdmissionError) as error:
            raise LinkBroken(f"cannot connect to {peer} at {address}: {describe_failure(error)}") from None
        if found != peer:
            tls.close()
            raise LinkBroken(f"the node at {address} has the certificate of {found!r}, expected was {peer!r}")
        return TlsWire(loop, tls, self._wires)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        deadline_s = asyncio.get_running_loop().time() + _LINGER_S
        while self._wires and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.005)
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
            tls, found = await _secure(loop, sock, self._server, server_side=True)
        except (OSError, AdmissionError, asyncio.TimeoutError) as error:
            log.warning("refused a connection from %s: %s", address[:2], describe_failure(error))
            return
        on_wire(TlsWire(loop, tls, self._wires), found)


async def _connect(loop: asyncio.AbstractEventLoop, address: PeerAddress) -> socket.socket:
    last: OSError = OSError(f"no address for {address.host}")
    for family, kind, proto, _, target in await loop.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
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

    Returns the TLS socket and the name the peer proved; owns ``sock``.
    """
    for name, value in _TCP_OPTIONS:
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        sock.setblocking(False)
        tls = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    try:
        await asyncio.wait_for(_handshake(loop, tls), _HANDSHAKE_S)
        return tls, peer_name(tls.getpeercert())
    except BaseException:
        tls.close()
        raise


async def _handshake(loop: asyncio.AbstractEventLoop, tls: ssl.SSLSocket) -> None:
    while True:
        try:
            tls.do_handshake()
            return
        except ssl.SSLWantReadError:
            await _wait(loop, tls.fileno(), loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await _wait(loop, tls.fileno(), loop.add_writer, loop.remove_writer)


async def _wait(
    loop: asyncio.AbstractEventLoop, fd: int, add: Callable[..., Any], remove: Callable[[int], Any]
) -> None:
    woken = loop.create_future()
    add(fd, lambda: woken.done() or woken.set_result(None))
    try:
        await woken
    finally:
        remove(fd)


def _join_small(buffers: Sequence[Any]) -> list[Any]:
    """The same bytes with small buffers glued to the head of what follows: fewer TLS records, one copy of <= 16 KiB."""
    joined: list[Any] = []
    small = b""
    for buffer in buffers:
        if len(buffer) <= _SMALL_BYTES:
            small += buffer
            continue
        if small:
            cut = max(0, _RECORD_BYTES - len(small))
            joined.append(small + buffer[:cut])
            small, buffer = b"", buffer[cut:]
        if len(buffer):
            joined.append(buffer)
    if small:
        joined.append(small)
    return joined


def describe_failure(error: BaseException) -> str:
    """Why connecting failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {_HANDSHAKE_S:.0f} s"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
