"""The sending half of a session: a priority queue of messages, cut into chunks, within the peer's credit.

Pure; knows neither wire nor clock. A message is *started* when its first chunk is handed out: only then does
it get an id and is charged against the peer's window, so ids reach the peer in order and the peer's tables
stay small. It is kept until the peer says it was delivered; after a reconnect it is sent again from the byte
the peer holds. Lowest (priority, age) goes first, chunk by chunk, so an urgent message overtakes a bulk one
half way through. Slicing makes views of the caller's buffers and never copies them: they must not change
until delivery.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush
from itertools import accumulate

from fusionllm.errors import RemoteProtocolError
from fusionllm.protocol.frames import (
    HEAD_BYTES,
    MAX_AHEAD,
    MAX_PARTIALS,
    Data,
    checksum_of_pieces,
    encode_frame,
)

#: Charged for each message on top of its payload, so that a flood of tiny messages is bounded too.
MESSAGE_OVERHEAD_BYTES = 512
#: Room left in a chunk for its own prefix and header, so that a whole frame fills whole TLS records.
_FRAME_OVERHEAD_BYTES = HEAD_BYTES


class Outgoing:
    """One message on its way out."""

    __slots__ = ("meta", "offset", "pieces", "priority", "sent", "starts", "total")

    def __init__(self, meta: bytes, pieces: tuple[memoryview, ...], priority: int) -> None:
        self.meta, self.pieces, self.priority = meta, pieces, priority
        self.starts = [0, *accumulate(len(piece) for piece in pieces)]
        self.total = self.starts[-1]
        self.offset = 0
        self.sent = False

    def slices(self, offset: int, num_bytes: int) -> list[memoryview]:
        """Views of bytes ``offset .. offset + num_bytes`` of the payload."""
        if len(self.pieces) == 1:
            return [self.pieces[0][offset : offset + num_bytes]]
        found, index, end = [], bisect_right(self.starts, offset) - 1, offset + num_bytes
        while offset < end:
            begin = self.starts[index]
            stop = min(end, self.starts[index + 1])
            if stop > offset:
                found.append(self.pieces[index][offset - begin : stop - begin])
                offset = stop
            index += 1
        return found


def cost_of(total: int) -> int:
    """What a message of ``total`` payload bytes takes from the window."""
    return total + MESSAGE_OVERHEAD_BYTES


class Outbox:
    """Messages posted and not yet known to be delivered."""

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.resent_bytes = 0
        self.messages_delivered = 0
        self.window_bytes = 0
        self._next_id = 1
        self._next_in = 1  # the peer has delivered every id below
        self._posted = 0
        self._started_cost = 0
        self._consumed = 0
        self._waiting: list[tuple[int, int, Outgoing]] = []
        self._started: list[tuple[int, int]] = []
        self._unacked: dict[int, Outgoing] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unacked)

    def post(self, meta: bytes, pieces: tuple[memoryview, ...], priority: int) -> None:
        message = Outgoing(meta, pieces, priority)
        self._posted += 1
        self.queued_bytes += message.total
        heappush(self._waiting, (priority, self._posted, message))

    def can_send(self) -> bool:
        """Whether ``next_chunk`` would hand something out. Needs the peer's window (from its Hello)."""
        return bool(self._started) or self._can_start()

    def _can_start(self) -> bool:
        if not self._waiting or len(self._started) >= MAX_PARTIALS or self._next_id >= self._next_in + MAX_AHEAD:
            return False
        outstanding = self._started_cost - self._consumed
        return outstanding == 0 or outstanding + cost_of(self._waiting[0][2].total) <= self.window_bytes

    def _choose(self) -> tuple[int, Outgoing]:
        head_priority = self._started[0][0] if self._started else None
        if self._can_start() and (head_priority is None or self._waiting[0][0] < head_priority):
            _, _, message = heappop(self._waiting)
            message_id = self._next_id
            self._next_id += 1
            self._started_cost += cost_of(message.total)
            self._unacked[message_id] = message
            heappush(self._started, (message.priority, message_id))
        message_id = self._started[0][1]
        return message_id, self._unacked[message_id]

    def next_chunk(self, max_frame_bytes: int) -> list[bytes | memoryview]:
        """The next frame as buffers to write in order; needs ``can_send()``."""
        message_id, message = self._choose()
        offset = message.offset
        meta = message.meta if offset == 0 else b""
        room = max(1024, max_frame_bytes - _FRAME_OVERHEAD_BYTES - len(meta))
        num_bytes = min(message.total - offset, room)
        pieces = message.slices(offset, num_bytes) if num_bytes else []
        header = Data(message_id, offset, message.total, checksum_of_pieces(pieces), meta)
        message.offset = offset + num_bytes
        if message.offset == message.total:
            message.sent = True
            heappop(self._started)
        return [encode_frame(header, num_bytes), *pieces]

    def acknowledge(self, next_in: int, delivered: bytes, consumed: int) -> None:
        """Take the peer's absolute progress. Raises RemoteProtocolError for progress that cannot be."""
        ahead = [k for k in range(len(delivered) * 8) if delivered[k >> 3] >> (k & 7) & 1] if delivered else []
        if max(next_in - 1, next_in + ahead[-1] if ahead else 0) >= self._next_id or consumed > self._started_cost:
            raise RemoteProtocolError(
                f"the peer acknowledges message {next_in + ahead[-1] if ahead else next_in - 1} and "
                f"{consumed} bytes; sent were {self._next_id - 1} messages and {self._started_cost} bytes"
            )
        self._consumed = max(self._consumed, consumed)
        for message_id in range(self._next_in, next_in):
            self._drop(message_id)
        for k in ahead:
            self._drop(next_in + k)
        self._next_in = max(self._next_in, next_in)

    def _drop(self, message_id: int) -> None:
        message = self._unacked.get(message_id)
        if message is None:
            return
        if not message.sent:
            raise RemoteProtocolError(
                f"the peer acknowledges message {message_id} after {message.offset} of {message.total} bytes"
            )
        del self._unacked[message_id]
        self.queued_bytes -= message.total
        self.messages_delivered += 1

    def rewind(self, partial: dict[int, int]) -> None:
        """After a reconnect: continue each message at the byte the peer holds (message id -> bytes)."""
        for message_id, have in partial.items():
            message = self._unacked.get(message_id)
            if message is None or have > message.offset or have >= message.total:
                raise RemoteProtocolError(
                    f"the peer claims to hold {have} bytes of message {message_id}, which cannot be"
                )
        self._started = []
        for message_id, message in self._unacked.items():
            have = partial.get(message_id, 0)
            self.resent_bytes += message.offset - have
            message.offset, message.sent = have, False
            heappush(self._started, (message.priority, message_id))
