"""The broker's shell: one WebSocket server around the membership and job machines.

Owns the loop's side effects: certificates, clock, sockets, deadlines. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time

from fusionllm.broker.links import Tuner
from fusionllm.broker.planning import (
    CHOOSING,
    PlannedJob,
    check_options,
    emulated_link,
    needs_survey,
    plan_job,
    precision_of,
)
from fusionllm.broker.survey import Survey
from fusionllm.errors import AdmissionError, FusionError, LinkError, ProtocolError
from fusionllm.ir.graph import decode_graph
from fusionllm.ir.ops import allowed_ops
from fusionllm.protocol import messages as m
from fusionllm.protocol.job import CommitStep, FailJob, JobCommand, JobMachine, StartJob
from fusionllm.protocol.membership import Member, Membership
from fusionllm.transport import fingerprint, issue_identity, make_authority, sign_node
from fusionllm.transport.control import ControlChannel, serve_control

log = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 30.0
WATCH_EVERY_S = 5.0


class _Job:
    def __init__(self, job: str, owner: str, machine: JobMachine, stall_s: float, tuner: Tuner | None) -> None:
        self.job, self.owner, self.machine, self.stall_s, self.tuner = job, owner, machine, stall_s, tuner
        self.last_progress_s = time.monotonic()
        self.link_bytes: dict[str, int] = {}
        self.link_errors: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}


class Broker:
    """A broker on ``host:port``. ``advertise``: the host name written into the ticket."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, advertise: str | None = None, token_hours: float = 24.0
    ) -> None:
        self._host, self._port, self._advertise = host, port, advertise
        self._token = secrets.token_urlsafe(24)
        self._membership = Membership(self._token, time.monotonic() + token_hours * 3600)
        self._channels: dict[str, ControlChannel] = {}
        self._jobs: dict[str, _Job] = {}
        self._waiting: dict[str, m.Submit] = {}
        self._next_job = 0
        self._survey = Survey(self._send)
        self._beginning: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> m.Ticket:
        """Listen, and return the ticket that others join with. Raises UserError for a port in use."""
        self._authority = make_authority("fusionllm broker", 3650)
        identity = issue_identity(self._authority, "broker", 3650 * 86400)
        self._server = await serve_control(self._host, self._port, identity, self._handle)
        port = next(iter(self._server.sockets)).getsockname()[1]
        self._watch = asyncio.ensure_future(self._watch_stalls())
        return m.Ticket(self._advertise or self._host, port, fingerprint(identity.cert_pem), self._token)

    async def close(self) -> None:
        for task in (self._watch, *self._beginning):
            if task is not None:
                task.cancel()
        self._server.close()
        await self._server.wait_closed()

    @property
    def num_nodes(self) -> int:
        """Nodes that have joined and listen."""
        return sum(member.role == "node" and bool(member.port) for member in self._membership.members.values())

    # one machine

    async def _handle(self, channel: ControlChannel) -> None:
        try:
            member = await self._admit(channel)
        except (FusionError, asyncio.TimeoutError) as error:
            log.warning("refused a newcomer from %s: %s", channel.remote_host, error or "it said nothing")
            return
        reason = "its connection dropped"
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, m.Leave):
                    reason = f"it left ({message.reason})"
                    break
                await self._on_message(member.name, channel, message)
        except LinkError as error:
            reason = str(error)
        except ProtocolError as error:
            reason = str(error)
            log.warning("%s broke the protocol: %s", member.name, error)
            await channel.close("protocol error")
        finally:
            await self._gone(member.name, reason)

    async def _admit(self, channel: ControlChannel) -> Member:
        try:
            join = await channel.receive(JOIN_TIMEOUT_S)
            if not isinstance(join, m.Join):
                raise AdmissionError(f"the first message was {type(join).__name__}, not Join")
            member = self._membership.admit(join, time.monotonic())
        except (AdmissionError, ProtocolError) as error:
            await channel.send(m.Refused(reason=str(error)))
            await channel.close("refused")
            raise
        try:
            cert = sign_node(self._authority, join.name, join.public_key_pem)
        except (FusionError, ValueError):
            self._membership.leave(join.name)
            await channel.send(m.Refused(reason="the public key in Join is not a P-256 key in PEM"))
            raise AdmissionError(f"{join.name} sent an unusable public key") from None
        channel.admitted(join.name)
        self._channels[join.name] = channel
        try:
            await channel.send(m.Welcome(name=join.name, cert_pem=cert, ca_pem=self._authority.cert_pem))
        except LinkError as error:
            await self._gone(join.name, str(error))
            raise
        log.info(
            "%s %s joined from %s%s",
            join.role,
            join.name,
            channel.remote_host,
            f", fence {join.fence}" * bool(join.fence),
        )
        return member

    async def _gone(self, name: str, reason: str) -> None:
        member = self._membership.leave(name)
        self._channels.pop(name, None)
        self._waiting.pop(name, None)
        self._survey.forget(name)
        log.info("%s is gone: %s", name, reason)
        if member is not None and member.job in self._jobs:
            job = self._jobs[member.job]
            if name == job.owner:
                await self._end(job, "its owner is gone")
            else:
                await self._perform(job, job.machine.handle_lost(name, reason))
        elif member is not None and member.role == "node":
            await self._try_waiting()  # who waits for nodes hears that there is one less

    async def _on_message(self, name: str, channel: ControlChannel, message: m.Control) -> None:
        if isinstance(message, m.Listening):
            self._membership.listening(name, message.host or channel.remote_host, message.port, message.offer)
            await self._try_waiting()
        elif isinstance(message, m.Submit):
            self._check_owner(name)
            self._waiting[name] = message
            await self._try_waiting()
        elif isinstance(message, m.EndJob):
            if (job := self._jobs.get(message.job)) is not None and job.owner == name:
                await self._end(job, message.reason)
        elif isinstance(message, (m.Calibrated, m.Probed)):
            self._survey.handle(name, message)
        elif isinstance(message, (m.StageReady, m.StageDone, m.StageFailed)):
            job = self._jobs.get(message.job)
            if job is not None:
                if isinstance(message, m.StageDone):
                    self._survey.observe(name, message.links)
                    known = {job.owner, *job.machine.stage_nodes}
                    if job.tuner is not None and name in job.machine.stage_nodes:
                        job.tuner.observe(name, message.compute_s, message.links)
                    job.peak_bytes[name] = message.peak_bytes
                    job.link_bytes.update({f"{name}->{p}": n for p, n in message.sent_bytes.items() if p in known})
                    errors = {key.partition(" "): error for key, error in message.errors.items()}
                    job.link_errors.update(
                        {f"{name}->{p} {kind}": e for (p, _, kind), e in errors.items() if p in known}
                    )
                await self._perform(job, _step_job(job.machine, name, message))
        else:
            raise ProtocolError(f"{name} sent {type(message).__name__}, which only a broker sends")

    def _check_owner(self, name: str) -> None:
        member = self._membership.members[name]
        if member.role != "owner" or member.job:
            raise ProtocolError(
                f"{name} submitted a job; it is a {member.role}" + f" of {member.job}" * bool(member.job)
            )

    # jobs

    async def _try_waiting(self) -> None:
        for owner, submit in list(self._waiting.items()):
            needed, idle = submit.options.num_stages, [node.name for node in self._membership.idle_nodes()]
            busy = len(self._membership.busy_nodes())
            await self._send(owner, m.Waiting(needed=needed, idle=len(idle), names=tuple(idle), busy=busy))
            if len(idle) < needed:
                continue
            if self._waiting.pop(owner, None) is submit:  # else another newcomer's news began it meanwhile
                task = asyncio.ensure_future(self._begin(owner, submit))  # it may have to measure, which takes a while
                self._beginning.add(task)
                task.add_done_callback(self._begun)

    def _begun(self, task: asyncio.Task[None]) -> None:
        self._beginning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a job could not be begun", exc_info=error)

    async def _begin(self, owner: str, submit: m.Submit) -> None:
        self._next_job += 1
        name, options = f"job{self._next_job}", submit.options
        try:
            check_options(options, sorted(self._membership.fences))
            every = options.partition in CHOOSING
            nodes = self._membership.lease(owner, name, options.num_stages, every=every) or []
            planned = await self._plan(name, owner, submit, nodes)
        except FusionError as error:
            self._membership.release(name)
            await self._send(owner, m.JobFailed(job=name, reason=str(error)))
            await self._try_waiting()
            return
        stage_nodes = tuple(planned.assignments)
        if not self._membership.holds(name, [owner, *stage_nodes]):  # someone left meanwhile
            self._membership.release(name)
            if owner in self._channels:
                self._waiting[owner] = submit
            await self._try_waiting()
            return
        self._membership.spare(name, {node.name for node in nodes} - set(stage_nodes))
        self._jobs[name] = _Job(name, owner, JobMachine(stage_nodes), options.stall_s, planned.tuner)
        log.info("%s of %s on %s", name, owner, ", ".join(stage_nodes))
        await self._send(owner, planned.owner)
        for node, assign in planned.assignments.items():
            await self._send(node, assign)
        await self._try_waiting()

    async def _plan(self, name: str, owner: str, submit: m.Submit, nodes: list[Member]) -> PlannedJob:
        options, member, surveyed = submit.options, self._membership.members[owner], None
        # nothing is executed here; each node says for itself which operators beyond the list it allows
        graph = decode_graph(submit.graph, allowed_ops(options.allow_ops))
        if needs_survey(options):
            precision = precision_of(options)
            await self._survey.measure(nodes, precision, lambda a, b: emulated_link(options, a.fence, b.fence))
            here = [node for node in nodes if node.name in self._membership.members]
            nodes, surveyed = here, self._survey.view(here, precision)
        # a large graph takes a while to plan and cut; the loop goes on meanwhile
        return await asyncio.get_running_loop().run_in_executor(
            None, lambda: plan_job(name, graph, options, nodes, member, surveyed)
        )

    async def _perform(self, job: _Job, commands: list[JobCommand]) -> None:
        job.last_progress_s = time.monotonic()
        for command in commands:
            if isinstance(command, StartJob):
                await self._send(job.owner, m.Start(job=job.job))
            elif isinstance(command, CommitStep):
                commit = m.Commit(job=job.job, seq=command.seq, total_norm=command.total_norm)
                for name in job.machine.stage_nodes:
                    await self._send(name, commit)
                recoded: tuple[m.Recoded, ...] = ()
                if job.tuner is not None and job.tuner.is_due():  # replays of long pipelines take a while
                    recoded = await asyncio.get_running_loop().run_in_executor(None, job.tuner.retune)
                news = m.Commit(
                    job=job.job, seq=command.seq, total_norm=command.total_norm, link_bytes=dict(job.link_bytes),
                    link_errors=dict(job.link_errors), peak_bytes=dict(job.peak_bytes),
                    recoded=recoded,
                )  # fmt: skip
                await self._send(job.owner, news)
            elif isinstance(command, FailJob):
                log.info("%s failed: %s", job.job, command.reason)  # the owner is told, and says it
                await self._send(job.owner, m.JobFailed(job=job.job, reason=command.reason))
                await self._end(job, command.reason)

    async def _end(self, job: _Job, reason: str) -> None:
        job.machine.ended = True
        self._jobs.pop(job.job, None)
        self._membership.release(job.job)
        for name in job.machine.stage_nodes:
            await self._send(name, m.EndJob(job=job.job, reason=reason))
        log.info("%s ended%s", job.job, f": {reason}" if reason else "")
        await self._try_waiting()

    async def _send(self, name: str, message: object) -> None:
        channel = self._channels.get(name)
        if channel is None:
            return
        try:
            await asyncio.wait_for(channel.send(message), SEND_TIMEOUT_S)
        except (LinkError, asyncio.TimeoutError):
            log.warning("could not reach %s", name)
            with contextlib.suppress(LinkError, asyncio.TimeoutError):
                await asyncio.wait_for(channel.close("unreachable"), 1.0)

    async def _watch_stalls(self) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            for job in list(self._jobs.values()):
                if time.monotonic() - job.last_progress_s > job.stall_s:
                    job.last_progress_s = time.monotonic()
                    what = "no step of %s ended in %.0f s: the job %s, or its owner validates or saves"
                    log.warning(what, job.job, job.stall_s, job.machine.waiting_for())


def _step_job(machine: JobMachine, name: str, message: m.StageReady | m.StageDone | m.StageFailed) -> list[JobCommand]:
    if isinstance(message, m.StageReady):
        return machine.handle_ready(name, message.stage_index)
    if isinstance(message, m.StageDone):
        return machine.handle_done(
            name, message.stage_index, message.seq, message.square_sum, overflow=message.overflow
        )
    return machine.handle_failed(name, message.stage_index, message.message)
