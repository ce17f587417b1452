"""A node's event loop: joins a broker, takes assignments, moves tensors between the endpoint and the worker.

Never computes: all tensor work happens in `worker`'s thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import socket
from typing import Any

import msgspec

from fusionllm import __version__
from fusionllm.errors import AdmissionError, FusionError, LinkClosed, LinkError, RemoteProtocolError
from fusionllm.node.worker import Arrival, Committed, Connected, StageWorker, Stop
from fusionllm.protocol import messages as m
from fusionllm.protocol.stage import OWNER
from fusionllm.transport import Endpoint, Identity, LinkShape, PeerAddress, make_key, public_key_pem
from fusionllm.transport.control import ControlChannel, connect_control

log = logging.getLogger(__name__)
PEER_TIMEOUT_S = 60.0


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``host``: where to listen for tensors. ``advertise``: its name for others; empty: as the broker sees it."""

    ticket: m.Ticket
    name: str = ""
    fence: str = ""
    host: str = "0.0.0.0"
    port: int = 0
    advertise: str = ""


def default_name() -> str:
    """A name for this machine: its host name, made fit, and a few random characters against twins."""
    import secrets

    host = "".join(c if c.isalnum() or c in "-" else "-" for c in socket.gethostname().split(".")[0]).strip("-")
    return f"{(host or 'node')[:40]}-{secrets.token_hex(3)}"


async def join(
    channel: ControlChannel, *, role: m.Role, name: str, token: str, fence: str, versions: dict[str, str]
) -> Identity:
    """Join through an open channel; returns this machine's identity. Raises AdmissionError with the broker's reason."""
    key = make_key()
    await channel.send(
        m.Join(
            version=m.CONTROL_VERSION,
            role=role,
            name=name,
            token=token,
            public_key_pem=public_key_pem(key),
            fence=fence,
            versions=versions,
        )
    )
    answer = await channel.receive(30.0)
    if isinstance(answer, m.Refused):
        raise AdmissionError(f"the broker refused {name!r}: {answer.reason}")
    if not isinstance(answer, m.Welcome):
        raise RemoteProtocolError(f"the broker answered Join with {type(answer).__name__}")
    return Identity(cert_pem=answer.cert_pem, key_pem=key, ca_pem=answer.ca_pem)


def endpoint_peers(peers: dict[str, m.Peer]) -> dict[str, PeerAddress | None]:
    """The peers of a job as the endpoint wants them."""
    return {name: PeerAddress(peer.host, peer.port) for name, peer in peers.items()}


def shape_links(endpoint: Endpoint, peers: dict[str, m.Peer]) -> None:
    """Pace the links that the job wants paced."""
    for name, peer in peers.items():
        shape = peer.shape
        endpoint.shape(name, LinkShape(shape.bandwidth_bytes_per_s, shape.latency_s) if shape is not None else None)


class NodeAgent:
    """One node process. ``run`` returns when the broker goes away or the task is cancelled."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.name = config.name or default_name()
        self._worker: StageWorker | None = None
        self._connecting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with connect_control(self.config.ticket) as channel:
            self._channel = channel
            versions = {"fusionllm": __version__, "python": platform.python_version()}
            identity = await join(
                channel,
                role="node",
                name=self.name,
                token=self.config.ticket.token,
                fence=self.config.fence,
                versions=versions,
            )
            self._endpoint = Endpoint(
                self.name, identity, on_message=self._on_message, on_peer_lost=self._on_peer_lost, admit=self._admit
            )
            try:
                _, port = await self._endpoint.listen(self.config.host, self.config.port)
                await channel.send(m.Listening(host=self.config.advertise, port=port))
                log.info("joined; listening for tensors on port %d", port)
                await self._serve(channel)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(channel.send(m.Leave(reason="stopped by its user")), 2.0)
                raise
            finally:
                self._stop_worker()
                await self._endpoint.close()

    async def _serve(self, channel: ControlChannel) -> None:
        while True:
            try:
                message = await channel.receive()
            except LinkClosed:
                log.info("the broker closed the connection")
                return
            if isinstance(message, m.Assign):
                self._begin(message)
            elif isinstance(message, m.Commit):
                if self._worker is not None and self._worker.assign.job == message.job:
                    self._worker.events.put(Committed(message.seq, message.total_norm))
            elif isinstance(message, m.EndJob):
                if self._worker is not None and self._worker.assign.job == message.job:
                    log.info("%s ended%s", message.job, f": {message.reason}" if message.reason else "")
                    self._stop_worker()
            elif isinstance(message, m.Refused):
                raise AdmissionError(message.reason)
            else:
                raise RemoteProtocolError(f"the broker sent {type(message).__name__} to a node")

    # a job

    def _begin(self, assign: m.Assign) -> None:
        self._stop_worker()
        try:
            worker = StageWorker(assign, self._endpoint, self._loop, self._tell)
        except FusionError as error:
            self._tell(m.StageFailed(job=assign.job, stage_index=assign.stage_index, message=str(error)))
            return
        self._worker = worker
        self._stage_of = {name: i for i, name in enumerate(assign.stage_nodes)} | {assign.owner: OWNER}
        self._endpoint.expect(endpoint_peers(assign.peers))
        shape_links(self._endpoint, assign.peers)
        worker.start()
        self._connecting = asyncio.ensure_future(self._connect(worker))
        log.info(
            "%s: stage %d of %d, %d operators",
            assign.job,
            assign.stage_index,
            len(assign.stage_nodes),
            len(worker.graph.ops),
        )

    async def _connect(self, worker: StageWorker) -> None:
        try:
            await asyncio.gather(*(self._endpoint.connect(peer, PEER_TIMEOUT_S) for peer in worker.assign.peers))
        except FusionError as error:
            assign = worker.assign
            self._tell(m.StageFailed(job=assign.job, stage_index=assign.stage_index, message=str(error)))
        else:
            worker.events.put(Connected())

    def _stop_worker(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._worker is not None:
            self._worker.events.put(Stop())
            self._worker = None
            self._endpoint.expect({})

    def _tell(self, message: Any) -> None:
        """Send a control message; from any thread."""

        def post() -> None:
            out = message
            if isinstance(message, m.StageDone):
                sent = {peer: stats.bytes_sent for peer, stats in self._endpoint.stats().items()}
                out = msgspec.structs.replace(message, sent_bytes=sent)
            task = asyncio.ensure_future(self._channel.send(out))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())

        self._loop.call_soon_threadsafe(post)

    # the data plane

    def _admit(self, peer: str, meta: bytes, num_bytes: int) -> None:
        worker = self._worker
        if worker is None:
            raise RemoteProtocolError(f"{peer} sent a tensor while no job runs here")
        header = m.decode_header(bytes(meta))
        if header.job == worker.assign.job:
            worker.admit(self._stage_of[peer], header, num_bytes)

    def _on_message(self, peer: str, meta: bytes, payload: bytearray) -> None:
        worker = self._worker
        header = m.decode_header(bytes(meta))
        if worker is None or header.job != worker.assign.job:
            self._endpoint.consumed(peer, len(payload))
            return
        worker.events.put(Arrival(peer, self._stage_of[peer], header, payload))

    def _on_peer_lost(self, peer: str, error: LinkError) -> None:
        worker = self._worker
        if worker is not None and peer in worker.assign.peers:
            assign = worker.assign
            self._tell(
                m.StageFailed(
                    job=assign.job, stage_index=assign.stage_index, message=f"the link to {peer} ended: {error}"
                )
            )
