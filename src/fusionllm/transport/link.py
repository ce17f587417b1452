"""One peer's link: performs the commands of its session on whatever wire there is, and sees to it that there
is one.

The shell around ``protocol.session``: it has the loop, the clock, the timers and the dialling. Runs in the
loop's thread only. Knows nothing of certificates, nor of what messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import msgspec

from fusionllm.errors import FusionError, LinkBroken, LinkError
from fusionllm.protocol import session as machine
from fusionllm.protocol.messages import LinkShape
from fusionllm.protocol.session import Command, Event, Session
from fusionllm.transport.goodput import Goodput
from fusionllm.transport.shaped import ShapedWire
from fusionllm.transport.wire import LinkStats, PeerAddress, Transport, Wire

log = logging.getLogger(__name__)

_TICK_S = 0.25
_BACKOFF_S = (0.2, 2.0)
#: The larger name lets the smaller one dial for this long before it dials too.
_GRACE_S = 1.0
#: Two wires dialled from both ends within this time are one race, won by the one the smaller name dialled.
_RACE_S = 5.0
_CHUNKS_PER_TURN = 8


class Owner(msgspec.Struct, frozen=True):
    """Where a link reports to."""

    on_message: Callable[[str, bytes, bytearray], None]
    on_end: Callable[[str, LinkError], None]


class Link:
    """The link to ``session.peer``.

    Args:
        address: where the peer listens, None if only it can dial.
        shape: pacing of outgoing bytes.
    """

    def __init__(
        self, session: Session, address: PeerAddress | None, transport: Transport, owner: Owner,
        shape: LinkShape | None,
    ) -> None:  # fmt: skip
        self.session, self.address, self.shape = session, address, shape
        self.last_error = "nothing was tried yet" if address else "no address is known, it must dial us"
        self._transport, self._owner = transport, owner
        self._loop = asyncio.get_running_loop()
        self._wire: ShapedWire | None = None
        self._dialled_by = ""
        self._attached_s = 0.0
        self._pumping = False
        self._was_ready = False
        self._bytes_sent = self._bytes_received = 0
        self._goodput = Goodput()
        self._waiters: set[asyncio.Future[None]] = set()
        self._wireless = asyncio.Event()
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        self._dialler: asyncio.Task[None] | None = None
        self.readdress(address)

    # --- for the endpoint -------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Pass an event to the session, perform its commands, and write soon if it wants to."""
        commands = self.session.handle(event)
        if isinstance(event, machine.Post):
            self._goodput.queued(self._loop.time())
        if commands:
            self._perform(commands)
        if not self._pumping and self._wire is not None and self.session.wants_write:
            self._pump_soon()

    async def wait(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for a condition that changes when bytes arrive or the link ends.

        Returns False at the deadline.
        """
        deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        while not condition():
            woken: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(woken)
            try:
                await asyncio.wait_for(woken, None if deadline_s is None else deadline_s - self._loop.time())
            except asyncio.TimeoutError:
                return condition()
            finally:
                self._waiters.discard(woken)
        return True

    def offer(self, wire: Wire, dialled_by: str) -> None:
        """Take a new wire to the peer, unless it lost a race."""
        ours, peer = self.session.name, self.session.peer
        raced = self._wire is not None and dialled_by != self._dialled_by
        if raced and self._loop.time() - self._attached_s < _RACE_S and dialled_by != min(ours, peer):
            wire.abort()
            return
        if self._wire is not None:
            self._wire.abort()
            self._lose("replaced by a newer wire")
        self._wire = ShapedWire(wire, self.shape)
        self._dialled_by, self._attached_s = dialled_by, self._loop.time()
        self.handle(machine.WireUp(self._attached_s))
        self._wire.start(self)
        self._pump()

    def readdress(self, address: PeerAddress | None) -> None:
        """Dial there from now on; a wire that is up stays."""
        self.address = address
        if self._dialler is None and address is not None and address.dial is not False:
            self._dialler = self._loop.create_task(self._keep_dialling())

    def reshape(self, shape: LinkShape | None) -> None:
        self.shape = shape
        if self._wire is not None:
            self._wire.shape = shape
            self._pump()

    def shut(self, reason: str) -> None:
        """End on purpose; the owner is not told."""
        self._owner = Owner(self._owner.on_message, lambda peer, error: None)
        self.handle(machine.Shut(reason))

    def abort_wire(self) -> None:
        """Break the current wire without a word, as a failing network would."""
        if self._wire is not None:
            self._wire.abort()
            self._lose("aborted here")

    def stats(self) -> LinkStats:
        session = self.session
        return LinkStats(
            up=session.ready, bytes_sent=self._bytes_sent, bytes_received=self._bytes_received,
            messages_sent=session.outbox.messages_delivered,
            messages_received=session.inbox.messages_received,
            reconnects=max(0, session.wires - 1), resent_bytes=session.outbox.resent_bytes,
            duplicates=session.inbox.duplicates, queued_bytes=session.outbox.queued_bytes,
            rtt_s=session.rtt_s,
            goodput_bytes_per_s=self._goodput.bytes_per_s(session.rtt_s or 0.0),
        )  # fmt: skip

    # --- as the receiver of the wire --------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        return self.session.get_buffer()

    def received(self, num_bytes: int) -> None:
        self._bytes_received += num_bytes
        outbox, now_s = self.session.outbox, self._loop.time()
        delivered, queued_bytes = outbox.messages_delivered, outbox.queued_bytes
        commands = self.session.handle(machine.Received(num_bytes, now_s))
        if outbox.messages_delivered != delivered:
            self._goodput.delivered(now_s, queued_bytes - outbox.queued_bytes, more=len(outbox) > 0)
        if commands:
            self._perform(commands)
        if not self._pumping and self._wire is not None:
            self._pump_soon()  # once for all that came in together
        if self._waiters and outbox.messages_delivered != delivered:
            self._wake_waiters()

    def writable(self) -> None:
        self._pump()

    def lost(self, reason: str) -> None:
        if self._wire is not None:
            self._lose(reason)

    # --- inside -----------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._pumping = False
        for _ in range(_CHUNKS_PER_TURN):
            wire = self._wire
            if wire is None or not self.session.wants_write or not (room_bytes := wire.room()):
                return
            self._perform(self.session.handle(machine.Writable(room_bytes, self._loop.time())))
        if not self._pumping:
            self._pump_soon()

    def _pump_soon(self) -> None:
        self._pumping = True
        self._loop.call_soon(self._pump)

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, machine.Write):
                if self._wire is not None:
                    self._bytes_sent += command.num_bytes
                    self._wire.write(command.buffers)
            elif isinstance(command, machine.Deliver):
                self._deliver(command)
            elif isinstance(command, machine.Ready):
                self._was_ready = True
                self._wake_waiters()
            elif isinstance(command, machine.CloseWire):
                level = logging.WARNING if command.reason != self.last_error else logging.DEBUG
                log.log(level, "%s: wire to %s closed: %s", self.session.name, self.session.peer, command.reason)
                self._close_wire(command.farewell, command.reason)
            else:
                self._finish(command.error, command.farewell)

    def _deliver(self, message: machine.Deliver) -> None:
        try:
            self._owner.on_message(self.session.peer, message.meta, message.payload)
        except Exception as error:
            what = f"{error}" if isinstance(error, FusionError) else f"{type(error).__name__}: {error}"
            log.exception("%s: a message from %s could not be handled", self.session.name, self.session.peer)
            reason = f"a message could not be handled: {what}"
            for command in self.session.handle(machine.Shut(reason)):
                assert isinstance(command, machine.End)
                broken = LinkBroken(f"{self.session.name}: link to {self.session.peer} given up: {reason}")
                self._finish(broken, command.farewell)

    def _finish(self, error: LinkError, farewell: bytes) -> None:
        self._close_wire(farewell, str(error))
        self._ticker.cancel()
        if self._dialler is not None:
            self._dialler.cancel()
        self._wake_waiters()
        self._owner.on_end(self.session.peer, error)

    def _close_wire(self, farewell: bytes, reason: str) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            if farewell:
                wire.write([farewell])
            wire.close()
        self.last_error = reason
        self._wireless.set()

    def _lose(self, reason: str) -> None:
        self._wire = None
        self.last_error = reason
        self.handle(machine.WireLost(self._loop.time(), reason))
        self._wireless.set()

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        self.handle(machine.Tick(self._loop.time()))

    async def _wait_until_wireless(self) -> bool:
        """Wait while there is a wire (the heartbeat bounds that). Returns whether there was one."""
        had_wire = self._wire is not None
        while self._wire is not None:
            self._wireless.clear()
            await self._wireless.wait()
        return had_wire

    async def _keep_dialling(self) -> None:
        peer_is_smaller = self.session.peer < self.session.name
        backoff_s, wait_s = _BACKOFF_S[0], 0.0
        while True:
            if await self._wait_until_wireless() and self._was_ready:
                backoff_s, self._was_ready = _BACKOFF_S[0], False
                wait_s = backoff_s
            patient = peer_is_smaller and not (self.address and self.address.dial)
            await asyncio.sleep(patient * _GRACE_S + wait_s * (0.5 + random.random()))
            address = self.address
            if await self._wait_until_wireless() or address is None:
                wait_s = backoff_s
                continue
            wait_s, backoff_s = backoff_s, min(backoff_s * 2, _BACKOFF_S[1])
            try:
                self.offer(await self._transport.dial(address, self.session.peer), self.session.name)
            except LinkError as error:
                if str(error) != self.last_error:
                    log.warning("%s: %s", self.session.name, error)
                self.last_error = str(error)
                if self._wire is None:
                    self.handle(machine.WireLost(self._loop.time(), self.last_error))
