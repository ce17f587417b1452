"""What goes into a session machine and what comes out: its limits, events and commands. See ``session``."""

from __future__ import annotations

from typing import Any

import msgspec

from fusionllm.errors import LinkError
from fusionllm.protocol.frames import MAX_CHUNK_BYTES
from fusionllm.units import GIB, MIB

NUM_PRIORITIES = 16


class SessionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a session.

    Attributes:
        chunk_bytes: largest frame sent, 4 KiB to 256 KiB; a more urgent message waits for at most one.
        window_bytes: received payload the application may leave unconsumed; at least two bandwidth-delay
            products.
        max_message_bytes: largest message accepted or sent.
        max_queue_bytes: payload queued for a peer beyond which ``send`` waits and ``send_nowait`` refuses.
        recycle_bytes: memory of delivered messages kept per peer to be used again.
        keep_s: how long a session outlives its last wire.
        ping_s, dead_s: heartbeat period, and silence after which a wire is given up.
    """

    chunk_bytes: int = MAX_CHUNK_BYTES
    window_bytes: int = 64 * MIB
    max_message_bytes: int = GIB
    max_queue_bytes: int = 256 * MIB
    recycle_bytes: int = 64 * MIB
    keep_s: float = 120.0
    ping_s: float = 2.0
    dead_s: float = 8.0


class WireUp(msgspec.Struct, frozen=True):
    """A fresh wire to the peer; replaces any earlier one."""

    now_s: float


class WireLost(msgspec.Struct, frozen=True):
    now_s: float
    reason: str


class Received(msgspec.Struct, frozen=True):
    """``num_bytes`` of the stream were written at the start of ``get_buffer()``."""

    num_bytes: int
    now_s: float


class Writable(msgspec.Struct, frozen=True):
    """The wire takes ``room_bytes`` now."""

    room_bytes: int
    now_s: float


class Tick(msgspec.Struct, frozen=True):
    """Time passes; to be sent a few times per second."""

    now_s: float


class Post(msgspec.Struct, frozen=True):
    """Send a message. Priority 0 (most urgent) to 15; the payload must not change until it is delivered."""

    meta: bytes
    pieces: tuple[memoryview, ...]
    priority: int


class Consumed(msgspec.Struct, frozen=True):
    """The application is done with ``num_bytes`` of delivered payload."""

    num_bytes: int


class Shut(msgspec.Struct, frozen=True):
    """Close the session on purpose."""

    reason: str


Event = WireUp | WireLost | Received | Writable | Tick | Post | Consumed | Shut


class Write(msgspec.Struct, frozen=True):
    """Write the buffers, in order."""

    buffers: list[Any]
    num_bytes: int


class Deliver(msgspec.Struct, frozen=True):
    meta: bytes
    payload: bytearray


class Ready(msgspec.Struct, frozen=True):
    """The peer's Hello was accepted on the current wire."""


class CloseWire(msgspec.Struct, frozen=True):
    """Write ``farewell``, then close the wire; the session lives on."""

    reason: str
    farewell: bytes = b""


class End(msgspec.Struct, frozen=True):
    """The session is over: write ``farewell`` if there is a wire, close it, tell the owner."""

    error: LinkError
    farewell: bytes = b""


Command = Write | Deliver | Ready | CloseWire | End
