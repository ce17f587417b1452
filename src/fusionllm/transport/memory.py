"""Wires inside one process: the same contract as TLS without sockets, cut on purpose at any byte.

For tests and small simulations. Every ``MemoryTransport`` on one ``MemoryHub`` can dial every other; names
are taken on trust. Bytes are handed over in pieces of at most ``step_bytes``, in the loop's next turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from fusionllm.errors import LinkBroken, UserError
from fusionllm.transport.wire import OnWire, PeerAddress, Receiver, Wire
from fusionllm.units import KIB

_ROOM_BYTES = 256 * KIB


class MemoryHub:
    """The network: who listens on which port.

    Attributes:
        step_bytes: most bytes handed over at once.
        cut_after_bytes: each future wire breaks after these many bytes in either direction, one entry per
            wire, first entry first; with none left wires last.
    """

    def __init__(self, step_bytes: int = _ROOM_BYTES) -> None:
        self.step_bytes = step_bytes
        self.cut_after_bytes: deque[int] = deque()
        self.listeners: dict[int, tuple[str, OnWire]] = {}
        self.wires: list[MemoryWire] = []

    def connect(self, dialler: str, port: int, peer: str) -> MemoryWire:
        """Both ends of a new wire; the listener gets its end, the caller the other."""
        if port not in self.listeners:
            raise LinkBroken(f"cannot connect to {peer} at memory port {port}: nobody listens")
        name, on_wire = self.listeners[port]
        if name != peer:
            raise LinkBroken(f"the node at memory port {port} is {name!r}, expected was {peer!r}")
        near, far = MemoryWire(self.step_bytes), MemoryWire(self.step_bytes)
        near.other, far.other = far, near
        near.left_bytes = self.cut_after_bytes.popleft() if self.cut_after_bytes else None
        self.wires = [wire for wire in self.wires if not wire.gone] + [near, far]
        on_wire(far, dialler)
        return near


class MemoryWire:
    """One end of a pair."""

    def __init__(self, step_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._step_bytes = step_bytes
        self._receiver: Receiver | None = None
        self._arriving: deque[memoryview] = deque()
        self._ending: str | None = None
        self._scheduled = False
        self.arriving_bytes = 0
        self.gone = False
        self.other: MemoryWire | None = None
        self.left_bytes: int | None = None

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._schedule()

    def room(self) -> int:
        other = self.other
        return 0 if self.gone or other is None or other.arriving_bytes >= _ROOM_BYTES else _ROOM_BYTES

    def write(self, buffers: Sequence[Any]) -> None:
        other = self.other
        if self.gone or other is None or other.gone:
            return
        for buffer in buffers:
            view = memoryview(buffer)
            other._arriving.append(view)
            other.arriving_bytes += len(view)
        other._schedule()

    def close(self) -> None:
        self._end("the peer closed the connection")

    def abort(self) -> None:
        self._end("the peer aborted the connection")

    def cut(self) -> None:
        """Break the wire for both sides."""
        for end in (self, self.other):
            if end is not None and not end.gone:
                end._arriving.clear()
                end._ending = "the connection was cut"
                end._schedule()

    def _end(self, reason: str) -> None:
        if self.gone:
            return
        self.gone, self._receiver = True, None
        self._arriving.clear()
        if self.other is not None and not self.other.gone:
            self.other._ending = self.other._ending or reason
            self.other._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and self._receiver is not None:
            self._scheduled = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._scheduled = False
        receiver = self._receiver
        if receiver is None or self.gone:
            return
        if self._arriving:
            self._hand_over(receiver)
            if self.other is not None and not self.other.gone and self.other._receiver is not None:
                self.other._receiver.writable()
            self._schedule()
        elif self._ending is not None:
            self._end(self._ending)
            receiver.lost(self._ending)

    def _hand_over(self, receiver: Receiver) -> None:
        target = receiver.get_buffer()
        view = self._arriving.popleft()
        num_bytes = min(len(view), len(target), self._step_bytes)
        target[:num_bytes] = view[:num_bytes]
        self.arriving_bytes -= num_bytes
        if num_bytes < len(view):
            self._arriving.appendleft(view[num_bytes:])
        receiver.received(num_bytes)
        pair = self if self.left_bytes is not None else self.other
        if pair is not None and pair.left_bytes is not None:
            pair.left_bytes -= num_bytes
            if pair.left_bytes <= 0:
                self.cut()


#: The network of this process, where none is given.
PROCESS_HUB = MemoryHub()


class MemoryTransport:
    """A node's place on a hub."""

    def __init__(self, name: str, hub: MemoryHub | None = None) -> None:
        self._name, self._hub = name, hub or PROCESS_HUB
        self._port: int | None = None

    async def listen(self, host: str, port: int, on_wire: OnWire) -> tuple[str, int]:
        listeners = self._hub.listeners
        if port in listeners:
            raise UserError(f"port {port} on {host} is in use by {listeners[port][0]}; choose another, or 0 for any")
        self._port = port or max(listeners, default=0) + 1
        listeners[self._port] = (self._name, on_wire)
        return host, self._port

    async def dial(self, address: PeerAddress, peer: str) -> Wire:
        await asyncio.sleep(0)
        return self._hub.connect(self._name, address.port, peer)

    async def close(self) -> None:
        if self._port is not None:
            del self._hub.listeners[self._port]
            self._port = None
