"""The one thread of a node that touches tensors: performs the commands of `protocol.stage` with a backend.

Events come in through a queue (tensors that arrived, orders, commits); tensors go out through the endpoint, words to
the broker through `tell`. Every wait has a deadline, after which the log says who waits for whom.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from fusionllm.compute import ComputeOptions, OptimConfig, load_backend
from fusionllm.compute.stage import Stage, dtype_name
from fusionllm.errors import FusionError, RemoteProtocolError
from fusionllm.ir.codec import IDENTITY
from fusionllm.ir.cuts import trained_ids
from fusionllm.ir.graph import OpGraph, decode_graph
from fusionllm.ir.program import StageProgram
from fusionllm.node.codecs import StageCodecs
from fusionllm.node.door import Door
from fusionllm.node.weights import find_weights
from fusionllm.protocol import messages as m
from fusionllm.protocol import stage as s
from fusionllm.schedule.pipeline import find_pipeline, forward_only
from fusionllm.transport import Endpoint

log = logging.getLogger(__name__)


class Arrival(msgspec.Struct, frozen=True):
    """A message from the data plane. ``source``: stage index of the sender, or OWNER."""

    peer: str
    source: int
    header: m.TensorHeader
    payload: bytearray


class Committed(msgspec.Struct, frozen=True):
    seq: int
    total_norm: float


class Connected(msgspec.Struct, frozen=True):
    """All peers of the stage are reachable."""


class Stop(msgspec.Struct, frozen=True):
    pass


Event = Arrival | Committed | Connected | Stop


class StageWorker(threading.Thread):
    """Runs one stage of one job until stopped.

    Args:
        tell: sends a control message to the broker; safe to call from this thread.
        threads: the most that may compute on a CPU, whatever the job asks for; 0: one per core.
        weights_from: folders and addresses this machine may read weights from.
        allow_ops: operators beyond the list that this machine executes.
    """

    def __init__(
        self,
        assign: m.Assign,
        endpoint: Endpoint,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[Any], None],
        device: str = "cpu",
        backend: str = "torch",
        *,
        threads: int = 0,
        weights_from: Sequence[str] = (),
        allow_ops: Collection[str] = (),
    ) -> None:
        super().__init__(name=f"stage-{assign.stage_index}", daemon=True)
        self.assign, self._endpoint, self._loop, self._tell = assign, endpoint, loop, tell
        self._device, self._backend, self._threads = device, backend, threads
        self._weights_from, self._allow_ops = weights_from, allow_ops
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.graph: OpGraph = decode_graph(assign.graph, allow_ops)
        self.door = Door(assign, self.graph)
        self._codecs = StageCodecs(assign.codecs, backend)
        self._differentiable = trained_ids(self.graph) & {*assign.producers, *assign.consumers}
        self._tensors: dict[s.Slot, Any] = {}
        self._outs: dict[tuple[int, int], dict[str, Any]] = {}
        self._grads: dict[tuple[int, int], dict[str, Any]] = {}
        self._own_tied: dict[str, Any] = {}
        self._fetches: list[m.TensorHeader] = []
        self._optimizer: dict[str, Any] = {}
        self._done_seq = -1
        self._compute_s = 0.0
        self._connected = self._ready = self._stopped = False

    # the thread

    def run(self) -> None:
        try:
            self._setup()
            while not self._stopped:
                self._take(self._next_event())
        except FusionError as error:
            self._fail(str(error))
        except Exception as error:  # the backend's own errors: out of memory, a kernel's complaint
            if not self._loop.is_closed():
                log.exception("stage %d failed", self.assign.stage_index)
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, message: str) -> None:
        if self._loop.is_closed():  # the node has left while this computed; nobody is left to tell
            return
        self._tell(m.StageFailed(job=self.assign.job, stage_index=self.assign.stage_index, message=message))

    def _setup(self) -> None:
        assign, options = self.assign, self.assign.options
        try:
            optim = msgspec.json.decode(options.optim, type=OptimConfig)
            compute = msgspec.json.decode(options.compute, type=ComputeOptions)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise RemoteProtocolError(f"bad job options: {error}") from None
        most = self._threads or os.cpu_count() or 1
        compute = msgspec.structs.replace(compute, num_threads=min(compute.num_threads or most, most))
        self._pipeline = find_pipeline(options.pipeline)
        counted = [
            name for name in self.graph.params if assign.tied.get(name, (assign.stage_index,))[0] == assign.stage_index
        ]
        self._stage = Stage(
            self._backend,
            self.graph,
            compute,
            optim,
            options.num_steps,
            tied_names=tuple(assign.tied),
            norm_names=counted,
            device=self._device,
            allow_ops=self._allow_ops,
        )
        self._machine = s.StageMachine(
            assign.stage_index,
            inputs=tuple(v.id for v in self.graph.inputs),
            producers=assign.producers,
            consumers=assign.consumers,
            differentiable=frozenset(self._differentiable),
            tied=assign.tied,
            program=self._program,
        )

    def _program(self, num_microbatches: int, train: bool) -> StageProgram:
        build = self._pipeline if train else forward_only
        return build(self.assign.stage_index, len(self.assign.stage_nodes), num_microbatches)

    def _next_event(self) -> Event:
        while True:
            try:
                return self.events.get(timeout=self.assign.options.stall_s)
            except queue.Empty:
                what = (
                    self._machine.waiting_for() if self._ready else f"weights: {', '.join(self._stage.missing()[:4])}"
                )
                if what and not (self._ready and self._machine.idle):
                    log.warning(
                        "stage %d has waited %.0f s for %s", self.assign.stage_index, self.assign.options.stall_s, what
                    )

    def _take(self, event: Event) -> None:
        if isinstance(event, Stop):
            self._stopped = True
        elif isinstance(event, Connected):
            self._connected = True
            self._report_ready()
        elif isinstance(event, Committed):
            self._perform(self._machine.handle_commit(event.seq, event.total_norm))
        else:
            self._on_arrival(event)
            self._endpoint.consumed_threadsafe(event.peer, len(event.payload))

    def _on_arrival(self, event: Arrival) -> None:
        header = event.header
        if header.kind == "step":
            order = m.decode_order(bytes(event.payload))
            self._codecs.check(order.codecs)
            self._perform(self._machine.handle_order(order))
            return
        if header.kind == "fetch":
            self._fetches.append(header)
            self._answer_fetches()
            return
        if header.kind == "offer":
            self._take_offer(m.decode_offer(bytes(event.payload)))
            return
        if header.kind == "codec":
            self._codecs.load(header.key, header.dtype, header.shape, event.payload)
            return
        tensor = self._codecs.decode(event.source, header, event.payload)
        if header.kind == "optimizer":
            self._optimizer[header.key] = tensor
        elif header.kind == "weight":
            self._stage.load(header.key, tensor)
            self._report_ready()
        else:
            slot = s.Slot(header.kind, header.seq, header.microbatch_index, header.key, event.source)
            self._tensors[slot] = tensor
            self._perform(self._machine.handle_arrival(slot))

    def _take_offer(self, offer: m.WeightOffer) -> None:
        """Get what can be had without the owner, and ask the owner for the rest."""
        backend = load_backend(self._backend)
        for name, blob in find_weights(offer, self.graph, self._weights_from):
            self._stage.load(name, backend.from_buffer(blob.data, blob.dtype, blob.shape))
        self._send_bytes("want", m.encode_message(m.WeightWish(names=tuple(self._stage.missing()))))
        self._report_ready()

    def _send_bytes(self, kind: m.TensorKind, payload: bytes) -> None:
        header = m.TensorHeader(kind, self.assign.job, 0, -1, "", "uint8", (len(payload),))
        sent = self._endpoint.send(self.assign.owner, m.encode_message(header), [payload], m.Priority.ORDER)
        asyncio.run_coroutine_threadsafe(sent, self._loop).result(timeout=600.0)

    def _report_ready(self) -> None:
        if self._connected and not self._ready and not self._stage.missing():
            if self._optimizer:
                self._stage.load_optimizer(self._optimizer)
                self._optimizer = {}
            self._ready = True
            self._tell(m.StageReady(job=self.assign.job, stage_index=self.assign.stage_index))

    # commands

    def _perform(self, commands: list[s.Command]) -> None:
        todo = deque(commands)
        while todo:
            command, started_s = todo.popleft(), time.perf_counter()
            computed = self._do(command)
            if isinstance(command, (s.Forward, s.SendActivations, s.Backward, s.SendGradients)):
                self._compute_s += time.perf_counter() - started_s
            if computed:
                todo.extend(self._machine.handle_computed())
        self._answer_fetches()

    def _do(self, command: s.Command) -> bool:
        """Perform one command; True when it computed, so that the machine must hear of its end."""
        order = command.order
        if isinstance(command, s.SendActivations):
            self._send_activations(order, command.microbatch_index)
            return False
        if isinstance(command, s.SendGradients):
            for value, gradient in self._grads.pop((order.seq, command.microbatch_index)).items():
                stage = self.assign.producers[value]
                link = order.codecs.get(stage)
                self._send(stage, "gradient", order.seq, command.microbatch_index, value, gradient, link=link)
            return False
        if isinstance(command, s.SendTied):
            for name, gradient in self._stage.tied_gradients().items():
                self._send_tied(order, name, gradient)
            return False
        if isinstance(command, s.Forward):
            values = {slot.key: self._tensors.pop(slot) for slot in command.slots}
            key = (order.seq, command.microbatch_index)
            self._outs[key] = self._stage.forward(order.step, command.microbatch_index, values, train=order.train)
        elif isinstance(command, s.Backward):
            self._backward(command)
        elif isinstance(command, s.ReportDone):
            self._report_done(command)
            return True
        elif isinstance(command, s.Update):
            self._stage.update(order.step, command.total_norm)
            self._finish(order)
        else:
            self._finish(order)
        return True

    def _finish(self, order: m.StepOrder) -> None:
        self._done_seq = order.seq
        self._codecs.finish(order.seq)
        self._compute_s = self._codecs.encode_s = 0.0

    def _backward(self, command: s.Backward) -> None:
        gradients: dict[str, Any] = {}
        for slot in command.slots:
            tensor = self._tensors.pop(slot)
            gradients[slot.key] = gradients[slot.key] + tensor if slot.key in gradients else tensor
        order, index = command.order, command.microbatch_index
        self._grads[(order.seq, index)] = self._stage.backward(order.step, index, gradients, command.loss_weight)

    def _send_activations(self, order: m.StepOrder, microbatch_index: int) -> None:
        outs = self._outs.pop((order.seq, microbatch_index))
        for value, stages in self.assign.consumers.items():
            for stage in stages:
                link = order.codecs.get(stage)
                self._send(stage, "activation", order.seq, microbatch_index, value, outs[value], link=link)
        for value in self.graph.outputs if not order.train else self.graph.outputs[:1]:
            self._send(s.OWNER, "output", order.seq, microbatch_index, value, outs[value])

    def _send_tied(self, order: m.StepOrder, name: str, gradient: Any) -> None:
        tied = self.assign.options.compression.tied if order.tied else str(IDENTITY)
        codec, payload, self._own_tied[name] = self._codecs.encode_tied(name, gradient, tied)
        parts = [bytes(part) for part in payload]  # the stage goes on to change the gradient in place
        shape = tuple(gradient.shape)
        header = m.TensorHeader("tied", self.assign.job, order.seq, -1, name, dtype_name(gradient), shape, codec)
        for stage in self.assign.tied[name]:
            if stage != self.assign.stage_index:
                self._post(self.assign.stage_nodes[stage], header, parts, m.Priority.TIED)

    def _report_done(self, command: s.ReportDone) -> None:
        own, self._own_tied = self._own_tied, {}
        gathered = {(slot.key, slot.source): self._tensors.pop(slot) for slot in command.slots}
        gathered.update({(name, self.assign.stage_index): gradient for name, gradient in own.items()})
        self._stage.reduce_tied(
            {
                n: [gathered[n, stage] for stage in sorted(stages, reverse=True)]
                for n, stages in self.assign.tied.items()
            }
        )
        names = self.assign.stage_nodes
        square_sum = self._stage.grad_square_sum()
        overflow = self._stage.scales_loss and not math.isfinite(square_sum)
        self._tell(
            m.StageDone(
                job=self.assign.job,
                stage_index=self.assign.stage_index,
                seq=command.order.seq,
                square_sum=0.0 if overflow else square_sum,
                overflow=overflow,
                peak_bytes=self._stage.peak_bytes(),
                compute_s=max(0.0, self._compute_s - self._codecs.encode_s),
                errors={f"{names[k]} {kind}": error for (kind, k), error in self._codecs.guard.errors.items()},
            )
        )

    def _answer_fetches(self) -> None:
        while self._fetches and self._machine.idle and self._done_seq >= self._fetches[0].seq:
            header = self._fetches.pop(0)
            weights, optimizer = self._stage.state()
            frozen = {name for name, param in self.graph.params.items() if not param.trainable}
            for name in weights.keys() - frozen:  # whoever asks has those
                tensor = weights[name]
                self._send(s.OWNER, "weight", header.seq, -1, name, tensor, m.Priority.STATE)
            for name, tensor in optimizer.items():
                self._send(s.OWNER, "optimizer", header.seq, -1, name, tensor, m.Priority.STATE)
            for key, tensor in self._codecs.state().items():
                self._send(s.OWNER, "codec", header.seq, -1, key, tensor, m.Priority.STATE)
            self._send(s.OWNER, "done", header.seq, -1, str(self.assign.stage_index), None, m.Priority.STATE)

    def _send(
        self,
        stage: int,
        kind: m.TensorKind,
        seq: int,
        microbatch_index: int,
        key: str,
        tensor: Any,
        priority: m.Priority = m.Priority.VALUE,
        *,
        link: m.LinkCodecs | None = None,
    ) -> None:
        peer = self.assign.owner if stage == s.OWNER else self.assign.stage_nodes[stage]
        if tensor is None:
            header = m.TensorHeader(kind, self.assign.job, seq, microbatch_index, key, "uint8", (0,))
            payload: list[Any] = []
        else:
            codec, payload = self._codecs.encode(kind, stage, seq, microbatch_index, key, tensor, link)
            if priority == m.Priority.STATE:  # what the stage goes on to change in place
                payload = [bytes(part) for part in payload]
            shape = tuple(tensor.shape)
            header = m.TensorHeader(kind, self.assign.job, seq, microbatch_index, key, dtype_name(tensor), shape, codec)
        self._post(peer, header, payload, priority)

    def _post(self, peer: str, header: m.TensorHeader, payload: list[Any], priority: m.Priority) -> None:
        future = asyncio.run_coroutine_threadsafe(
            self._endpoint.send(peer, m.encode_message(header), payload, priority), self._loop
        )
        if priority == m.Priority.STATE:
            future.result(timeout=600.0)
        else:
            future.add_done_callback(lambda f: self._on_sent(f, header.kind, peer))

    def _on_sent(self, future: Any, kind: str, peer: str) -> None:
        if not future.cancelled() and (error := future.exception()) is not None and not self._stopped:
            log.debug("%s to %s was not sent: %s", kind, peer, error)
