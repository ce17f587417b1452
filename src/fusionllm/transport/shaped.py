"""A wire slowed down: what the sender writes leaves at a rate and arrives after a delay, first in, first out.

Wraps any wire; without a shape it passes everything straight on. The pacer's own queue stays short (about 50
ms of bytes), so the session above keeps choosing what goes next and urgent messages still overtake; only the
delay line, bytes "on the way", may be long. Bytes are not copied.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from fusionllm.protocol.messages import LinkShape
from fusionllm.transport.wire import Receiver, Wire
from fusionllm.units import KIB

_AHEAD_S = 0.05
_LINGER_S = 1.0
_MIN_CHUNK_BYTES = 4 * KIB
_MAX_CHUNK_BYTES = 256 * KIB


class ShapedWire:
    """Paces ``inner``; the shape can change at any time."""

    def __init__(self, inner: Wire, shape: LinkShape | None) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._line: deque[tuple[float, list[Any]]] = deque()  # (arrival time, buffers)
        self._free_s = 0.0  # when the sender's end of the link is idle again
        self._arrival_s = 0.0  # of the youngest bytes: a shorter delay never overtakes
        self._timer: asyncio.TimerHandle | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._closing = False
        self._sink = memoryview(bytearray(_MIN_CHUNK_BYTES))  # for what arrives while closing
        self.shape = shape

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._inner.start(self)

    def room(self) -> int:
        if self.shape is None:
            return self._inner.room() if not self._line else 0
        chunk_bytes = int(self.shape.bandwidth_bytes_per_s * _AHEAD_S)
        ahead_s = self._free_s - self._loop.time()
        overdue = bool(self._line) and self._line[0][0] < self._loop.time() - _AHEAD_S and self._inner.room() == 0
        if overdue:
            return 0
        if ahead_s > _AHEAD_S:
            self._wake_at(self._free_s - _AHEAD_S)
            return 0
        return min(max(chunk_bytes, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)

    def write(self, buffers: Sequence[Any]) -> None:
        now_s = self._loop.time()
        latency_s = 0.0
        if self.shape is not None:
            num_bytes = sum(len(buffer) for buffer in buffers)
            self._free_s = max(self._free_s, now_s) + num_bytes / self.shape.bandwidth_bytes_per_s
            latency_s = self.shape.latency_s
        elif not self._line:
            self._inner.write(buffers)
            return
        self._arrival_s = max(self._arrival_s, self._free_s + latency_s, now_s)
        self._line.append((self._arrival_s, list(buffers)))
        self._arm()

    def close(self) -> None:
        self._receiver = None
        self._closing = True
        if self._line:
            self._wake = self._loop.call_at(self._line[-1][0] + _LINGER_S, self.abort)
        else:
            self._end()
            self._inner.close()

    def abort(self) -> None:
        self._receiver = None
        self._end()
        self._inner.abort()

    def _end(self) -> None:
        self._line.clear()
        for timer in (self._timer, self._wake):
            if timer is not None:
                timer.cancel()
        self._timer = self._wake = None

    def _arm(self) -> None:
        if self._timer is None and self._line:
            self._timer = self._loop.call_at(self._line[0][0], self._arrive)

    def _wake_at(self, when_s: float) -> None:
        if self._wake is None:
            self._wake = self._loop.call_at(when_s, self._awake)

    def _awake(self) -> None:
        self._wake = None
        if self._receiver is not None:
            self._receiver.writable()

    def _arrive(self) -> None:
        self._timer = None
        now_s = self._loop.time() + 0.0005  # half the timers' grain
        while self._line and self._line[0][0] <= now_s:
            if self._inner.room() == 0:
                return  # ``writable`` of the inner wire continues
            self._inner.write(self._line.popleft()[1])
        self._arm()
        if self._closing and not self._line:
            self._end()
            self._inner.close()
        elif self._receiver is not None:
            self._receiver.writable()

    # --- as the receiver of the inner wire --------------------------------------------------------

    def get_buffer(self) -> memoryview:
        return self._sink if self._receiver is None else self._receiver.get_buffer()

    def received(self, num_bytes: int) -> None:
        if self._receiver is not None:
            self._receiver.received(num_bytes)

    def writable(self) -> None:
        if self._timer is None:
            self._arrive()

    def lost(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._end()
        if receiver is not None:
            receiver.lost(reason)
