"""Cluster files, what-ifs, studies and the command: bad input is named, plans are explained."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fusionllm.cli.plan import plan
from fusionllm.errors import PlanError, UserError
from fusionllm.ir.graph import Op, OpGraph, Param, Value, encode_graph
from fusionllm.ir.tensor import TensorSpec
from fusionllm.ir.text import graph_to_text
from fusionllm.schedule.placement import Placement, replay_placement
from fusionllm.schedule.workload import StepOptions, build_workload
from fusionllm.sim.cluster import build_cluster, build_spec, load_cluster, node_names
from fusionllm.sim.study import Study, best_plan, study
from fusionllm.sim.variants import with_copies
from fusionllm.sim.what_if import change

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))
LAB = next(path for path in EXAMPLES if path.stem == "one-lab")
BASE = {
    "fence": [{"name": "lab", "uplink": "100 Mbps"}, {"name": "home"}],
    "node": [{"fence": "lab", "device": "RTX 4090", "count": 2}, {"fence": "home", "name": "pc", "device": "T4"}],
    "link": [{"a": "lab", "b": "home", "bandwidth": "40 Mbps", "back_bandwidth": "80 Mbps", "latency": "5 ms"}],
}


def deep(width: int = 512, layers: int = 8) -> OpGraph:
    """A chain of square layers ending in a mean."""
    spec = TensorSpec("float32", ("B", width))
    weights = {f"w{k}": Param(f"p:w{k}", TensorSpec("float32", (width, width))) for k in range(layers)}
    ops = [
        Op(
            name="aten.linear.default",
            args={"input": {"r": f"h{k - 1}" if k else "x"}, "weight": {"r": f"p:w{k}"}},
            outs=(f"h{k}",),
            specs=(spec,),
        )
        for k in range(layers)
    ]
    last = {"self": {"r": f"h{layers - 1}"}}
    loss = Op(name="aten.mean.default", args=last, outs=("loss",), specs=(TensorSpec("float32", ()),))
    return OpGraph(symbols={"B": 1}, inputs=(Value("x", spec),), params=weights, ops=(*ops, loss), outputs=("loss",))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_cluster_is_planned(path):
    spec = load_cluster(path)
    cluster = build_cluster(spec)
    found = study(build_workload(deep(), StepOptions(microbatch_size=64, num_microbatches=8)), cluster)
    assert sum(len(nodes) for nodes in found.fences.values()) == len(cluster.nodes) == len(node_names(spec))
    used = {stage.node for stage in found.stages}
    assert sum(left.count for left in found.left_out) == len(cluster.nodes) - len(used)
    for value in found.others.values():
        assert isinstance(value, str) or found.step_s <= value * 1.01
    assert all(stage.memory_bytes <= stage.limit_bytes for stage in found.stages)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Study) == found


def test_a_cluster_in_numbers():
    cluster = build_cluster(build_spec(BASE))
    assert [node.name for node in cluster.nodes] == ["lab0", "lab1", "pc"]
    assert cluster.bandwidth_bytes_per_s[0][2] == pytest.approx(40e6 / 8 * 0.9)
    assert cluster.bandwidth_bytes_per_s[2][0] == pytest.approx(80e6 / 8 * 0.9)
    assert cluster.latency_s[0][2] == 0.005
    assert [(share.name, share.nodes) for share in cluster.shares] == [("lab", (0, 1))]
    assert build_cluster(build_spec(BASE), device_model="lambda").nodes[0].device == ""


def test_a_nodes_own_line_is_shared_by_its_links():
    """A node in the middle of a path sends activations and gradients through one uplink: twice the bytes of a link."""
    fast = {"fence": "a", "flops_per_s": 1e15, "memory": "1 GB"}
    raw = {
        "fence": [{"name": "a", "bandwidth": "1 Gbps", "latency": "0 ms"}], "goodput": 1.0,
        "node": [fast, fast, {**fast, "name": "dsl", "uplink": "8 Mbps", "downlink": "80 Mbps"}],
    }  # fmt: skip
    cluster = build_cluster(build_spec(raw))
    assert [(s.name, s.nodes, s.up_bytes_per_s, s.down_bytes_per_s) for s in cluster.shares] == [
        ("dsl", (2,), 1e6, 1e7)
    ]
    workload = build_workload(deep(), StepOptions(microbatch_size=64, num_microbatches=4, pipeline="1f1b"))
    line = replay_placement(workload, cluster, Placement(nodes=(0, 2, 1), boundaries=(2, 4)))
    cut_bytes = 64 * 512 * 2
    assert line.step_s >= 2 * 4 * cut_bytes / 1e6  # of 4 microbatches, one message each way out
    end = replay_placement(workload, cluster, Placement(nodes=(0, 1, 2), boundaries=(2, 4)))
    assert end.step_s < line.step_s * 0.6
    twins = build_spec({**raw, "node": [{**raw["node"][2], "count": 2}]})
    assert [share.nodes for share in build_cluster(twins).shares] == [(0,), (1,)]
    assert [share.nodes for share in with_copies(cluster, 2, 2).shares] == [(2,), (3,), (4,)]
    assert {(s.up_bytes_per_s, s.down_bytes_per_s) for s in with_copies(cluster, 2, 2).shares} == {(1e6, 1e7)}
    with pytest.raises(UserError, match="'fast'"):
        build_cluster(build_spec({**raw, "node": [{**raw["node"][2], "uplink": "fast"}]}))


@pytest.mark.parametrize(
    ("table", "entry", "words"),
    [
        ("node", {"fence": "lab", "devise": "T4"}, ["node[0].devise", "did you mean node[0].device"]),
        ("node", {"fence": "lba", "device": "T4"}, ["'lba'", "did you mean lab? known: lab, home"]),
        ("node", {"fence": "lab", "device": "T4", "refuses": ["aten.cnov*"]}, ["node[0].refuses has 'aten.cnov*'"]),
        ("node", {"fence": "lab", "device": "T4", "refuses": ["conv*"]}, ["node[0].refuses has 'conv*'"]),
        ("node", {"fence": "lab", "device": "T4", "count": 0}, ["count is 0", "between 1"]),
        ("node", {"fence": "lab", "device": "T4", "count": True}, ["int"]),
        ("node", {"fence": "lab"}, ["neither a device nor"]),
        ("node", {"fence": "lab", "flops_per_s": float("nan"), "memory": "1 GB"}, ["nan", "finite"]),
        ("node", {"fence": "lab", "flops_per_s": -1.0, "memory": "1 GB"}, ["-1.0", "above zero"]),
        ("node", {"fence": "lab", "device": "T5"}, ["'T5'", "T4"]),
        ("node", {"fence": "lab", "flops_per_s": 1e12, "memory": "big"}, ["'big'", "size"]),
        ("link", {"a": "lab", "b": "hom", "bandwidth": "1 Gbps"}, ["link[0] names 'hom'", "did you mean home? known:"]),
        ("link", {"a": "lab", "b": "lab", "bandwidth": "1 Gbps"}, ["link[0] joins 'lab' to itself", "[[fence]]"]),
        ("link", {"a": "pc", "b": "pc", "bandwidth": "1 Gbps"}, ["link[0] joins 'pc' to itself"]),
        ("link", {"a": "lab", "b": "home", "bandwidth": "fast"}, ["'fast'", "Mbps"]),
        ("link", {"a": "lab", "b": "home", "bandwidth": "0 Mbps"}, ["above zero"]),
        ("fence", {"name": "lab\n"}, ["no name"]),
    ],
)
def test_a_bad_cluster_file_is_refused(table, entry, words):
    raw = {**BASE, table: [entry, *BASE[table]] if table == "fence" else [entry]}
    with pytest.raises(UserError) as caught:
        build_cluster(build_spec(raw))
    assert all(word in str(caught.value) for word in words), caught.value


def test_names_stand_for_one_thing():
    with pytest.raises(UserError, match="'lab' stands for 2"):
        build_spec({**BASE, "fence": [*BASE["fence"], {"name": "lab"}]})
    with pytest.raises(UserError, match="unknown key fences"):
        build_spec({**BASE, "fences": []})


leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5)
nested = st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=6), leaves, max_size=3)
json_values = leaves | nested | st.lists(nested, max_size=3) | st.dictionaries(st.text(max_size=6), nested, max_size=3)


@given(
    st.sampled_from(["fence", "node", "device", "link", "otherwise", "pin", "owner", "goodput", "name"]), json_values
)
def test_anything_else_is_a_user_error_or_a_cluster(key, value):
    with contextlib.suppress(UserError):
        build_cluster(build_spec({**BASE, key: value}))


def test_changes():
    spec = build_spec(BASE)
    faster = build_cluster(change(spec, "link lab-home=1Gbps 1ms"))
    assert faster.bandwidth_bytes_per_s[0][2] == faster.bandwidth_bytes_per_s[2][0] == pytest.approx(1e9 / 8 * 0.9)
    assert faster.latency_s[2][1] == 0.001
    assert node_names(change(spec, "add 2x RTX 4090 in fence home"))[-2:] == ["home1", "home2"]
    assert node_names(change(spec, "without lab")) == ["pc"]
    assert node_names(change(spec, "without lab0")) == ["lab1", "pc"]
    assert build_cluster(change(spec, "link lab-lab=10 Gbps")).bandwidth_bytes_per_s[0][1] > 1e9
    for text, words in (
        ("link lab-hom=1Gbps", r"no fence or node 'hom'; did you mean home\? known: home, lab, lab0"),
        ("link lba-home=1Gbps", r"no fence or node 'lba'; did you mean lab"),
        ("link lab=1Gbps", "no fence or node ''"),
        ("link pc-pc=1Gbps", "joins 'pc' to itself"),
        ("add 2x RTX 9 in fence home", "not known"),
        ("add 2x T4 in fence hom", r"did you mean home\? known: lab, home"),
        ("without lub", r"no such fence or node; did you mean lab\? known: home"),
        ("faster please", "write it like"),
    ):
        with pytest.raises(UserError, match=words):
            change(spec, text)


def test_what_does_not_fit_says_what_would():
    spec = build_spec(
        {"fence": [{"name": "a"}], "node": [{"fence": "a", "flops_per_s": 1e12, "memory": "12 MB", "count": 2}]}
    )
    workload = build_workload(deep(), StepOptions(microbatch_size=4, num_microbatches=4))
    with pytest.raises(PlanError, match=r"stage \d needs .* MiB on a\d.* smallest change found: .* or \d more node"):
        study(workload, build_cluster(spec))


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"node": [{"fence": "lab", "device": "T4", "refuses": ["aten.linear*"], "count": 2}]}, {},
            "a0?.*refuses aten.linear.default.* Smallest change found: a node that runs aten.linear.default$"),
        ({"fence": [{"name": "lab"}, {"name": "home"}, {"name": "far"}], "link": [],
          "node": [{"fence": "lab", "device": "T4", "refuses": ["aten.mean*"]},
                   {"fence": "home", "device": "T4", "refuses": ["aten.linear*"]}, {"fence": "far", "device": "T4"}],
          "pin": [{"stage": "first", "to": "lab"}]}, {}, "Smallest change found: nodes that refuse less$"),
        ({"link": [], "pin": [{"stage": "first", "to": "lab"}, {"stage": "last", "to": "pc"}],
          "fence": [{"name": "lab"}, {"name": "home"}]}, {}, "Smallest change found: no pinned stage$"),
        ({"node": [{"fence": "home", "device": "T4"}]}, {"pipeline": "1f1b-interleaved"},
            "Smallest change found: the schedule 1f1b$"),
        ({"fence": [{"name": "lab"}, {"name": "home"}], "link": [],
          "node": [{"fence": f, "flops_per_s": 1e12, "memory": "20 MB"} for f in ("lab", "home")]}, {},
            r"Nearest plan: stage 0 needs 32.0 MiB on .*; smallest change found: .* or a link between home and lab$"),
    ],
)  # fmt: skip
def test_what_binds_besides_memory_is_named(changes, options, words):
    cluster = build_cluster(build_spec({**BASE, **changes}))
    workload = build_workload(deep(), StepOptions(microbatch_size=4, num_microbatches=4, **options))
    with pytest.raises(PlanError, match=words):
        best_plan(workload, cluster)


@pytest.mark.parametrize("form", ["text", "json", "folder"])
def test_the_command_reads_a_captured_graph(form, tmp_path):
    app = typer.Typer()
    app.command()(plan)
    path = tmp_path / "graph.json"
    path.write_bytes(graph_to_text(deep()).encode() if form == "text" else encode_graph(deep()))
    given_path = str(tmp_path if form == "folder" else path)
    words = [given_path, "--cluster", str(LAB), "--num-microbatches", "4"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "a step, predicted" in shown.output and "left out" in shown.output
    assert re.search(r"critical path: \d+ % (stage|link) \d", shown.output)
    as_json = json.loads(CliRunner().invoke(app, [*words, "--json", "--what-if", "without lab0"]).stdout)
    assert as_json["stages"] and "without lab0" in as_json["what_if"]
    bad = CliRunner().invoke(app, [*words, "--pipeline", "2f2b"])
    assert bad.exit_code == 2 and "known: gpipe" in bad.output
    missing = CliRunner().invoke(app, [given_path + "x", "--cluster", str(LAB)])
    assert missing.exit_code == 2 and "cannot read" in missing.output


def test_planning_needs_no_tensor_framework():
    code = "import sys, fusionllm.cli.show_plan, fusionllm.sim.what_if; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pins_refusals_and_the_owner_are_read():
    raw = {
        **BASE,
        "node": [{**BASE["node"][0], "refuses": ["aten.conv*"]}, BASE["node"][1]],
        "pin": [{"stage": "first", "to": "pc"}, {"stage": "last", "to": "lab"}],
        "owner": {"fence": "home"},
    }
    assert build_spec({**BASE, "node": [{**BASE["node"][0], "refuses": ["mylib.scan.default"]}, BASE["node"][1]]})
    cluster = build_cluster(build_spec(raw))
    assert [node.refuses for node in cluster.nodes] == [("aten.conv*",), ("aten.conv*",), ()]
    assert [(pin.op, pin.nodes) for pin in cluster.pins] == [(0, (2,)), (-1, (0, 1))]
    assert cluster.owner.beyond == (0, 1)
    assert cluster.owner.bandwidth_bytes_per_s == pytest.approx((80e6 / 8 * 0.9,) * 2 + (1e9 / 8 * 0.9,))
    workload = build_workload(deep(), StepOptions(microbatch_size=64, num_microbatches=4))
    assert [(feed.ops, feed.num_bytes) for feed in workload.feeds] == [((0,), 64 * 512 * 4)]
    found = study(workload, cluster)
    assert found.stages[0].node == "pc" and found.stages[-1].fence == "lab"
    for key, value, words in (
        ("pin", [{"stage": "middle", "to": "lab"}], "middle"),
        ("pin", [{"stage": "first", "to": "labb"}], r"pin\[0\] names 'labb', no fence or node; did you mean lab\?"),
        ("pin", [{"stage": "first", "too": "lab"}], r"did you mean pin\[0\].to"),
        ("owner", {"fence": "cellar"}, "known: lab, home"),
        ("owner", {"site": "lab"}, "unknown key owner.site"),
    ):
        with pytest.raises(UserError, match=words):
            build_spec({**BASE, key: value})
