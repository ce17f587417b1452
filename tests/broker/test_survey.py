"""The survey: who measures what when, and what comes of answers that are late, missing or impossible."""

from __future__ import annotations

import asyncio
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fusionllm.broker import survey as room
from fusionllm.broker.survey import Survey
from fusionllm.errors import PlanError, RemoteProtocolError
from fusionllm.ir.cluster import LinkProfile, NodeProfile, Sample
from fusionllm.protocol import messages as m
from fusionllm.protocol.membership import Member

SAMPLE = Sample(kind="matmul", flops=1e9, moved_bytes=1e6, seconds=0.01)
LARGE = Sample(kind="matmul", flops=1e11, moved_bytes=1e8, seconds=1.0)
PROFILE = NodeProfile(device="test", memory_bytes=1e9, samples=(SAMPLE, LARGE))
HALF = NodeProfile(
    device="test", memory_bytes=1e9, samples=tuple(replace(s, seconds=s.seconds * 4) for s in PROFILE.samples)
)


def members(count: int, fences: int = 1) -> list[Member]:
    return [Member(f"n{k}", "node", f"f{k % fences}", "torch", 1, "127.0.0.1", 1000 + k) for k in range(count)]


class Nodes:
    """Nodes that answer orders, each from its own task, and remember which were under way together."""

    def __init__(self, silent: tuple[str, ...] = ()) -> None:
        self.survey = Survey(self.send)
        self.silent, self.probing, self.most, self.probes = silent, set(), 0, []

    async def send(self, name: str, order: object) -> None:
        if isinstance(order, m.Calibrate) and name not in self.silent:
            profile = PROFILE if order.precision == "float32" else HALF
            self.survey.handle(name, m.Calibrated(profile=profile, precision=order.precision))
        elif isinstance(order, m.Probe) and order.measure:
            self.probes.append((name, order.peer))
            if name not in self.silent:
                asyncio.get_running_loop().create_task(self.probe(name, order.peer))

    async def probe(self, name: str, peer: str) -> None:
        assert not {name, peer} & self.probing, "a node in two probes at once"
        self.probing |= {name, peer}
        await asyncio.sleep(0.001)
        self.probing -= {name, peer}
        profile = LinkProfile(bandwidth_bytes_per_s=1e6, rtt_s=0.01)
        self.survey.handle(name, m.Probed(peer=peer, profile=profile))


def no_shape(a: Member, b: Member) -> None:
    return None


@given(st.integers(0, 40))
def test_every_pair_meets_once_and_nobody_is_in_two_probes_at_a_time(count):
    rounds = list(room._rounds(count))
    met = [tuple(sorted(pair)) for turn in rounds for pair in turn]
    assert sorted(met) == list(combinations(range(count), 2))
    assert all(len({i for pair in turn for i in pair}) == 2 * len(turn) for turn in rounds)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_ways_are_measured_once_and_remembered(count):
    async def run() -> None:
        nodes, here = Nodes(), members(count)
        await nodes.survey.measure(here, "float32", no_shape)
        assert sorted(nodes.probes) == sorted((a.name, b.name) for a in here for b in here if a != b)
        await nodes.survey.measure(here, "float32", no_shape)
        assert len(nodes.probes) == count * (count - 1)
        view = nodes.survey.view(here, "float32")
        assert [node.name for node in view.cluster.nodes] == [node.name for node in here]
        assert view.rates["n0"].matmul == pytest.approx(1e11)
        assert all(rate == 1e6 for i, row in enumerate(view.cluster.bandwidth_bytes_per_s) for rate in row[:i])

    asyncio.run(run())


def test_a_device_is_measured_in_the_precision_of_the_job():
    async def run() -> None:
        nodes, here = Nodes(), members(1)
        await nodes.survey.measure(here, "bfloat16", no_shape)
        with pytest.raises(PlanError, match="n0 has not measured"):
            nodes.survey.view(here, "float32")
        nodes.survey.handle("n0", m.Calibrated(profile=PROFILE, precision="float32"))  # that nobody asked for
        with pytest.raises(PlanError, match="n0 has not measured"):
            nodes.survey.view(here, "float32")
        await nodes.survey.measure(here, "float32", no_shape)
        rates = [nodes.survey.view(here, name).rates["n0"].matmul for name in ("float32", "bfloat16")]
        assert rates == pytest.approx([1e11, 1e11 / 4])

    asyncio.run(run())


