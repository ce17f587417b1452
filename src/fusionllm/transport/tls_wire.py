"""A TLS 1.3 stream over a TCP socket as a wire.

Where it differs from asyncio's own TLS: the TLS engine reads and writes the socket itself, with no buffers in
between, and decrypted bytes land in the receiver's buffer, so a link keeps up with a plain blocking TLS socket.
It needs a loop with ``add_reader`` (uvloop, or asyncio's selector loop; on Windows choose
``SelectorEventLoop``). Knows nothing of frames or names; ``tls_transport`` makes these wires.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from fusionllm.transport.wire import Receiver
from fusionllm.units import KIB

LINGER_S = 1.0
_RECORD_BYTES = 16 * KIB  # the most plaintext in one TLS record
_SMALL_BYTES = 4 * KIB
_READ_BYTES = 1024 * KIB  # per turn of the loop, so that others get theirs
_ROOM_BYTES = 256 * KIB


class TlsWire:
    """A wire on a non-blocking socket whose handshake is done.

    Args:
        wires: the set of open wires, which this one joins and leaves.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket, wires: set[TlsWire]) -> None:
        self._loop, self._sock, self._fd = loop, sock, sock.fileno()
        self._receiver: Receiver | None = None
        self._pending: deque[memoryview] = deque()  # not yet taken by the engine
        self._writing = self._closed = self._failed = False
        self._wires = wires
        wires.add(self)

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._readable)  # what came along with the end of the handshake

    def room(self) -> int:
        return 0 if self._pending or self._closed or self._failed else _ROOM_BYTES

    def write(self, buffers: Sequence[Any]) -> None:
        if self._closed or self._failed:
            return
        self._pending.extend(_pieces(buffers))
        if not self._writing:
            self._flush()

    def close(self) -> None:
        if self._closed:
            return
        self._receiver = None
        if self._failed:
            self.abort()
        elif not self._pending:
            self._half_close()
        self._loop.call_later(LINGER_S, self.abort)

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
        """All is written: say so, then swallow what still comes, lest a reset destroys our last bytes."""
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)  # of the socket: SSLSocket's would drop the engine
        except OSError:
            self.abort()
            return
        self._loop.remove_reader(self._fd)
        self._loop.add_reader(self._fd, self._swallow)

    def _swallow(self) -> None:
        try:
            if self._sock.recv(_READ_BYTES):
                return
        except ssl.SSLWantReadError:
            return
        except OSError:
            pass
        self.abort()

    def _readable(self) -> None:
        """Hand over what can be decrypted now, within reason; what is left inside the engine comes next turn."""
        left = _READ_BYTES
        while left > 0 and self._receiver is not None and not self._failed:
            target = self._receiver.get_buffer()
            filled, more = self._fill(target[:left])
            if filled:
                self._receiver.received(filled)
            if not more:
                return
            left -= filled
        if self._receiver is not None and not self._failed and self._sock.pending():
            self._loop.call_soon(self._readable)

    def _fill(self, target: memoryview) -> tuple[int, bool]:
        """Decrypt into ``target``. Returns the bytes written, and whether there may be more now."""
        read, size, filled = self._sock.recv_into, len(target), 0
        try:
            while filled < size:
                num_bytes = read(target[filled:] if filled else target)
                if num_bytes == 0:
                    self._fail("the peer closed the connection")
                    return filled, False
                filled += num_bytes
        except ssl.SSLWantReadError:
            return filled, False
        except (OSError, ValueError) as error:
            self._fail(describe_failure(error))
            return filled, False
        return filled, True

    def _flush(self) -> None:
        pending, send = self._pending, self._sock.send
        try:
            while pending:
                sent = send(pending[0])
                if sent == len(pending[0]):
                    pending.popleft()
                else:
                    pending[0] = pending[0][sent:]
        except ssl.SSLWantWriteError:
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


def _pieces(buffers: Sequence[Any]) -> Iterator[memoryview]:
    """The same bytes, small buffers glued to the head of what follows so that they need no record of their own."""
    small = b""
    for buffer in buffers:
        if len(buffer) <= _SMALL_BYTES:
            small += buffer
            continue
        offset = 0
        if small:
            offset = max(0, _RECORD_BYTES - len(small))
            yield memoryview(small + buffer[:offset])
            small = b""
        if offset < len(buffer):
            yield memoryview(buffer)[offset:]
    if small:
        yield memoryview(small)


def describe_failure(error: BaseException) -> str:
    """Why connecting failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
