"""The session between two nodes: ordered bytes in, whole messages out, exactly once, over any number of
wires.

A pure machine. ``handle(event)`` returns the commands to perform; time comes in with the events, and bytes
are written by the owner into ``get_buffer()`` and reported with ``Received``. It knows no clock, socket or
thread. The owner is ``transport.link``; the simulator and the tests drive the same machine.

    WireUp -> Hello both ways -> Ready -> Data / Credit / Ping ... -> WireLost -> (keep_s to come back) ->
    WireUp ...

Both Hellos carry what was delivered, consumed and half received, so a new wire continues at the byte the
other side holds. A session ends (``End``) when a side closes it, when no wire came for ``keep_s``, when the
peer turns out to be another process than before (incarnation) or to have given the session up (epoch), or
when it keeps breaking the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusionllm.errors import LinkBroken, LinkClosed, LinkError, LocalProtocolError, RemoteProtocolError
from fusionllm.protocol.frames import (
    MAX_META_BYTES,
    Close,
    Credit,
    Data,
    FrameReader,
    Header,
    Hello,
    Ping,
    Pong,
    encode_frame,
    goodbye,
)
from fusionllm.protocol.inbox import Admit, Inbox
from fusionllm.protocol.outbox import Outbox
from fusionllm.protocol.session_events import (
    NUM_PRIORITIES,
    CloseWire,
    Command,
    Consumed,
    Deliver,
    End,
    Event,
    Post,
    Ready,
    Received,
    SessionConfig,
    Shut,
    Tick,
    WireLost,
    WireUp,
    Writable,
    Write,
)

#: Wires in a row that the peer may spoil before the session is given up.
_MAX_VIOLATIONS = 8

__all__ = [
    "NUM_PRIORITIES",
    "CloseWire",
    "Command",
    "Consumed",
    "Deliver",
    "End",
    "Event",
    "Post",
    "Ready",
    "Received",
    "Session",
    "SessionConfig",
    "Shut",
    "Tick",
    "WireLost",
    "WireUp",
    "Writable",
    "Write",
]


class Session:
    """One side of the conversation between nodes ``name`` and ``peer``.

    Args:
        incarnation: random number of this process, > 0.
        epoch: how many sessions this process has opened with this peer, this one included.
        now_s: the time; ``keep_s`` counts from here until the first wire.
        admit: called with (meta, total bytes) before a message's buffer is allocated; raises
            RemoteProtocolError.
    """

    def __init__(
        self, name: str, peer: str, incarnation: int, epoch: int, config: SessionConfig, now_s: float,
        admit: Admit | None = None,
    ) -> None:  # fmt: skip
        self.name, self.peer, self.config = name, peer, config
        self.incarnation, self.epoch = incarnation, epoch
        self.outbox = Outbox()
        self.inbox = Inbox(config.window_bytes, config.max_message_bytes, config.recycle_bytes, admit)
        self.ended: LinkError | None = None
        self.wires = 0
        self.rtt_s: float | None = None
        self._peer_incarnation = self._peer_epoch = 0
        self._peer_knows_us = False
        self._has_wire = self._ready = False
        self._wireless_since_s = now_s
        self._wire_error = "no wire yet"
        self._violations = 0
        self._heard_s = self._pinged_s = now_s
        self._credit_due = False
        self._control: list[bytes] = []
        self._reader = FrameReader(self._place)
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            WireUp: self._wire_up, WireLost: self._wire_lost, Received: self._received,
            Writable: self._writable, Tick: self._tick, Post: self._post, Consumed: self._consumed,
            Shut: self._shut,
        }  # fmt: skip

    def get_buffer(self) -> memoryview:
        """Where the wire's next bytes belong; never empty."""
        return self._reader.get_buffer()

    @property
    def ready(self) -> bool:
        """Whether both sides said Hello on the current wire."""
        return self._ready

    @property
    def wants_write(self) -> bool:
        """Whether ``Writable`` would write something."""
        if not self._ready:
            return self._has_wire and bool(self._control)
        return bool(self._control) or self.outbox.can_send() or self._credit_wanted()

    def _credit_wanted(self) -> bool:
        return self._credit_due or self.inbox.news_is_due()

    def handle(self, event: Event) -> list[Command]:
        """Advance by one event. Returns the commands to perform in order; after ``End`` always none."""
        if self.ended is not None:
            return []
        return self._handlers[type(event)](event)

    # --- wires ------------------------------------------------------------------------------------

    def _wire_up(self, event: WireUp) -> list[Command]:
        self._has_wire, self._ready = True, False
        self._reader = FrameReader(self._place)
        self._heard_s = self._pinged_s = event.now_s
        self.wires += 1
        self._credit_due = False
        hello = Hello(
            self.name, self.incarnation, self.epoch, self._peer_incarnation, self._peer_epoch,
            self.inbox.window_bytes, self.inbox.next_in, self.inbox.delivered_bitmap(), self.inbox.announce(),
            self.inbox.partial_offsets(),
        )  # fmt: skip
        self._control = [encode_frame(hello)]
        return []

    def _wire_lost(self, event: WireLost) -> list[Command]:
        self._drop_wire(event.now_s, event.reason)
        return []

    def _drop_wire(self, now_s: float, reason: str) -> None:
        if self._has_wire:
            self._wireless_since_s = now_s
        self._has_wire = self._ready = False
        self._control = []
        self._wire_error = reason

    def _close_wire(self, now_s: float, reason: str) -> list[Command]:
        self._drop_wire(now_s, reason)
        return [CloseWire(reason, goodbye(reason, final=False))]

    def _end(self, error: LinkError, farewell: bytes = b"") -> list[Command]:
        self.ended = error
        self._has_wire = self._ready = False
        return [End(error, farewell)]

    def _broken(self, reason: str, final: bool = True) -> list[Command]:
        """End by failure. ``final`` False: the peer's session is a fresh one and may try again."""
        return self._end(LinkBroken(f"{self.name}: link to {self.peer} broken: {reason}"), goodbye(reason, final))

    # --- receiving --------------------------------------------------------------------------------

    def _received(self, event: Received) -> list[Command]:
        if not self._has_wire:
            return []
        self._heard_s = event.now_s
        try:
            frame = self._reader.advance(event.num_bytes)
            if frame is None:
                return []
            header, payload = frame
            if isinstance(header, Data):
                return self._on_data(header, payload)
            return self._on_control(header, event.now_s)
        except RemoteProtocolError as error:
            return self._violation(error, event.now_s)

    def _violation(self, error: RemoteProtocolError, now_s: float) -> list[Command]:
        reason = f"{self.peer} broke the protocol: {error}"
        self._violations += 1
        if not self._ready or self._violations >= _MAX_VIOLATIONS:
            return self._broken(reason)
        return self._close_wire(now_s, reason)

    def _place(self, header: Data, num_bytes: int) -> memoryview:
        if not self._ready:
            raise RemoteProtocolError("a Data frame before Hello")
        return self.inbox.place(header, num_bytes)

    def _on_data(self, header: Data, payload: memoryview) -> list[Command]:
        self._peer_knows_us = True
        message = self.inbox.arrived(header, payload)
        if message is None:
            return []
        self._violations = 0
        return [Deliver(message.meta, message.buffer)]

    def _on_control(self, header: Header, now_s: float) -> list[Command]:
        if isinstance(header, Close):
            if header.final:
                return self._end(LinkClosed(f"{self.peer} closed the link to {self.name}: {header.reason}"))
            self._drop_wire(now_s, f"{self.peer} closed the wire: {header.reason}")
            return [CloseWire(self._wire_error)]
        if isinstance(header, Hello):
            return self._on_hello(header, now_s)
        if not self._ready:
            raise RemoteProtocolError(f"a {type(header).__name__} frame before Hello")
        self._peer_knows_us = True
        if isinstance(header, Credit):
            self.outbox.acknowledge(header.next_in, header.delivered, header.consumed)
        elif isinstance(header, Ping):
            self._control.append(encode_frame(Pong(header.stamp)))
        elif isinstance(header, Pong):
            sample_s = now_s - header.stamp / 1e6
            if sample_s >= 0:
                self.rtt_s = sample_s if self.rtt_s is None else min(sample_s, 0.75 * self.rtt_s + 0.25 * sample_s)
        return []

    def _on_hello(self, hello: Hello, now_s: float) -> list[Command]:
        if self._ready:
            raise RemoteProtocolError("a second Hello on one wire")
        if hello.node != self.peer:
            raise RemoteProtocolError(f"it calls itself {hello.node!r}, its certificate says {self.peer!r}")
        if self._peer_incarnation not in (0, hello.incarnation):
            return self._broken("the peer restarted (its incarnation changed), what it had received is gone", False)
        if self._peer_epoch not in (0, hello.epoch):
            return self._broken("the peer gave the session up and opened another one", False)
        if hello.peer_incarnation == 0 and self._peer_knows_us:
            return self._broken("the peer has no memory of this session any more", False)
        if hello.peer_incarnation != 0 and (hello.peer_incarnation, hello.peer_epoch) != (
            self.incarnation,
            self.epoch,
        ):
            return self._close_wire(now_s, "the peer still holds a session with an earlier one of us")
        self._peer_incarnation, self._peer_epoch = hello.incarnation, hello.epoch
        self._peer_knows_us |= hello.peer_incarnation != 0
        self.outbox.window_bytes = hello.window_bytes
        self.outbox.acknowledge(hello.next_in, hello.delivered, hello.consumed)
        self.outbox.rewind({hello.next_in + ahead: have for ahead, have in hello.partial.items()})
        self._ready = True
        return [Ready()]

    # --- sending ----------------------------------------------------------------------------------

    def _post(self, event: Post) -> list[Command]:
        if len(event.meta) > MAX_META_BYTES or not 0 <= event.priority < NUM_PRIORITIES:
            raise LocalProtocolError(
                f"message with {len(event.meta)} bytes of meta (limit {MAX_META_BYTES}) and priority "
                f"{event.priority} (0 to {NUM_PRIORITIES - 1})"
            )
        total = sum(len(piece) for piece in event.pieces)
        if total > self.config.max_message_bytes:
            raise LocalProtocolError(
                f"message of {total} bytes to {self.peer}; the limit is {self.config.max_message_bytes} bytes"
            )
        self.outbox.post(event.meta, event.pieces, event.priority)
        return []

    def _consumed(self, event: Consumed) -> list[Command]:
        self.inbox.consume(event.num_bytes)
        return []

    def _writable(self, event: Writable) -> list[Command]:
        if not self._has_wire:
            return []
        buffers: list[Any] = self._control
        self._control = []
        if self._ready:
            if self._credit_wanted():
                self._credit_due = False
                bitmap = self.inbox.delivered_bitmap()
                buffers.append(encode_frame(Credit(self.inbox.announce(), self.inbox.next_in, bitmap)))
            if self.outbox.can_send():
                buffers += self.outbox.next_chunk(min(event.room_bytes, self.config.chunk_bytes))
        return [Write(buffers, sum(len(buffer) for buffer in buffers))] if buffers else []

    # --- time -------------------------------------------------------------------------------------

    def _tick(self, event: Tick) -> list[Command]:
        now_s, config = event.now_s, self.config
        if not self._has_wire:
            waited_s = now_s - self._wireless_since_s
            if waited_s >= config.keep_s:
                return self._broken(
                    f"no wire for {waited_s:.0f} s (kept for {config.keep_s:.0f} s): {self._wire_error}"
                )
            return []
        if now_s - self._heard_s >= config.dead_s:
            return self._close_wire(now_s, f"nothing heard from {self.peer} for {now_s - self._heard_s:.1f} s")
        self._credit_due |= self.inbox.has_news()
        if self._ready and now_s - self._pinged_s >= config.ping_s:
            self._pinged_s = now_s
            self._control.append(encode_frame(Ping(max(0, int(now_s * 1e6)))))
        return []

    def _shut(self, event: Shut) -> list[Command]:
        error = LinkClosed(f"{self.name} closed the link to {self.peer}: {event.reason}")
        return self._end(error, goodbye(event.reason, final=True))
