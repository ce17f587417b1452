"""A node's event loop: joins a broker, takes assignments, moves tensors between the endpoint and the worker.

Never computes: all tensor work happens in `worker`'s thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

import msgspec

from fusionllm.compute import choose_backend, warm_up
from fusionllm.errors import AdmissionError, FusionError, LinkClosed, LinkError, RemoteProtocolError
from fusionllm.ir.ops import allowed_ops
from fusionllm.node.codecs import can_compress
from fusionllm.node.join import default_name, expect_peers, join_broker, reach_peers
from fusionllm.node.operators import import_operators
from fusionllm.node.options import NodeConfig
from fusionllm.node.probe import check_probe, let_in, link_profiles, measure_device, measure_link
from fusionllm.node.worker import Arrival, Committed, Connected, StageWorker, Stop
from fusionllm.protocol import messages as m
from fusionllm.protocol.stage import OWNER
from fusionllm.transport import Endpoint
from fusionllm.transport.control import ControlChannel, connect_control

log = logging.getLogger(__name__)

#: How long a stage may take to come to the end of what it computes when the node leaves.
STOP_TIMEOUT_S = 10.0


class NodeAgent:
    """One node process. ``run`` returns when the broker goes away or the task is cancelled."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.name = config.name or default_name()
        self.backend = choose_backend(config.backend)
        self._allow_ops = allowed_ops(config.allow_ops)
        self._worker: StageWorker | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._probed_by = ""

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with connect_control(self.config.ticket) as channel:
            self._channel = channel
            identity = await join_broker(
                channel, role="node", name=self.name, token=self.config.ticket.token, fence=self.config.fence,
                backend=self.backend,
            )  # fmt: skip
            self._endpoint = Endpoint(
                self.name, identity, on_message=self._on_message, on_peer_lost=self._on_peer_lost, admit=self._admit
            )
            try:
                config = self.config
                ready = await self._loop.run_in_executor(None, warm_up, self.backend, config.device)
                self._device = ready.device
                await self._loop.run_in_executor(None, import_operators, config.imports)
                _, port = await self._endpoint.listen(self.config.host, self.config.port)
                offer = m.Offer(
                    device=ready.device, operators=tuple(sorted(ready.operators | self._allow_ops)),
                    optimizers=tuple(sorted(ready.optimizers)), dtypes=tuple(sorted(ready.dtypes)),
                    codecs=can_compress(),
                )  # fmt: skip
                await channel.send(m.Listening(host=self.config.advertise, port=port, offer=offer))
                log.info(
                    "joined as process %d; computing with %s on %s, listening for tensors on port %d",
                    os.getpid(), self.backend, self._device, port,
                )  # fmt: skip
                await self._serve(channel)
            except asyncio.CancelledError:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(channel.send(m.Leave(reason="stopped by its user")), 2.0)
                raise
            finally:
                worker = self._worker
                self._stop_worker()
                await self._endpoint.close()
                if worker is not None:  # it posts to this loop until it has read that it is to stop
                    await self._loop.run_in_executor(None, worker.join, STOP_TIMEOUT_S)

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
            elif isinstance(message, (m.Calibrate, m.Probe)):
                self._measure(message)
            elif isinstance(message, m.Refused):
                raise AdmissionError(message.reason)
            else:
                raise RemoteProtocolError(f"the broker sent {type(message).__name__} to a node")

    # measuring, before a job

    def _measure(self, order: m.Calibrate | m.Probe) -> None:
        if not (isinstance(order, m.Probe) and order.peer == self._probed_by):  # else the session of now will do
            self._stop_worker()
        if isinstance(order, m.Probe):
            self._probed_by = order.peer
            let_in(self._endpoint, order)
        self._connecting = asyncio.ensure_future(self._tell_measured(order))

    async def _tell_measured(self, order: m.Calibrate | m.Probe) -> None:
        if isinstance(order, m.Probe):
            if order.measure:
                await self._channel.send(await measure_link(self._endpoint, order))
            return
        profile = await self._loop.run_in_executor(None, measure_device, self.backend, self._device, order.precision)
        await self._channel.send(m.Calibrated(profile=profile, precision=order.precision))

    # a job

    def _begin(self, assign: m.Assign) -> None:
        self._stop_worker()
        try:
            worker = StageWorker(
                assign, self._endpoint, self._loop, self._tell, self._device, self.backend,
                threads=self.config.threads,
                weights_from=self.config.weights_from, allow_ops=self._allow_ops,
            )  # fmt: skip
        except FusionError as error:
            self._tell(m.StageFailed(job=assign.job, stage_index=assign.stage_index, message=str(error)))
            return
        self._worker = worker
        self._stage_of = {name: i for i, name in enumerate(assign.stage_nodes)} | {assign.owner: OWNER}
        expect_peers(self._endpoint, assign.peers)
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
            await reach_peers(self._endpoint, worker.assign.peers)
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
        self._probed_by = ""
        self._endpoint.expect({})

    def _tell(self, message: Any) -> None:
        """Send a control message; from any thread."""

        def post() -> None:
            out = message
            if isinstance(message, m.StageDone):
                stats = self._endpoint.stats()
                sent = {peer: link.bytes_sent for peer, link in stats.items()}
                out = msgspec.structs.replace(message, sent_bytes=sent, links=link_profiles(stats))
            task = asyncio.ensure_future(self._channel.send(out))
            task.add_done_callback(lambda t: t.cancelled() or t.exception())

        self._loop.call_soon_threadsafe(post)

    # the data plane

    def _admit(self, peer: str, meta: bytes, num_bytes: int) -> None:
        worker, header = self._worker, m.decode_header(bytes(meta))
        if header.kind == "probe":
            check_probe(peer, self._probed_by, num_bytes)
            return
        if worker is None:
            raise RemoteProtocolError(f"{peer} sent a tensor while no job runs here")
        if header.job == worker.assign.job:
            worker.door.admit(self._stage_of[peer], header, num_bytes)

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
