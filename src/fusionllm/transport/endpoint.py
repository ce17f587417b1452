"""A node's end of the data plane: messages to and from named peers, each delivered exactly once.

One per process, in an asyncio loop that never computes tensors. It keeps one ``Link`` per expected peer,
accepts and dials wires through a transport, and refuses whoever is not expected. Knows nothing of what
messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from fusionllm.errors import LinkBroken, LinkClosed, LinkError, LocalProtocolError, StallError
from fusionllm.protocol.frames import goodbye
from fusionllm.protocol.messages import LinkShape
from fusionllm.protocol.session import Consumed, Post, Session, SessionConfig
from fusionllm.transport.link import Link, Owner
from fusionllm.transport.memory import MemoryTransport
from fusionllm.transport.tls import Identity, check_node_name
from fusionllm.transport.tls_transport import TlsTransport
from fusionllm.transport.wire import Buffer, LinkStats, PeerAddress, Transport, Wire

log = logging.getLogger(__name__)

#: How wires are made, by name: (node name, identity) -> transport.
TRANSPORTS: dict[str, Callable[[str, Identity], Transport]] = {
    "tls": lambda name, identity: TlsTransport(identity),
    "memory": lambda name, identity: MemoryTransport(name),
}

OnMessage = Callable[[str, bytes, bytearray], None]
OnPeerLost = Callable[[str, LinkError], None]
AdmitMessage = Callable[[str, bytes, int], None]


class Endpoint:
    """Sends and receives messages under one node name.

    All methods belong to the loop's thread, except those called ``*_threadsafe``.

    Args:
        name: this node; with TLS the name in its certificate.
        identity: its certificate, key and authority.
        on_message: called in the loop with (peer, meta, payload) when a message has arrived whole; must be
            quick. Call ``consumed(peer, len(payload))`` once the payload is used up, or the peer will stop
            sending.
        on_peer_lost: called once with (peer, error) when a session ends by itself; ``expect`` again to start
            anew.
        admit: called with (peer, meta, total bytes) before memory for a message is taken; raises
            RemoteProtocolError to refuse it, which closes the wire.
        incarnation: identifies this process to its peers; random by default.
        transport: a name of ``TRANSPORTS``, or a transport.
    """

    def __init__(
        self, name: str, identity: Identity, *, on_message: OnMessage, on_peer_lost: OnPeerLost,
        config: SessionConfig | None = None, admit: AdmitMessage | None = None,
        incarnation: int | None = None, transport: str | Transport = "tls",
    ) -> None:  # fmt: skip
        self.name = check_node_name(name)
        self.config = config or SessionConfig()
        self.incarnation = incarnation or secrets.randbits(62) + 1
        self._on_message, self._on_peer_lost, self._admit = on_message, on_peer_lost, admit
        if isinstance(transport, str):
            if transport not in TRANSPORTS:
                raise LocalProtocolError(f"no transport {transport!r}; known: {', '.join(sorted(TRANSPORTS))}")
            transport = TRANSPORTS[transport](name, identity)
        self._transport = transport
        self._links: dict[str, Link] = {}
        self._epochs: dict[str, int] = {}
        self._shapes: dict[str, LinkShape] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Accept peers. Returns (host, port) as bound; port 0 takes a free one.

        Raises UserError if it is in use.
        """
        self._loop = asyncio.get_running_loop()
        return await self._transport.listen(host, port, self._accept)

    def expect(self, peers: Mapping[str, PeerAddress | None]) -> None:
        """Set who may talk to us; links to all others are closed, everyone else is refused.

        The smaller name dials at once, the larger one after a second in vain; a side without the other's
        address (None) waits to be dialled, see ``PeerAddress.dial``. A peer whose session ended gets a new
        one. A running session stays; a new address counts when it has to be dialled again.
        """
        self._loop = asyncio.get_running_loop()
        for peer in [peer for peer in self._links if peer not in peers]:
            self._links.pop(peer).shut(f"{peer} is not expected by {self.name} any more")
        for peer, address in peers.items():
            link = self._links.get(peer)
            if link is None or link.session.ended is not None:
                self._links[peer] = self._open(check_node_name(peer), address)
            elif link.address != address:
                link.readdress(address)

    async def connect(self, peer: str, timeout_s: float) -> None:
        """Wait until a session with ``peer`` is up.

        Raises:
            LinkBroken: not within ``timeout_s``, or the session ended; names both sides, the address and the
                cause.
        """
        link = self._link(peer)
        await link.wait(lambda: link.session.ready or link.session.ended is not None, timeout_s)
        if link.session.ended is not None:
            raise link.session.ended
        if not link.session.ready:
            where = f"at {link.address}" if link.address else "(no address: it must dial us)"
            raise LinkBroken(f"{self.name} got no link to {peer} {where} within {timeout_s:g} s: {link.last_error}")

    def send_nowait(self, peer: str, meta: bytes, payload: Buffer | Sequence[Buffer], priority: int = 1) -> None:
        """Queue a message. The payload is not copied: it must not change until it is delivered.

        Args:
            meta: at most 4048 bytes, given to the peer's ``on_message`` and ``admit``.
            payload: contiguous buffers, joined at the receiver; may be empty.
            priority: 0 (most urgent) to 15.

        Raises:
            LinkError: the session ended, or ``max_queue_bytes`` would be exceeded.
        """
        link, pieces = self._live(peer), _views(payload)
        num_bytes = sum(len(piece) for piece in pieces)
        queued_bytes = link.session.outbox.queued_bytes
        if queued_bytes and queued_bytes + num_bytes > self.config.max_queue_bytes:
            raise LinkError(
                f"{queued_bytes} bytes are queued for {peer}, {num_bytes} more exceed the limit of "
                f"{self.config.max_queue_bytes}; await send() instead, or raise max_queue_bytes"
            )
        link.handle(Post(meta, pieces, priority))

    async def send(self, peer: str, meta: bytes, payload: Buffer | Sequence[Buffer], priority: int = 1) -> None:
        """Like ``send_nowait``, but waits while the queue is over its limit, as long as the link lives."""
        link, pieces = self._live(peer), _views(payload)
        num_bytes, limit = sum(len(piece) for piece in pieces), self.config.max_queue_bytes
        outbox = link.session.outbox
        await link.wait(
            lambda: (
                not outbox.queued_bytes or outbox.queued_bytes + num_bytes <= limit or link.session.ended is not None
            ),
            None,
        )
        self.send_nowait(peer, meta, pieces, priority)

    def consumed(self, peer: str, num_bytes: int) -> None:
        """The owner is done with ``num_bytes`` of payload from ``peer``, who may send as much again."""
        link = self._links.get(peer)
        if link is not None and link.session.ended is None:
            link.handle(Consumed(num_bytes))

    def consumed_threadsafe(self, peer: str, num_bytes: int) -> None:
        """``consumed`` from any thread."""
        self._threadsafe(partial(self.consumed, peer, num_bytes))

    def send_threadsafe(self, peer: str, meta: bytes, payload: Buffer | Sequence[Buffer], priority: int = 1) -> None:
        """``send_nowait`` from any thread; a refusal is logged, ``on_peer_lost`` tells of a lost link."""
        self._threadsafe(partial(self._send_or_log, peer, meta, payload, priority))

    def shape(self, peer: str, shape: LinkShape | None) -> None:
        """Pace outgoing bytes to ``peer`` from now on; None: as fast as it goes."""
        if shape is not None and (shape.bandwidth_bytes_per_s <= 0 or shape.latency_s < 0):
            raise LocalProtocolError(f"link shape {shape}: the bandwidth must be above 0, the latency at least 0")
        self._shapes.pop(peer, None)
        if shape is not None:
            self._shapes[peer] = shape
        if peer in self._links:
            self._links[peer].reshape(shape)

    def stats(self) -> dict[str, LinkStats]:
        """Counters per expected peer."""
        return {peer: link.stats() for peer, link in self._links.items()}

    def abort_wires(self) -> None:
        """Break every wire without a word, as a failing network would; sessions resume.

        For tests and fault drills.
        """
        for link in self._links.values():
            link.abort_wire()

    async def drain(self, timeout_s: float) -> None:
        """Wait until all peers have received all messages.

        Raises StallError naming those that have not, LinkError.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        for peer, link in list(self._links.items()):
            outbox, session = link.session.outbox, link.session
            left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
            await link.wait(lambda o=outbox, s=session: not len(o) or s.ended is not None, left_s)  # type: ignore[misc]
            if len(outbox) and session.ended is not None:
                raise session.ended
            if len(outbox):
                raise StallError(
                    f"{self.name} waits for {peer} to take {len(outbox)} messages "
                    f"({outbox.queued_bytes} bytes) since {timeout_s:g} s; "
                    f"link {'up' if session.ready else 'down: ' + link.last_error}"
                )

    async def close(self) -> None:
        """Tell all peers goodbye and end; what is still queued is dropped (``drain`` first).

        Takes two seconds at most.
        """
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            link.shut(f"{self.name} is closing")
        await self._transport.close()

    # --- inside -----------------------------------------------------------------------------------

    def _open(self, peer: str, address: PeerAddress | None) -> Link:
        assert self._loop is not None
        epoch = self._epochs[peer] = self._epochs.get(peer, 0) + 1
        admit = None if self._admit is None else partial(self._admit, peer)
        session = Session(self.name, peer, self.incarnation, epoch, self.config, self._loop.time(), admit)
        owner = Owner(self._on_message, self._on_peer_lost)
        return Link(session, address, self._transport, owner, self._shapes.get(peer))

    def _accept(self, wire: Wire, peer: str) -> None:
        link = self._links.get(peer)
        if link is not None and link.session.ended is None and not self._closed:
            link.offer(wire, peer)
            return
        known = ", ".join(sorted(self._links)) or "nobody"
        why = f"its session ended: {link.session.ended}" if link is not None else f"expected are {known}"
        log.warning("%s refused a connection from %s: %s", self.name, peer, why)
        wire.write([goodbye(f"{self.name} does not expect {peer} now", final=False)])
        wire.close()

    def _link(self, peer: str) -> Link:
        if peer not in self._links:
            known = ", ".join(sorted(self._links)) or "nobody"
            raise LinkClosed(f"{self.name} expects no peer {peer!r}; expected are {known}")
        return self._links[peer]

    def _live(self, peer: str) -> Link:
        link = self._link(peer)
        if link.session.ended is not None:
            raise link.session.ended
        return link

    def _send_or_log(self, peer: str, meta: bytes, payload: Buffer | Sequence[Buffer], priority: int) -> None:
        try:
            self.send_nowait(peer, meta, payload, priority)
        except LinkError as error:
            log.warning("%s: a message to %s was not sent: %s", self.name, peer, error)

    def _threadsafe(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            raise LocalProtocolError("the endpoint is not running yet: listen() or expect() first")
        self._loop.call_soon_threadsafe(call)


def _views(payload: Buffer | Sequence[Buffer]) -> tuple[memoryview, ...]:
    """Byte views of the non-empty buffers."""
    many = isinstance(payload, (list, tuple))
    buffers = cast("Sequence[Buffer]", payload if many else [payload])
    views = [memoryview(buffer) for buffer in buffers]
    return tuple(view.cast("B") for view in views if view.nbytes)
