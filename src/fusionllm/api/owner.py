"""The owner's connection to a job: one thread with an event loop, so that the caller's thread may compute.

Joins the broker as an owner, submits a graph, sends tensors to the stages, and puts what comes back into one queue.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from fusionllm.api.loop import LoopThread
from fusionllm.errors import FusionError, LinkError, NodeLost, RemoteProtocolError, StallError
from fusionllm.node.join import PEER_TIMEOUT_S, default_name, expect_peers, join_broker, reach_peers
from fusionllm.protocol import messages as m
from fusionllm.transport import Endpoint
from fusionllm.transport.control import connect_control

log = logging.getLogger(__name__)
T = TypeVar("T")
CONNECT_TIMEOUT_S = 60.0
#: How often a wait for nodes is told again.
REMIND_S = 30.0


class Received(msgspec.Struct, frozen=True):
    """A tensor from a stage."""

    stage_index: int
    header: m.TensorHeader
    payload: bytearray


class OwnerLink:
    """The owner's end of everything. All methods are for one calling thread.

    Args:
        host: where to listen for tensors.
        check: called during every wait; raises to end it, for one when a node process has died.
    """

    def __init__(
        self, ticket: m.Ticket, fence: str = "", host: str = "0.0.0.0", check: Callable[[], None] = lambda: None
    ) -> None:
        self._ticket, self._fence, self._host, self._check = ticket, fence, host, check
        self.name = f"owner-{secrets.token_hex(3)}" if fence else default_name()
        self._events: queue.SimpleQueue[Received | m.Commit] = queue.SimpleQueue()
        self._control: queue.SimpleQueue[m.Control] = queue.SimpleQueue()
        self._failure: FusionError | None = None
        self._loop = LoopThread("owner-link")
        self._planned: m.Planned | None = None
        self._stage_of: dict[str, int] = {}
        self._stop: asyncio.Event | None = None

    # life

    def open(self) -> None:
        """Join the broker. Raises UserError, AdmissionError."""
        self._loop.start()
        joined: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._running = self._loop.submit(self._run(joined))
        joined.result(CONNECT_TIMEOUT_S)

    def close(self, reason: str = "") -> None:
        """End the job and leave."""
        if not self._loop.running:
            return
        if self._stop is not None and not self._running.done():
            for leaving in (self._loop.submit(self._farewell(reason)), self._running):
                try:
                    leaving.result(10.0)
                except (FusionError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
                    log.debug("leaving: %s", error)
        self._loop.close()

    async def _farewell(self, reason: str) -> None:
        assert self._stop is not None
        try:
            if self._planned is not None:
                await self._channel.send(m.EndJob(job=self._planned.job, reason=reason))
            await self._channel.send(m.Leave(reason=reason or "done"))
        finally:  # with the broker gone there is nobody to say it to
            self._stop.set()

    async def _run(self, joined: concurrent.futures.Future[None]) -> None:
        try:
            async with connect_control(self._ticket) as channel:
                self._channel = channel
                self._stop = asyncio.Event()
                identity = await join_broker(
                    channel, role="owner", name=self.name, token=self._ticket.token, fence=self._fence
                )
                self._endpoint = Endpoint(
                    self.name, identity, on_message=self._on_message, on_peer_lost=self._on_peer_lost, admit=self._admit
                )
                _, port = await self._endpoint.listen(self._host, 0)
                await channel.send(m.Listening(host="", port=port))
                joined.set_result(None)
                reader = asyncio.ensure_future(self._read())
                try:
                    await self._stop.wait()
                finally:
                    reader.cancel()
                    await self._endpoint.close()
        except BaseException as error:
            if not joined.done():
                joined.set_exception(error)
            elif isinstance(error, FusionError):
                self._fail(error)
            else:
                raise

    async def _read(self) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except FusionError as error:
                self._fail(error)
                return
            if isinstance(message, m.Commit):
                self._events.put(message)
            elif isinstance(message, (m.JobFailed, m.Refused)):
                self._fail(FusionError(message.reason), explains=True)
            else:
                self._control.put(message)

    def _fail(self, error: FusionError, *, explains: bool = False) -> None:
        """Keep the first; one that explains stands above a link, which may have closed since the job ended."""
        if self._failure is None or (explains and isinstance(self._failure, NodeLost)):
            self._failure = error

    # a job

    def submit(
        self, graph: bytes, options: m.JobOptions, timeout_s: float, on_waiting: Callable[[m.Waiting, float], None]
    ) -> m.Planned:
        """Hand in the graph, wait for nodes and the plan, and reach all stages. Raises StallError, FusionError.

        ``on_waiting`` is called with the broker's news and the seconds left when they come, and every `REMIND_S` again.
        """
        self._call(self._channel.send(m.Submit(graph=graph, options=options)))
        started_s = time.monotonic()
        news: m.Waiting | None = None

        def remind(left_s: float) -> None:
            if news is not None:
                on_waiting(news, left_s)

        while True:
            idle = news.idle if news is not None else 0
            if idle < options.num_stages:
                what = f"{options.num_stages} nodes, {idle} are idle; start more or raise cluster.join_timeout_s"
            else:
                what = "the broker to measure and plan; raise cluster.join_timeout_s"
            message = self._next(self._control, timeout_s, what, since_s=started_s, remind=remind)
            if isinstance(message, m.Planned):
                break
            if not isinstance(message, m.Waiting):
                raise RemoteProtocolError(f"the broker sent {type(message).__name__} instead of a plan")
            news = message
            if news.idle < news.needed:  # that all are here is told when planning takes long
                remind(started_s + timeout_s - time.monotonic())
        self._planned = message
        self._stage_of = {stage.node: stage.stage_index for stage in message.plan.stages}
        self._call(self._connect(message), PEER_TIMEOUT_S + 5)
        return message

    async def _connect(self, planned: m.Planned) -> None:
        expect_peers(self._endpoint, planned.peers)
        await reach_peers(self._endpoint, planned.peers)

    def wait_start(self, timeout_s: float) -> None:
        """Wait until every stage holds its weights. Raises StallError, FusionError."""
        message = self._next(self._control, timeout_s, "all stages to hold their weights")
        if not isinstance(message, m.Start):
            raise RemoteProtocolError(f"the broker sent {type(message).__name__} instead of Start")

    def send(self, stage_index: int, header: m.TensorHeader, payload: Any, priority: int) -> None:
        """Send to a stage; waits while too much is queued. Raises FusionError when the job failed."""
        assert self._planned is not None
        node = self._planned.plan.stages[stage_index].node
        self._call(self._endpoint.send(node, m.encode_message(header), payload, priority), 600.0, f"{node} to read")

    def next_event(self, timeout_s: float, what: str) -> Received | m.Commit:
        """The next thing that came back. Raises StallError after ``timeout_s``, FusionError when the job failed."""
        event = self._next(self._events, timeout_s, what)
        if isinstance(event, Received):
            name = self._planned.plan.stages[event.stage_index].node if self._planned else ""
            self._endpoint.consumed_threadsafe(name, len(event.payload))
        return event

    def sent_bytes(self) -> dict[str, int]:
        """Bytes sent to each node since the start."""

        async def read() -> dict[str, int]:
            return {peer: stats.bytes_sent for peer, stats in self._endpoint.stats().items()}

        return self._call(read())

    def _next(
        self, source: queue.SimpleQueue[T], timeout_s: float, what: str, *,
        since_s: float | None = None, remind: Callable[[float], None] = lambda left_s: None,
    ) -> T:  # fmt: skip
        """The next of a queue, within ``timeout_s`` of ``since_s`` or now; ``remind`` is told the seconds left."""
        deadline = (time.monotonic() if since_s is None else since_s) + timeout_s
        remind_s = time.monotonic() + REMIND_S
        while True:
            try:
                return source.get(timeout=0.2)
            except queue.Empty:
                self._raise_failure()
                now_s = time.monotonic()
                if now_s > deadline:
                    raise StallError(f"the owner has waited {timeout_s:.0f} s for {what}") from None
                if now_s > remind_s:
                    remind(deadline - now_s)
                    remind_s = now_s + REMIND_S

    def _raise_failure(self) -> None:
        """Raise what went wrong, if anything did. A dead node process explains more than the links it left behind."""
        self._check()
        if self._failure is not None:
            for _ in range(10):  # a killed process closes its sockets a moment before its parent can know
                time.sleep(0.1)
                self._check()
            raise self._failure from None

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 60.0, what: str = "the network") -> T:
        future = self._loop.submit(coroutine)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return future.result(0.5)
            except concurrent.futures.TimeoutError:
                if future.done():
                    return future.result()
                if self._failure is not None or time.monotonic() > deadline:
                    future.cancel()
                    self._raise_failure()
                    raise StallError(f"the owner has waited {timeout_s:.0f} s for {what}") from None
            except LinkError:
                self._raise_failure()
                raise

    # the data plane, in the loop's thread

    def _admit(self, peer: str, meta: bytes, num_bytes: int) -> None:
        header = m.decode_header(bytes(meta))
        if peer not in self._stage_of or header.kind not in ("output", "weight", "optimizer", "codec", "done", "want"):
            raise RemoteProtocolError(f"{peer} sent an unexpected {header.kind}")
        limit = {"output": 64, "done": 64, "want": m.MAX_OFFER_BYTES}.get(header.kind, num_bytes)
        if num_bytes > limit:
            raise RemoteProtocolError(f"{peer} sent {num_bytes} bytes of {header.kind}")

    def _on_message(self, peer: str, meta: bytes, payload: bytearray) -> None:
        self._events.put(Received(self._stage_of[peer], m.decode_header(bytes(meta)), payload))

    def _on_peer_lost(self, peer: str, error: LinkError) -> None:
        self._fail(NodeLost(peer, str(error)))
