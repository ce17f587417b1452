"""The receiving half of a session: chunks become whole messages, each delivered once, within the window we
granted.

Pure; knows neither wire nor clock. A chunk's payload is placed straight into its message's buffer. That
buffer is allocated only after the message was found to fit the size limit, the granted window and the
owner's ``admit`` check.
What is delivered and what is consumed are two numbers: the window opens again only when the application
    consumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from fusionllm.errors import LocalProtocolError, RemoteProtocolError
from fusionllm.protocol.frames import MAX_AHEAD, MAX_CHUNK_BYTES, MAX_PARTIALS, Data, checksum_of
from fusionllm.protocol.outbox import MESSAGE_OVERHEAD_BYTES, cost_of
from fusionllm.protocol.recycler import Recycler
from fusionllm.units import MIB

#: Telling wakes the sender, 3 % of the time that 1 MiB takes: once per 4 MiB will do.
_ACKNOWLEDGE_BYTES = 4 * MIB
_ACKNOWLEDGE_MESSAGES = 64

Admit = Callable[[bytes, int], None]


class Incoming:
    """One message half received."""

    __slots__ = ("buffer", "have", "meta", "view")

    def __init__(self, meta: bytes, buffer: bytearray) -> None:
        self.meta, self.buffer, self.have = meta, buffer, 0
        self.view = memoryview(self.buffer)


class Inbox:
    """Messages on their way in.

    Args:
        window_bytes: cost of messages that may be begun and not yet consumed; one larger message may come
            alone.
        max_message_bytes: the largest payload accepted.
        recycle_bytes: memory of delivered messages kept to be used again.
        admit: called with (meta, total) before the buffer of a message is allocated; raises
            RemoteProtocolError.
    """

    def __init__(self, window_bytes: int, max_message_bytes: int, recycle_bytes: int, admit: Admit | None) -> None:
        self.window_bytes, self.max_message_bytes = window_bytes, max_message_bytes
        self.next_in = 1
        self.consumed = 0
        self.duplicates = 0
        self.messages_received = 0
        self._admit = admit
        self._recycler = Recycler(recycle_bytes)
        self._begun_cost = 0
        self._spare_consumed = 0  # bytes consumed beyond the messages already counted whole
        self._unconsumed: deque[int] = deque()
        self._unconsumed_bytes = 0
        self._ahead: set[int] = set()
        self._partial: dict[int, Incoming] = {}
        self._sink = memoryview(b"")
        self._announced = 0
        self._unacknowledged_messages = self._unacknowledged_bytes = 0

    def place(self, chunk: Data, num_bytes: int) -> memoryview:
        """Memory for the payload of ``chunk``. Raises RemoteProtocolError when the chunk breaks a rule."""
        if chunk.message_id < self.next_in or chunk.message_id in self._ahead:
            self.duplicates += 1
            if not self._sink:
                self._sink = memoryview(bytearray(MAX_CHUNK_BYTES))
            return self._sink[:num_bytes]
        message = self._partial.get(chunk.message_id)
        if message is None:
            message = self._begin(chunk)
        if chunk.offset != message.have or chunk.total != len(message.buffer):
            raise RemoteProtocolError(
                f"message {chunk.message_id}: chunk at {chunk.offset} of {chunk.total} bytes, expected at "
                f"{message.have} of {len(message.buffer)}"
            )
        if num_bytes > chunk.total - chunk.offset or (num_bytes == 0 and chunk.total > 0):
            raise RemoteProtocolError(
                f"message {chunk.message_id}: a chunk of {num_bytes} bytes at {chunk.offset} of {chunk.total}"
            )
        return message.view[chunk.offset : chunk.offset + num_bytes]

    def _begin(self, chunk: Data) -> Incoming:
        if chunk.total > self.max_message_bytes:
            raise RemoteProtocolError(
                f"message {chunk.message_id} of {chunk.total} bytes is over the limit of {self.max_message_bytes} bytes"
            )
        if chunk.message_id >= self.next_in + MAX_AHEAD or len(self._partial) >= MAX_PARTIALS:
            raise RemoteProtocolError(
                f"message {chunk.message_id} begun with {len(self._partial)} unfinished; allowed are "
                f"ids below {self.next_in + MAX_AHEAD} and {MAX_PARTIALS} unfinished"
            )
        outstanding = self._begun_cost - self.consumed
        if outstanding and outstanding + cost_of(chunk.total) > self.window_bytes:
            raise RemoteProtocolError(
                f"message {chunk.message_id} of {chunk.total} bytes goes over the credit: {outstanding} of "
                f"{self.window_bytes} bytes are taken"
            )
        if chunk.offset:
            raise RemoteProtocolError(f"message {chunk.message_id} starts at byte {chunk.offset} instead of 0")
        if self._admit is not None:
            self._admit(chunk.meta, chunk.total)
        try:
            buffer = self._recycler.take(chunk.total)
        except MemoryError:
            raise RemoteProtocolError(
                f"message {chunk.message_id} of {chunk.total} bytes does not fit into this machine's memory"
            ) from None
        message = self._partial[chunk.message_id] = Incoming(chunk.meta, buffer)
        self._begun_cost += cost_of(chunk.total)
        return message

    def arrived(self, chunk: Data, payload: memoryview) -> Incoming | None:
        """The payload of ``chunk`` is in place.

        Returns the message if it is whole now and was not delivered before.
        """
        message = self._partial.get(chunk.message_id)
        if message is None:
            return None
        if checksum_of(payload) != chunk.checksum:
            raise RemoteProtocolError(
                f"message {chunk.message_id}: bad checksum of {len(payload)} bytes at {chunk.offset}; "
                "they are asked for again"
            )
        message.have += len(payload)
        if message.have < chunk.total:
            return None
        message.view.release()
        del self._partial[chunk.message_id]
        self._ahead.add(chunk.message_id)
        while self.next_in in self._ahead:
            self._ahead.discard(self.next_in)
            self.next_in += 1
        self.messages_received += 1
        self._unacknowledged_messages += 1
        self._unacknowledged_bytes += chunk.total
        self._unconsumed.append(chunk.total)
        self._unconsumed_bytes += chunk.total
        self._count_whole()
        return message

    def consume(self, num_bytes: int) -> None:
        """The application is done with ``num_bytes`` of delivered payload."""
        if not 0 <= num_bytes <= self._unconsumed_bytes:
            raise LocalProtocolError(
                f"{num_bytes} bytes reported as consumed; delivered and unconsumed are {self._unconsumed_bytes}"
            )
        self._unconsumed_bytes -= num_bytes
        self._spare_consumed += num_bytes
        self.consumed += num_bytes
        self._count_whole()

    def _count_whole(self) -> None:
        while self._unconsumed and self._unconsumed[0] <= self._spare_consumed:
            self._spare_consumed -= self._unconsumed.popleft()
            self.consumed += MESSAGE_OVERHEAD_BYTES

    def news_is_due(self) -> bool:
        """Whether to tell the peer now what was delivered and consumed.

        At once when nothing more is on its way, for the peer may be waiting; else when enough has gathered.
        """
        unannounced = self.consumed - self._announced
        if not self._partial:
            return (
                self._unacknowledged_messages > 0
                or self.consumed == self._begun_cost > self._announced
                or (unannounced >= self.window_bytes // 8)
            )
        return (
            unannounced >= self.window_bytes // 8
            or self._unacknowledged_bytes >= min(_ACKNOWLEDGE_BYTES, self.window_bytes // 16)
            or self._unacknowledged_messages >= _ACKNOWLEDGE_MESSAGES
        )

    def has_news(self) -> bool:
        """Whether anything was delivered or consumed since the last announcement."""
        return self._unacknowledged_messages > 0 or self.consumed > self._announced

    def announce(self) -> int:
        """The absolute consumed cost, noted as told to the peer."""
        self._announced = self.consumed
        self._unacknowledged_messages = self._unacknowledged_bytes = 0
        return self.consumed

    def delivered_bitmap(self) -> bytes:
        """Which ids from ``next_in`` on are delivered, as ``Credit.delivered``."""
        if not self._ahead:
            return b""
        bits = bytearray(MAX_AHEAD // 8)
        for message_id in self._ahead:
            k = message_id - self.next_in
            bits[k >> 3] |= 1 << (k & 7)
        return bytes(bits).rstrip(b"\0")

    def partial_offsets(self) -> dict[int, int]:
        """Bytes held per half-received message, by id minus ``next_in``."""
        return {mid - self.next_in: message.have for mid, message in self._partial.items() if message.have}