def test_emulated_links_are_measured_anew_for_every_job():
    async def run() -> None:
        nodes, here = Nodes(), members(2)
        for _ in range(2):
            await nodes.survey.measure(here, "float32", lambda a, b: m.LinkShape(1e6))
        assert len(nodes.probes) == 4

    asyncio.run(run())


def test_of_many_nodes_a_few_of_each_fence_are_probed_and_the_rest_inferred(caplog):
    async def run() -> None:
        nodes, here = Nodes(), members(room.MAX_PROBED + 4, fences=3)
        await nodes.survey.measure(here, "float32", no_shape)
        assert len(nodes.probes) == 6 * 5
        link = nodes.survey.link(here[-1], here[-2], here)
        assert link.inferred and link.bandwidth_bytes_per_s == 1e6
        assert not nodes.survey.link(here[0], here[1], here).inferred
        nodes.survey.view(here, "float32")

    with caplog.at_level("INFO", logger=room.__name__):
        asyncio.run(run())
    told = [record.getMessage() for record in caplog.records if "not measured" in record.getMessage()]
    assert told == [f"{36 * 35 - 6 * 5} of {36 * 35} ways are not measured but taken from others between their fences"]


def test_a_node_that_says_nothing_is_named_and_one_that_leaves_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(room, "CALIBRATE_S", 0.05)
    monkeypatch.setattr(room, "PROBE_S", 0.05)

    async def run() -> None:
        nodes, here = Nodes(silent=("n1",)), members(2)
        await nodes.survey.measure(here, "float32", no_shape)
        with pytest.raises(PlanError, match="n1 has not measured its device"):
            nodes.survey.view(here, "float32")
        monkeypatch.setattr(room, "CALIBRATE_S", 60.0)
        measuring = asyncio.ensure_future(nodes.survey.measure(here, "float32", no_shape))
        await asyncio.sleep(0.01)
        nodes.survey.forget("n1")
        await asyncio.wait_for(measuring, 5)

    asyncio.run(run())


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 0},
        {"memory_bytes": float("inf")},
        {"samples": ()},
        {"samples": (SAMPLE,) * 1000},
        {"samples": (replace(SAMPLE, flops=float("nan")),)},
    ],
)
def test_what_no_device_could_report_is_refused(wrong):
    with pytest.raises(RemoteProtocolError, match=r"n0 reported a (device|calibration)"):
        Survey(Nodes().send).handle("n0", m.Calibrated(precision="float32", profile=replace(PROFILE, **wrong)))


def test_a_link_nobody_asked_about_is_not_kept():
    survey = Survey(Nodes().send)
    survey.handle("n0", m.Probed(peer="n1", profile=LinkProfile(bandwidth_bytes_per_s=1e9, rtt_s=0.0)))
    a, b = members(2)
    assert survey.link(a, b, [a, b]).bandwidth_bytes_per_s == 0


def test_traffic_corrects_what_a_probe_measured():
    async def run() -> None:
        nodes, here = Nodes(), members(2)
        await nodes.survey.measure(here, "float32", no_shape)
        slower = LinkProfile(bandwidth_bytes_per_s=5e5, rtt_s=0.02)
        nodes.survey.observe("n0", {"n1": slower, "owner": slower})
        assert nodes.survey.link(here[0], here[1], here) == slower
        assert nodes.survey.link(here[1], here[0], here).bandwidth_bytes_per_s == 1e6
        with pytest.raises(RemoteProtocolError, match="n0 reported a link"):
            nodes.survey.observe("n0", {"n1": LinkProfile(bandwidth_bytes_per_s=-1, rtt_s=0)})

    asyncio.run(run())
