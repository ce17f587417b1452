"""The nouns of this room: wires, transports, addresses, shapes, statistics.

A *wire* carries an ordered stream of bytes to one authenticated peer and may break at any byte; the session
above it does not care. A *transport* makes wires. New ones join ``TRANSPORTS`` with one line. Knows nothing
of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

Buffer = bytes | bytearray | memoryview


class Receiver(Protocol):
    """The owner of a wire. Called in the loop's thread only, never after the wire was closed or aborted."""

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""

    def received(self, num_bytes: int) -> None:
        """That many bytes were written at the start of ``get_buffer()``."""

    def writable(self) -> None:
        """``room()`` is above zero again."""

    def lost(self, reason: str) -> None:
        """The wire broke or the peer ended it; said once."""


class Wire(Protocol):
    """An ordered stream of bytes to one peer."""

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver bytes."""

    def write(self, buffers: Sequence[Any]) -> None:
        """Take the buffers, in order, without copying large ones; to be called only with ``room() > 0``."""

    def room(self) -> int:
        """Bytes wanted now. 0: wait for ``receiver.writable()``."""

    def close(self) -> None:
        """Send what was written, then end. The receiver hears nothing more."""

    def abort(self) -> None:
        """End at once. The receiver hears nothing more."""


class PeerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a peer listens.

    Attributes:
        host, port: as given to ``listen``.
        dial: True: this side dials at once; False: it waits to be dialled; None: the smaller name dials, and
            the other side helps after a short while.
    """

    host: str
    port: int
    dial: bool | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LinkStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of one link since its session began; bytes are whole frames before encryption.

    ``goodput_bytes_per_s``: of payload, while any was on its way; None before it can be told.
    """

    up: bool
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int
    reconnects: int
    resent_bytes: int
    duplicates: int
    queued_bytes: int
    rtt_s: float | None
    goodput_bytes_per_s: float | None = None


#: Called for each wire that a peer dialled, with the name the peer proved.
OnWire = Callable[[Wire, str], None]


class Transport(Protocol):
    """Makes wires for one node."""

    async def listen(self, host: str, port: int, on_wire: OnWire) -> tuple[str, int]:
        """Accept wires. Returns the address bound. Raises UserError when it cannot be."""

    async def dial(self, address: PeerAddress, peer: str) -> Wire:
        """A wire to ``peer``. Raises LinkBroken when there is none or another peer answers.

        Bounded in time.
        """

    async def close(self) -> None:
        """Stop listening; end all wires, after a second those that were closed and still send."""
