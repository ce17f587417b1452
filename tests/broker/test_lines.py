"""What a fence's nodes share towards others is declared with the run and counts in its plan."""

from __future__ import annotations

import msgspec
import pytest
from tests.kits.backend_kit import Regression, example
from tests.schedule.test_planner import make_workload

from fusionllm.api.config import build_config
from fusionllm.api.run import describe_plan
from fusionllm.broker.planning import Surveyed, check_options, plan_job
from fusionllm.capture.export import capture_module
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.errors import PlanError, UserError
from fusionllm.estimate.device import DeviceRates
from fusionllm.ir.graph import decode_graph
from fusionllm.ir.ops import OPS
from fusionllm.ir.tensor import DTYPES
from fusionllm.protocol.membership import Member
from fusionllm.protocol.messages import Compression, FenceLine, JobOptions, Offer
from fusionllm.schedule.placement import BASELINES, Cluster, NodeModel, find_fences
from fusionllm.schedule.planner import place_exhaustive


def options(*lines: FenceLine) -> JobOptions:
    return JobOptions(
        num_stages=2, partition="dp", pipeline="1f1b", num_microbatches=16, microbatch_size=3, num_steps=1,
        optim=msgspec.json.encode(OptimConfig()), compute=msgspec.json.encode(ComputeOptions()), fence_lines=lines,
    )  # fmt: skip


def two_nodes() -> tuple[list[Member], Surveyed]:
    """Nodes in two fences, both slow, and what a survey found."""
    nodes = [Member(f"n{i}", "node", "ab"[i], "torch", 1, "127.0.0.1", 2 + i) for i in range(2)]
    slow = DeviceRates(matmul=1e3, attention=1e3, convolution=1e3, bytes_per_s=1e3)
    cluster = Cluster(
        nodes=tuple(NodeModel(name=n.name, flops_per_s=1e3, site=n.fence, device=n.name) for n in nodes),
        bandwidth_bytes_per_s=((1e9, 1e9), (1e9, 1e9)),
        latency_s=((0.0, 0.0), (0.0, 0.0)),
    )
    return nodes, Surveyed(cluster, {n.name: slow for n in nodes})


GRAPH, OWNER = capture_module(Regression(), example()).graph, Member("owner", "owner", "", "", 1, "127.0.0.1", 1)


def test_a_declared_uplink_keeps_the_plan_from_crossing_it():
    nodes, surveyed = two_nodes()

    def used(*lines: FenceLine) -> int:
        return len(plan_job("job1", GRAPH, options(*lines), nodes, OWNER, surveyed).assignments)

    assert used() == used(FenceLine("elsewhere", 1e-3, 1e-3)) == used(FenceLine("a", 1e9, 1e9)) == 2
    assert used(FenceLine("a", 1e-3, 1e9)) == used(FenceLine("b", 1e9, 1e-3)) == 1


def test_every_placement_is_tried_where_that_is_asked_and_can_be():
    nodes = [Member(f"n{i}", "node", "a", "torch", 1, "127.0.0.1", 2 + i) for i in range(3)]
    graph, owner = capture_module(Regression(), example()).graph, Member("owner", "owner", "", "", 1, "127.0.0.1", 1)
    cluster = Cluster(
        nodes=tuple(NodeModel(name=n.name, flops_per_s=1e3, site="a", device=n.name) for n in nodes),
        bandwidth_bytes_per_s=((1e4,) * 3,) * 3,
        latency_s=((0.001,) * 3,) * 3,
    )
    rates = [DeviceRates(matmul=s, attention=s, convolution=s, bytes_per_s=s) for s in (1e3, 2e3, 4e3)]
    surveyed = Surveyed(cluster, {n.name: r for n, r in zip(nodes, rates)})
    wish = msgspec.structs.replace(options(), partition="exhaustive", num_stages=1)
    planned = plan_job("job1", graph, wish, nodes, owner, surveyed).owner
    assert planned.others["exhaustive"] == planned.predicted_step_s
    assert planned.others["exhaustive"] <= min(planned.others.values()) * (1 + 1e-9)
    many = msgspec.structs.replace(cluster, nodes=cluster.nodes * 4)
    with pytest.raises(PlanError, match=r"exhaustive would replay \d+ placements of 30 cuts on 12 nodes.*use dp"):
        place_exhaustive(make_workload([1.0] * 31, [1] * 30), many)


