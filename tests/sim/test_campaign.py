"""Campaigns: a still world keeps the plan's promise, a seed is a world, losses are survived and counted."""

from __future__ import annotations

import json

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.test_advice import two_sites
from tests.sim.test_planning import LAB, deep
from typer.testing import CliRunner

from fusionllm.cli.simulate import simulate as command
from fusionllm.errors import PlanError, UserError
from fusionllm.ir.graph import encode_graph
from fusionllm.schedule.workload import StepOptions, build_workload
from fusionllm.sim.campaign import _without, simulate
from fusionllm.sim.world import World, WorldOptions

STILL = WorldOptions(jitter=0, drift=0)


def workload(count: int = 8, size: int = 32):
    return build_workload(deep(), StepOptions(microbatch_size=size, num_microbatches=count, precision="float32"))


def test_a_still_world_keeps_what_the_plan_promised():
    found = simulate(workload(), two_sites("8 Mbps"), 12, 0, STILL)
    assert found.clock_s == pytest.approx(12 * found.predicted_step_s)
    assert found.slowdown == pytest.approx(1)
    assert found.losses == found.redone == 0 and found.plans == 1 and found.idle_s == 0


@settings(max_examples=8)
@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 100.0, 1000.0]), st.integers(0, 4))
def test_a_seed_is_a_world_and_the_clock_adds_up(seed, loss_every_s, replan_every):
    world = WorldOptions(
        jitter=0.2, drift=0.5, loss_every_s=loss_every_s, back_s=20, detect_s=3, checkpoint_every=4,
        replan_every=replan_every,
    )  # fmt: skip
    first, again = (simulate(workload(), two_sites("8 Mbps"), 12, seed, world) for _ in range(2))
    assert first == again
    assert len(first.step_s) == 12 and all(s > 0 for s in first.step_s)
    assert first.clock_s >= sum(first.step_s) * (1 - 1e-9)
    if not first.redone:
        assert first.clock_s == pytest.approx(sum(first.step_s) + first.idle_s)
    assert (first.losses > 0) >= (first.redone > 0) and first.plans >= 1 + (first.losses > 0)
    times = [one.clock_s for one in first.happenings]
    assert times == sorted(times)


def test_another_seed_is_another_world():
    runs = [simulate(workload(), two_sites("8 Mbps"), 5, seed, WorldOptions()) for seed in (1, 2)]
    assert runs[0].step_s != runs[1].step_s


def test_a_loss_takes_the_job_back_and_costs_time():
    world = WorldOptions(jitter=0, drift=0, loss_every_s=100, back_s=50, detect_s=5, checkpoint_every=5)
    found = simulate(workload(), two_sites("8 Mbps"), 60, 4, world)
    assert found.losses >= 1 and found.plans >= 1 + found.losses and found.slowdown > 1
    assert found.idle_s >= 5 * found.losses
    assert found.redone <= 4 * found.losses
    assert any("lost; back to step" in one.what for one in found.happenings)


def test_jobs_that_get_nowhere_are_named():
    gone = WorldOptions(jitter=0, drift=0, loss_every_s=30, back_s=0)
    with pytest.raises(PlanError, match=r"after \d+ steps no plan is left, and no node comes back: all nodes are lost"):
        simulate(workload(), two_sites("8 Mbps"), 1000, 0, gone)
    flaky = WorldOptions(jitter=0, drift=0, loss_every_s=5, back_s=1, detect_s=0, checkpoint_every=1000)
    with pytest.raises(PlanError, match="losses without a checkpoint"):
        simulate(workload(2, 256), two_sites("8 Mbps", count=1), 1000, 0, flaky)
    for bad in (WorldOptions(jitter=-1), WorldOptions(drift=float("nan")), WorldOptions(checkpoint_every=0)):
        with pytest.raises(UserError, match="must lie between"):
            simulate(workload(), two_sites("8 Mbps"), 1, 0, bad)
    with pytest.raises(UserError, match="steps 0"):
        simulate(workload(), two_sites("8 Mbps"), 0, 0, STILL)


def test_what_one_source_of_chance_draws_does_not_depend_on_another():
    cluster = two_sites("8 Mbps")
    calm, wild = (World(cluster, WorldOptions(jitter=j, loss_every_s=500), 7) for j in (0.0, 1.0))
    for _ in range(50):
        wild.jitter()
    assert calm.advance(2000) == wild.advance(2000)
    assert calm.drifted() == wild.drifted()


def test_drift_stays_around_the_rates_that_were_given():
    cluster = two_sites("8 Mbps")
    world = World(cluster, WorldOptions(drift=0.3, drift_s=10), 0)
    seen = []
    for k in range(1, 400):
        world.advance(100.0 * k)
        rates = world.drifted().bandwidth_bytes_per_s
        seen.append(rates[0][2] / cluster.bandwidth_bytes_per_s[0][2])
        assert rates[0][1] == cluster.bandwidth_bytes_per_s[0][1]
    seen.sort()
    assert 0.9 < seen[200] < 1.1 and 0.5 < seen[20] < seen[-20] < 2


def test_what_a_node_must_fetch():
    assert _without([(0, 10)], []) == [(0, 10)]
    assert _without([(0, 10)], [(3, 5)]) == [(0, 3), (5, 10)]
    assert _without([(0, 4), (6, 9)], [(2, 7)]) == [(0, 2), (7, 9)]
    assert _without([(2, 4)], [(0, 9)]) == []


def test_the_command(tmp_path):
    app = typer.Typer()
    app.command()(command)
    graph = tmp_path / "graph.json"
    graph.write_bytes(encode_graph(deep()))
    words = [str(graph), "--cluster", str(LAB), "--steps", "6", "--num-microbatches", "4", "--seed", "5"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "6 steps in" in shown.output and "0 losses, 1 plans" in shown.output
    first, again = (CliRunner().invoke(app, [*words, "--json"]).stdout for _ in range(2))
    assert first == again and len(json.loads(first)["step_s"]) == 6
    lossy = CliRunner().invoke(app, [*words, "--steps", "60", "--loss-every", "40 ms", "--back", "1 ms"])
    assert "lost; back to step 0" in lossy.output and "0 losses" not in lossy.output
    assert max(map(len, lossy.output.splitlines())) > 80  # a line is a line where there is no terminal
    bad = CliRunner().invoke(app, [*words, "--loss-every", "soon"])
    assert bad.exit_code == 2 and "'soon'" in bad.output
