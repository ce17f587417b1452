"""A broker on a real socket, with machines that say what they should, or not."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
import pytest
import torch

import fusionllm.api.owner
from fusionllm.api.owner import OwnerLink
from fusionllm.api.run import describe_waiting
from fusionllm.broker import Broker, server
from fusionllm.capture.export import capture_module
from fusionllm.errors import LinkError, StallError
from fusionllm.ir.graph import encode_graph
from fusionllm.node.agent import NodeAgent
from fusionllm.node.join import join_broker
from fusionllm.node.options import NodeConfig
from fusionllm.protocol import messages as m
from fusionllm.transport.control import ControlChannel, connect_control


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def graph() -> bytes:
    return encode_graph(capture_module(Model(), {"x": torch.ones(2, 4)}, mode="train").graph)


def submission(graph: bytes, **changes) -> m.Submit:
    fields = {
        "num_stages": 2, "partition": "equal-number", "pipeline": "1f1b", "num_microbatches": 2, "microbatch_size": 2,
        "num_steps": 1, "optim": b"{}", "compute": b"{}", **changes,
    }  # fmt: skip
    return m.Submit(graph=graph, options=m.JobOptions(**fields))


@contextlib.asynccontextmanager
async def machine(ticket: m.Ticket, role: m.Role, name: str, fence: str = ""):
    async with connect_control(ticket) as channel:
        await join_broker(channel, role=role, name=name, token=ticket.token, fence=fence)
        await channel.send(m.Listening(host="", port=1))
        yield channel


async def receive(channel: ControlChannel, kind: type):
    """The next message, which must be of this kind; how many nodes are idle is passed over."""
    while isinstance(message := await channel.receive(20), m.Waiting):
        pass
    assert isinstance(message, kind), message
    return message


def with_broker(scenario) -> None:
    async def run() -> None:
        broker = Broker()
        try:
            await asyncio.wait_for(scenario(await broker.start()), 60)
        finally:
            await broker.close()

    asyncio.run(run())


def test_only_a_member_may_send_large_messages():
    async def scenario(ticket: m.Ticket) -> None:
        async with connect_control(ticket) as channel:
            await channel._socket.send(bytes(m.MAX_JOIN_BYTES + 1))
            with pytest.raises(LinkError, match="ended"):
                await channel.receive(20)
        async with machine(ticket, "node", "n") as channel:
            await channel.send(m.StageFailed(job="none", stage_index=0, message="x" * 4 * m.MAX_JOIN_BYTES))
            async with machine(ticket, "node", "other"):
                pass  # the broker still admits, and the large message did not end the first one's connection
            await channel.send(m.Leave(reason="done"))

    with_broker(scenario)


def test_a_newer_node_with_fields_we_do_not_know_is_told_both_versions():
    async def scenario(ticket: m.Ticket) -> None:
        async with connect_control(ticket) as channel:
            newer = {"type": "Join", "version": m.CONTROL_VERSION + 1, "name": "n", "colour": "blue"}
            await channel._socket.send(msgspec.msgpack.encode(newer))
            refused = await receive(channel, m.Refused)
            assert f"version {m.CONTROL_VERSION + 1}" in refused.reason
            assert f"speaks {m.CONTROL_VERSION}" in refused.reason and "same FusionLLM release" in refused.reason

    with_broker(scenario)


def test_nodes_are_idle_again_when_the_owner_is_gone(graph):
    async def scenario(ticket: m.Ticket) -> None:
        async with machine(ticket, "node", "a") as a, machine(ticket, "node", "b") as b:
            async with machine(ticket, "owner", "first") as first:
                await first.send(submission(graph))
                planned = await receive(first, m.Planned)
                assert [stage.node for stage in planned.plan.stages] == ["a", "b"]
                for index, node in enumerate((a, b)):
                    assert (await receive(node, m.Assign)).stage_index == index
                first._socket.transport.abort()
            for node in (a, b):
                assert "owner is gone" in (await receive(node, m.EndJob)).reason
            async with machine(ticket, "owner", "second") as second:
                await second.send(submission(graph))
                assert (await receive(second, m.Planned)).job != planned.job

    with_broker(scenario)


def test_an_owner_that_waits_hears_who_is_here_and_who_has_left(graph):
    async def scenario(ticket: m.Ticket) -> None:
        async with machine(ticket, "owner", "o") as owner:
            async with machine(ticket, "node", "a"):
                await owner.send(submission(graph))
                news = await owner.receive(20)
                while news.names != ("a",):
                    news = await owner.receive(20)
                assert (news.needed, news.idle, news.busy) == (2, 1, 0)
                told = describe_waiting(news, 299.8)
                assert told.startswith("1 of 2 nodes are here (a); waiting 300 s more") and "join_timeout_s" in told
            assert (await owner.receive(20)).names == ()
            async with machine(ticket, "node", "b"), machine(ticket, "node", "c"):
                while news.names != ("b", "c"):
                    news = await owner.receive(20)
                assert describe_waiting(news, 1.0) == "2 of 2 nodes are here (b, c); the broker measures and plans"

    with_broker(scenario)


def test_a_wait_for_nodes_is_told_again_until_it_ends(graph, monkeypatch):
    monkeypatch.setattr(fusionllm.api.owner, "REMIND_S", 0.3)
    told = []

    async def scenario(ticket: m.Ticket) -> None:
        def wait() -> None:
            link = OwnerLink(ticket)
            link.open()
            try:
                link.submit(graph, submission(graph).options, 1.5, lambda news, left_s: told.append(left_s))
            finally:
                link.close()

        with pytest.raises(StallError, match=r"waited 2 s for 2 nodes, 0 are idle; start more or raise"):
            await asyncio.to_thread(wait)

    with_broker(scenario)
    assert len(told) >= 3 and told == sorted(told, reverse=True)


def test_a_lost_node_fails_the_job_by_name_and_frees_the_others(graph):
    async def scenario(ticket: m.Ticket) -> None:
        async with machine(ticket, "node", "a") as a, machine(ticket, "owner", "o") as owner:
            async with machine(ticket, "node", "b") as b:
                await owner.send(submission(graph))
                await receive(owner, m.Planned)
                await receive(a, m.Assign)
                await receive(b, m.Assign)
            assert "node b lost" in (await receive(owner, m.JobFailed)).reason
            assert "node b lost" in (await receive(a, m.EndJob)).reason
            await owner.send(submission(graph, num_stages=1))  # the same owner may ask for less
            assert [s.node for s in (await receive(owner, m.Planned)).plan.stages] == ["a"]

    with_broker(scenario)


def test_a_node_that_leaves_while_its_job_is_planned_is_replaced(graph, monkeypatch):
    planning, go_on = asyncio.Event(), asyncio.Event()
    plan_job = server.plan_job

    async def scenario(ticket: m.Ticket) -> None:
        loop = asyncio.get_running_loop()

        def slow_plan(*args):
            loop.call_soon_threadsafe(planning.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
            return plan_job(*args)

        monkeypatch.setattr(server, "plan_job", slow_plan)
        async with machine(ticket, "node", "a"), machine(ticket, "owner", "o") as owner:
            async with machine(ticket, "node", "b"):
                await owner.send(submission(graph))
                await planning.wait()
            async with machine(ticket, "node", "c"):
                await asyncio.sleep(0.2)  # the broker hears of both
                go_on.set()
                assert [s.node for s in (await receive(owner, m.Planned)).plan.stages] == ["a", "c"]

    with_broker(scenario)


@pytest.mark.parametrize(
    ("changes", "damage", "words"),
    [({"num_stages": 0}, b"", "num_stages is 0"), ({"partition": "best"}, b"", "best"), ({}, b"{", "graph")],
)
def test_a_job_that_cannot_be_planned_leaves_the_nodes_idle(graph, changes, damage, words):
    async def scenario(ticket: m.Ticket) -> None:
        async with machine(ticket, "node", "a"), machine(ticket, "node", "b"), machine(ticket, "owner", "o") as owner:
            await owner.send(submission(damage + graph, **changes))
            assert words in (await receive(owner, m.JobFailed)).reason
            await owner.send(submission(graph))
            await receive(owner, m.Planned)

    with_broker(scenario)


def test_a_line_of_a_fence_that_nobody_joined_with_is_refused(graph):
    async def scenario(ticket: m.Ticket) -> None:
        here = machine(ticket, "node", "a", "home"), machine(ticket, "node", "b", "lab")
        async with here[0], here[1], machine(ticket, "owner", "o") as o:
            await o.send(submission(graph, fence_lines=(m.FenceLine("labb", 1.0, 1.0),)))
            reason = (await receive(o, m.JobFailed)).reason
            assert "'labb'" in reason and "did you mean lab? known: home, lab" in reason
            async with machine(ticket, "node", "c", "gone"):
                pass
            await o.send(submission(graph, fence_lines=(m.FenceLine("gone", 1.0, 1.0),)))  # it may come back
            await receive(o, m.Planned)

    with_broker(scenario)


def test_a_node_may_not_submit(graph):
    async def scenario(ticket: m.Ticket) -> None:
        async with machine(ticket, "node", "a") as a:
            await a.send(submission(graph))
            with pytest.raises(LinkError):
                await a.receive(20)

    with_broker(scenario)


def test_a_stalled_job_is_reported_with_who_waits_for_whom(graph, monkeypatch, caplog):
    monkeypatch.setattr(server, "WATCH_EVERY_S", 0.05)
    caplog.set_level(logging.INFO, "fusionllm")

    async def until(words: str) -> None:
        while words not in caplog.text:
            await asyncio.sleep(0.02)

    async def scenario(ticket: m.Ticket) -> None:
        nodes = [NodeAgent(NodeConfig(ticket=ticket, name=name, host="127.0.0.1")) for name in "ab"]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        async with machine(ticket, "owner", "o") as owner:
            await owner.send(submission(graph, stall_s=0.1))
            await receive(owner, m.Planned)
            await until("no step of job1 ended in 0 s: the job waits for stage 0 (a), stage 1 (b)")
            await until("stage 0 has waited 0 s for weights: ")  # the owner sends none
        await until("its owner is gone")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until("b is gone: it left (stopped by its user)")

    with_broker(scenario)