def test_fences_of_nodes_without_one_are_found_by_their_links_and_told():
    fences = ["", "", "lab", "", "", "lab"]
    nodes = [Member(f"n{i}", "node", fence, "torch", 1, "127.0.0.1", 2 + i) for i, fence in enumerate(fences)]
    near = [{0, 1}, {3, 4}, {2, 5}]
    rates = tuple(
        tuple(1e9 if any({a, b} <= group for group in near) else 1e5 for b in range(6)) for a in range(6)
    )  # fmt: skip
    cluster = Cluster(
        nodes=tuple(NodeModel(name=n.name, flops_per_s=1e3, site=n.fence, device=n.name) for n in nodes),
        bandwidth_bytes_per_s=rates,
        latency_s=((0.0,) * 6,) * 6,
    )
    assert find_fences(cluster) == [[2, 5], [0, 1], [3, 4]]
    slow = DeviceRates(matmul=1e3, attention=1e3, convolution=1e3, bytes_per_s=1e3)
    graph, owner = capture_module(Regression(), example()).graph, Member("owner", "owner", "", "", 1, "127.0.0.1", 1)
    planned = plan_job("job1", graph, options(), nodes, owner, Surveyed(cluster, {n.name: slow for n in nodes})).owner
    assert planned.found_fences == (("n0", "n1"), ("n3", "n4"))
    assert planned.left_out.keys() == {n.name for n in nodes} - {s.node for s in planned.plan.stages}
    assert "fences found by their links: n0, n1 | n3, n4" in describe_plan(planned)
    sited = msgspec.structs.replace(planned, found_fences=())
    assert not any("fences" in line for line in describe_plan(sited))


def test_frameworks_that_differ_are_told():
    nodes, surveyed = two_nodes()
    mixed = [nodes[0], msgspec.structs.replace(nodes[1], backend="jax")]
    told = [
        describe_plan(plan_job("job1", GRAPH, options(), here, OWNER, surveyed).owner)[0] for here in (nodes, mixed)
    ]
    assert told[0].startswith("predicted")
    assert set(told[1].split(", ")) == {"n0 computes with torch", "n1 computes with jax"}


def test_where_another_plan_is_better_or_the_only_one_its_key_is_named(monkeypatch):
    nodes, surveyed = two_nodes()
    planned = plan_job("job1", GRAPH, options(), nodes, OWNER, surveyed).owner
    assert not any("faster" in line for line in describe_plan(planned))
    behind = msgspec.structs.replace(planned, predicted_step_s=2 * planned.predicted_step_s)
    best = min(planned.others, key=lambda name: planned.others[name])
    assert f"faster, as predicted: cluster.partition = {best!r}" in describe_plan(behind)

    def unfit(workload, cluster):
        raise PlanError("no memory")

    monkeypatch.setitem(BASELINES, "equal-compute", unfit)
    wish = msgspec.structs.replace(options(), partition="equal-compute", compression=Compression(rule="deadline"))
    with pytest.raises(PlanError, match=r"cluster.partition = 'equal-compute' finds no plan.*set it to 'dp'"):
        plan_job("job1", GRAPH, wish, nodes, OWNER, surveyed)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_measured_plan_keeps_an_operator_from_the_node_that_lacks_it(lacking):
    nodes, surveyed = two_nodes()
    operators = tuple(name for name in OPS if name != "aten.tanh.default")
    offer = Offer(device="cpu", operators=operators, optimizers=("adamw",), dtypes=tuple(DTYPES), codecs=True)
    nodes[lacking] = msgspec.structs.replace(nodes[lacking], offer=offer)
    assigned = plan_job("job1", GRAPH, options(), nodes, OWNER, surveyed).assignments
    (holder,) = (
        name for name, a in assigned.items() if any(op.name == "aten.tanh.default" for op in decode_graph(a.graph).ops)
    )
    assert holder == nodes[1 - lacking].name


def test_lines_are_read_from_a_run_and_checked():
    site, other = {"name": "fence0", "uplink": "8 Mbps"}, {"name": "fence1", "uplink": "80 Mbps", "downlink": "8 Mbps"}
    two = {"nodes": 2, "fences": [1, 1], "partition": "dp"}
    lines = build_config({"cluster": {**two, "site": [site, other]}}).fence_lines()
    assert lines == (FenceLine("fence0", 1e6, 1e6), FenceLine("fence1", 1e7, 1e6))
    for cluster, words in (
        ({"partition": "equal-number", "site": [site]}, "set it to 'dp'"),
        ({"site": [site, site]}, "give each fence one"),
        ({"site": [{**site, "uplink": "fast"}]}, "'fast'"),
        ({"site": [site, {**site, "name": "fence7"}]}, r"site\[1\].name is 'fence7'.*known: fence0, fence1"),
        ({"site": [{"nam": "fence0", "uplink": "8 Mbps"}]}, r"did you mean cluster\.site\[0\]\.name"),
        ({"site": [{**site, "upink": "8 Mbps"}]}, r"did you mean cluster\.site\[0\]\.uplink"),
    ):
        with pytest.raises(UserError, match=words):
            build_config({"cluster": {**two, **cluster}})
    ticket = f"fusion1:127.0.0.1:1:{'ab' * 32}:tokentoken"  # whose nodes only its broker knows
    assert build_config({"cluster": {**two, "broker": ticket, "site": [{**site, "name": "home"}]}}).fence_lines()
    with pytest.raises(PlanError, match="line of 'a' has a rate"):
        check_options(options(FenceLine("a", float("nan"), 1.0)), ["a"])
    with pytest.raises(PlanError, match=r"names 'hom', but no node joined.*did you mean home\? known: home, lab"):
        check_options(options(FenceLine("hom", 1.0, 1.0)), ["home", "lab"])
