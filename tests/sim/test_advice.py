"""What would help: changes that are tried, found and said; the picture; and what makes a plan fit."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest
import typer
from tests.sim.test_planning import LAB, deep
from typer.testing import CliRunner

from fusionllm.cli.plan import plan
from fusionllm.errors import PlanError
from fusionllm.ir.graph import encode_graph
from fusionllm.schedule.workload import StepOptions, build_workload
from fusionllm.sim.advice import advise
from fusionllm.sim.cluster import build_cluster, build_spec
from fusionllm.sim.study import best_plan, study


def two_sites(rate: str, memory: str = "1 GB", latency: str = "1 ms", count: int = 2):
    node = {"flops_per_s": 1e9, "memory": memory, "count": count}
    return build_cluster(
        build_spec(
            {
                "fence": [{"name": "a", "bandwidth": "10 Gbps"}, {"name": "b", "bandwidth": "10 Gbps"}],
                "node": [{**node, "fence": "a"}, {**node, "fence": "b"}],
                "link": [{"a": "a", "b": "b", "bandwidth": rate, "latency": latency}],
            }
        )
    )


def advice_of(cluster, size=64, count=16, rebuild=True):
    def make(rows, microbatches):
        options = StepOptions(microbatch_size=rows, num_microbatches=microbatches, precision="float32")
        return build_workload(deep(), options)

    workload = make(size, count)
    best = best_plan(workload, cluster)
    found = study(workload, cluster, best)
    memory = [(stage.memory_bytes, stage.limit_bytes) for stage in found.stages]
    return found, advise(
        workload, cluster, best.placement, found.step_s, memory, size, make if rebuild else None
    )  # fmt: skip


def test_a_slow_link_is_what_would_help():
    found, advice = advice_of(two_sites("2 Mbps", count=1), rebuild=False)
    link = next(one for one in advice if one.change.startswith("the link between a and b 4 times as fast"))
    faster = study(
        build_workload(deep(), StepOptions(microbatch_size=64, num_microbatches=16, precision="float32")),
        two_sites("8 Mbps", count=1),
    )
    assert link.step_s == pytest.approx(faster.step_s)
    assert link.speedup == pytest.approx(found.step_s / faster.step_s) and link.speedup > 1.05


def test_where_compute_binds_it_is_another_node_or_more_microbatches():
    _, advice = advice_of(two_sites("10 Gbps", latency="0.1 ms"))
    assert 1 <= len(advice) <= 3 and not any("link" in one.change for one in advice[:1])
    assert any(one.change.startswith("one more") or "microbatches" in one.change for one in advice)
    assert [one.speedup for one in advice] == sorted((one.speedup for one in advice), reverse=True)
    assert all(one.speedup > 1 for one in advice)


def test_full_nodes_are_helped_by_memory():
    _, advice = advice_of(two_sites("100 Mbps", memory="8.7 MB", latency="200 ms"), size=16, rebuild=False)
    assert any(one.change.startswith("twice the memory") for one in advice)


def test_a_large_cluster_is_advised_on_the_fences_it_uses():
    near = {"name": "a", "bandwidth": "10 Gbps"}
    far = [{"name": f"far-{k}-"} for k in range(30)]
    node = {"flops_per_s": 1e9, "memory": "1 GB"}
    spec = {
        "fence": [near, *far],
        "node": [{**node, "fence": "a", "count": 3}, *({**node, "fence": one["name"], "count": 3} for one in far)],
        "otherwise": {"bandwidth": "1 Mbps"},
    }
    found, advice = advice_of(build_cluster(build_spec(spec)), rebuild=False)
    assert {stage.fence for stage in found.stages} == {"a"}
    assert any(one.change == "one more node like a0 in a" for one in advice)


def test_smaller_microbatches_are_named_where_they_fit():
    options = StepOptions(microbatch_size=4096, num_microbatches=1, precision="float32")
    cluster = two_sites("1 Gbps", memory="20 MB")

    def smaller():
        yield (
            "microbatches of 64, 64 a step",
            lambda: build_workload(deep(), msgspec.structs.replace(options, microbatch_size=64, num_microbatches=64)),
        )

    with pytest.raises(PlanError, match=r"stage \d needs .* or microbatches of 64, 64 a step"):
        best_plan(build_workload(deep(), options), cluster, smaller())


def test_the_picture_is_svg_and_names_the_nodes(tmp_path):
    app = typer.Typer()
    app.command()(plan)
    graph, svg = tmp_path / "graph.json", tmp_path / "plan.svg"
    graph.write_bytes(encode_graph(deep()))
    words = [str(graph), "--cluster", str(LAB), "--num-microbatches", "4", "--no-advice"]
    shown = CliRunner().invoke(app, [*words, "--svg", str(svg)])
    assert shown.exit_code == 0, shown.output
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert "would help" not in shown.output
    assert "lab (4)" in svg.read_text()
    coded = CliRunner().invoke(app, [*words, "--codecs", "deadline"])
    assert coded.exit_code == 0 and "with codecs by the rule deadline" in coded.output
    wrong = CliRunner().invoke(app, [*words, "--codecs", "topk"])
    assert wrong.exit_code == 2 and "known: adatopk-paper" in wrong.output
    bad = CliRunner().invoke(app, [*words, "--svg", str(tmp_path / "no" / "plan.svg")])
    assert bad.exit_code == 2 and "in a folder that is there" in bad.output
    helped = CliRunner().invoke(app, [*words[:-1], "--pipeline", "zb-h1"])
    assert helped.exit_code == 0 and "schedule zb-h1" in helped.output
