"""Nodes of different frameworks in one run, and a machine without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.mixed import MixedCluster, mixed_config, site_without_torch, takeover
from benchmarks.plain import plain_steps

import fusionllm
from fusionllm.errors import FusionError

SOURCE = Path(fusionllm.__file__).parents[1]


def test_torch_and_jax_train_as_one_process_does_with_the_same_dropout(tmp_path):
    with MixedCluster(["torch", "jax"], tmp_path / "nodes") as ticket:
        config = mixed_config(tmp_path, ticket, "gpt2-dropout", nodes=2, steps=4)
        result = fusionllm.train(config=config)
    expected = [loss for loss, _ in plain_steps(config, tmp_path)]
    assert result.losses == pytest.approx(expected, rel=1e-6)


def test_a_spare_torch_node_takes_the_stage_of_a_killed_jax_node_by_itself(tmp_path, capsys):
    losses, expected = takeover("gpt2", ["torch", "jax"], 4, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert "node1" in capsys.readouterr().out


@pytest.mark.timeout(900)  # kernels compile, on a machine that may do other things
def test_tinygrad_trains_a_stage_between_two_of_torch(tmp_path):
    pytest.importorskip("tinygrad")
    with MixedCluster(["torch", "tinygrad", "torch"], tmp_path / "nodes") as ticket:
        config = mixed_config(tmp_path, ticket, "llama", nodes=3, steps=2)
        result = fusionllm.train(config=config)
    assert result.losses == pytest.approx([loss for loss, _ in plain_steps(config, tmp_path)], rel=1e-5)


def test_nodes_without_torch_are_planned_by_their_measured_speed(tmp_path):
    pytest.importorskip("tinygrad")
    with MixedCluster(["tinygrad", "jax"], tmp_path / "nodes") as ticket:
        planned = {"broker": ticket, "nodes": 2, "threads": 1, "partition": "dp"}
        config = mixed_config(tmp_path, ticket, "llama", nodes=2, steps=2, cluster=planned)
        result = fusionllm.train(config=config)
    assert [stage.node for stage in result.plan.stages] == ["node1"]
    assert result.losses == pytest.approx([loss for loss, _ in plain_steps(config, tmp_path)], rel=1e-5)


def test_codecs_need_torch_and_planning_says_so(tmp_path):
    compression = {"forward": "int8", "backward": "int8", "links": "all"}
    with MixedCluster(["jax", "jax"], tmp_path / "nodes") as ticket:
        config = mixed_config(tmp_path, ticket, "llama", nodes=2, steps=1, compression=compression)
        with pytest.raises(FusionError, match=r"node0, whose backend jax has no codecs.*fusionllm\[torch\]"):
            fusionllm.train(config=config)


@pytest.mark.parametrize(
    ("wish", "answer"), [("auto", "jax"), ("torch", "torch is not installed here; pip install 'fusionllm[torch]'")]
)
def test_a_machine_without_torch_chooses_jax(tmp_path, wish, answer):
    code = f"import fusionllm.compute as c, sys; print(c.choose_backend({wish!r}), 'torch' in sys.modules)"
    path = f"{SOURCE}{os.pathsep}{site_without_torch(tmp_path)}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == f"{answer} False\n" if wish == "auto" else answer in done.stderr
