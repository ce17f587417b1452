"""Scenario files: what is refused and how; what the shipped ones make."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusionllm.api import load_config
from fusionllm.errors import UserError
from fusionllm.protocol.messages import LinkShape
from fusionllm.testbed import Testbed, build_scenario, load_scenario
from fusionllm.testbed.network import build_network, paced_settings
from fusionllm.testbed.scenario import NAME

SCENARIOS = sorted((Path(__file__).parents[2] / "examples" / "scenarios").glob("*.toml"))


def tree(**changes: object) -> dict[str, object]:
    hosts = [{"name": "x0", "fence": "x"}, {"name": "x1", "fence": "x"}, {"name": "y0", "fence": "y"}]
    return {"name": "try", "fence": [{"name": "x", "latency": "1 ms"}, {"name": "y"}], "host": hosts} | changes


LINK = {"a": "x", "b": "y", "bandwidth": "8 Mbps"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hots": []}, "did you mean host"),
        ({"host": []}, "0 hosts"),
        ({"host": [{"name": "x0", "fence": "z"}]}, "no fence; known: x, y"),
        ({"host": [{"name": "x", "fence": "x"}]}, "give each its own"),
        ({"host": [{"name": "../x", "fence": "x"}]}, "small letters"),
        ({"host": [{"name": "x0", "fence": "x", "cpu": -1.0}]}, "cpu is -1.0"),
        ({"host": [{"name": "x0", "fence": "x", "cpu": float("nan")}]}, "cpu is nan"),
        ({"host": [{"name": "x0", "fence": "x", "memory": "1 MiB"}]}, "16 MiB"),
        ({"host": [{"name": "x0", "fence": "x", "role": "owner"}]}, "nobody would compute"),
        ({"host": [{"name": f"h{i}", "fence": "x"} for i in range(65)]}, "1 to 64"),
        ({"host": "x0"}, r"\[\[host\]\]"),
        ({"congestion": "vegas"}, "cubic, reno, bbr"),
        ({"link": [LINK | {"bandwidth": "8"}]}, "unknown rate unit"),
        ({"link": [LINK | {"loss": 1.0}]}, "loss is 1.0"),
        ({"link": [LINK | {"loss": float("nan")}]}, "loss is nan"),
        ({"link": [LINK | {"latency": "1 h"}]}, "the most is 10 s"),
        ({"link": [LINK | {"b": "yy"}]}, "no fence or host; did you mean y"),
        ({"link": [LINK | {"b": "y0"}]}, "a fence and a host"),
        ({"link": [LINK | {"b": "x"}]}, "to itself"),
        ({"link": [LINK | {"speed": 1}]}, r"link\[0\].speed"),
        ({"otherwise": {"bandwith": "1 Mbps"}}, "did you mean otherwise.bandwidth"),
        ({"name": 7}, "name = 7: expected `str`, got `int`, so write it in quotes"),
        ({"link": [LINK | {"bandwidth": 8}]}, "bandwidth = 8: .* in quotes, with its unit"),
        ({"link": [LINK | {"loss": "1 %"}]}, "loss = '1 %': .* a number without quotes or unit"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        build_scenario(tree(**changes))


def test_a_file_without_what_it_needs():
    with pytest.raises(UserError, match=r"^the file has no name, which it needs$"):
        build_scenario({key: value for key, value in tree().items() if key != "name"})


def test_a_file_that_is_not_there_or_not_toml(tmp_path):
    for text in (None, "name = ", b"\xff"):
        path = tmp_path / "s.toml"
        if text is not None:
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(UserError, match=r"s\.toml"):
            load_scenario(path)


def test_the_more_exact_link_wins_and_directions_differ():
    links = [LINK | {"back_bandwidth": "2 Mbps", "latency": "5 ms"}, {"a": "y0", "b": "x1", "bandwidth": "80 Mbps"}]
    pipes = build_network(build_scenario(tree(link=links)), "bed").pipes
    assert pipes["x0>y0"].rate_bytes_per_s == 1e6 and pipes["y0>x0"].rate_bytes_per_s == 0.25e6
    assert pipes["x1>y0"].rate_bytes_per_s == pipes["y0>x1"].rate_bytes_per_s == 10e6
    assert pipes["x0>y0"].delay_s == 0.005 and pipes["x0>x1"].delay_s == 0.001


def test_routes_share_what_a_fence_shares():
    fences = [{"name": "x", "uplink": "5 Mbps", "downlink": "20 Mbps"}, {"name": "y", "uplink": "6 Mbps"}]
    hosts = [*tree()["host"], {"name": "y1", "fence": "y", "downlink": "1 Mbps"}]
    network = build_network(build_scenario(tree(fence=fences, host=hosts)), "bed")

    def route(a: str, b: str) -> list[str]:
        return network.route(network.host(a), network.host(b))

    assert route("x0", "y0") == ["x:up", "x0>y0"] and route("y0", "x1") == ["y:up", "y0>x1", "x:down"]
    assert route("x0", "x1") == ["x0>x1"] and route("y0", "y1") == ["y0>y1", "y1:down"]
    assert network.offload
    assert not build_network(build_scenario(tree(link=[LINK | {"loss": 0.01}])), "bed").offload


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_shipped_scenarios_are_sound(path):
    scenario = load_scenario(path)
    assert scenario.name == path.stem and NAME.fullmatch(path.stem)
    assert scenario.owner.role == "owner" and len(scenario.nodes) in (4, 8, 24)
    assert sum(host.cpu for host in scenario.nodes) <= 2
    network = build_network(scenario, scenario.name)
    assert all(spec.rate_bytes_per_s or spec.delay_s for spec in network.pipes.values())


def test_all_scenarios_of_the_documentation_are_shipped():
    text = (Path(__file__).parents[2] / "docs" / "testbed.md").read_text()
    text = text.partition("## Scenarios")[2].partition("## ")[0]
    assert {path.stem for path in SCENARIOS} == set(re.findall(r"^\| `([a-z0-9.-]+)`", text, re.M))


def test_without_a_testbed_a_run_is_told_how_to_pace_its_links(monkeypatch):
    """As settings that its configuration takes; the reason comes first."""
    folder = SCENARIOS[0].parent
    settings = paced_settings(load_scenario(folder / "two-labs.toml"))
    config = load_config(None, settings)
    assert config.cluster.fences == (2, 2)
    assert config.fence_links()[0].shape == LinkShape(1e6, 0.025)
    homes = load_config(None, [*paced_settings(load_scenario(folder / "three-homes.toml")), "train.global_batch=64"])
    assert {link.shape for link in homes.fence_links()} == {LinkShape(5e6 / 8, 0.02)}  # the uplink
    assert load_config(None, paced_settings(load_scenario(folder / "lan.toml"))).fence_links() == ()
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(UserError, match=r"need root.*fences=.*slow_link\.bandwidth=8 Mbps"):
        Testbed(load_scenario(folder / "two-labs.toml")).start()


def test_nobody_is_told_why_there_is_no_testbed():
    """A process without root, as its user sees it: in a user namespace where nobody is mapped."""
    drop = ["unshare", "--user"]
    if shutil.which(drop[0]) is None or subprocess.run([*drop, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace can be made here")
    words = ["testbed", "run", str(SCENARIOS[0].parent / "two-labs.toml"), "a0", "true"]
    python = [sys.executable, "-m", "fusionllm.cli.main"]
    done = subprocess.run([*drop, *python, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "need root" in done.stderr and "slow_link" in done.stderr
