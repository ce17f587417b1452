"""A TLS 1.3 stream over a TCP socket as a wire.

Where it differs from asyncio's own TLS: the socket is read and written in large steps around two memory
BIOs, and decrypted bytes land in the receiver's buffer, so a link keeps up with a plain blocking TLS socket.
It needs a loop with ``add_reader`` (uvloop, or asyncio's selector loop; on Windows choose
``SelectorEventLoop``). Knows nothing of frames or names; ``tls_transport`` makes these wires.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

from fusionllm.transport.wire import Receiver
from fusionllm.units import KIB

LINGER_S = 1.0
_RECORD_BYTES = 16 * KIB  # the most plaintext in one TLS record
_SMALL_BYTES = 4 * KIB
_STEP_BYTES = 128 * KIB
_SEND_BYTES = _STEP_BYTES + KIB  # encrypted: each record adds 22 bytes
_READ_BYTES = 1024 * KIB  # the fewer wake-ups the better: 256 KiB costs 15 % more
_ROOM_BYTES = 256 * KIB


class TlsStream:
    """A TCP socket in non-blocking mode with its TLS engine between two memory BIOs."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=server_side)


class TlsWire:
    """A wire on a stream whose handshake is done.

    Args:
        wires: the set of open wires, which this one joins and leaves.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stream: TlsStream, wires: set[TlsWire]) -> None:
        self._loop, self._sock, self._fd = loop, stream.sock, stream.sock.fileno()
        self._tls, self._incoming, self._outgoing = stream.tls, stream.incoming, stream.outgoing
        self._receiver: Receiver | None = None
        self._raw = memoryview(bytearray(_READ_BYTES))
        self._pending = memoryview(b"")  # encrypted, not yet taken by the kernel
        self._writing = self._closed = self._failed = False
        self._wires = wires
        wires.add(self)

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._decrypt)  # what came along with the end of the handshake

    def room(self) -> int:
        return 0 if self._pending or self._closed or self._failed else _ROOM_BYTES

    def write(self, buffers: Sequence[Any]) -> None:
        if self._closed or self._failed:
            return
        try:
            for piece in _pieces(buffers):
                self._tls.write(piece)
                if not self._writing:
                    self._flush()
        except (OSError, ValueError) as error:
            self._fail(describe_failure(error))

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
        self._pending = memoryview(b"")
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._wires.discard(self)

    def _half_close(self) -> None:
        """All is written: say so, then swallow what still comes, lest a reset destroys our last bytes."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.abort()
            return
        self._loop.remove_reader(self._fd)
        self._loop.add_reader(self._fd, self._swallow)

    def _swallow(self) -> None:
        try:
            if self._sock.recv_into(self._raw):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self.abort()

    def _readable(self) -> None:
        try:
            num_bytes = self._sock.recv_into(self._raw)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(describe_failure(error))
            return
        if num_bytes == 0:
            self._fail("the peer closed the connection")
            return
        self._incoming.write(self._raw[:num_bytes])
        self._decrypt()

    def _decrypt(self) -> None:
        """Hand over all that can be decrypted now."""
        more = True
        while more and self._receiver is not None and not self._failed:
            target = self._receiver.get_buffer()
            filled, more = self._fill(target)
            if filled:
                self._receiver.received(filled)

    def _fill(self, target: memoryview) -> tuple[int, bool]:
        """Decrypt into ``target``. Returns the bytes written, and whether there may be more now."""
        read, size, filled = self._tls.read, len(target), 0
        try:
            while filled < size:
                num_bytes: Any = read(size - filled, target[filled:] if filled else target)
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
        pending = self._pending
        try:
            while pending or self._outgoing.pending:
                if not pending:
                    pending = memoryview(self._outgoing.read(_SEND_BYTES))
                pending = pending[self._sock.send(pending) :]
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._fd, self._writable)
        except OSError as error:
            self._fail(describe_failure(error))
            return
        self._pending = pending

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
        self._pending = memoryview(b"")
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._loop.call_soon(self._report, reason)  # later: the owner may be in the middle of a write

    def _report(self, reason: str) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.lost(reason)


def _pieces(buffers: Sequence[Any]) -> Iterator[Any]:
    """The same bytes in steps of a few whole records, small buffers glued to the head of what follows.

    Encrypting and sending in small steps keeps them in the processor's cache.
    """
    small = b""
    for buffer in buffers:
        if len(buffer) <= _SMALL_BYTES:
            small += buffer
            continue
        offset = 0
        if small:
            offset = max(0, _RECORD_BYTES - len(small))
            yield small + buffer[:offset]
            small = b""
        while offset < len(buffer):
            yield buffer[offset : offset + _STEP_BYTES]
            offset += _STEP_BYTES
    if small:
        yield small


def describe_failure(error: BaseException) -> str:
    """Why connecting failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
