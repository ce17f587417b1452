"""Jobs that are planned by what nodes measured of themselves and of the links between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.coded import losses_in_one_process

import fusionllm
from fusionllm.api.config import RunConfig, build_config
from fusionllm.broker import server
from fusionllm.protocol.messages import LinkShape
from fusionllm.telemetry.events import Note, StepMetrics
from fusionllm.units import parse_bandwidth_bytes_per_s

TEXT = Path(__file__).parents[2] / "examples" / "data" / "shakespeare.txt"


def config_of(
    root: Path, slow: str, partition: str, site: tuple[dict[str, str], ...] = (), **compression: Any
) -> RunConfig:
    return build_config(
        {
            "run": {"root": str(root), "seed": 5},
            "model": {
                "source": "llama",
                "config": {
                    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
                    "num_key_value_heads": 2, "max_position_embeddings": 32,
                },
            },
            "data": {"source": str(TEXT), "seq_len": 32},
            "train": {"steps": 3, "global_batch": 6, "microbatch_size": 2, "eval_batches": 2},
            "optimizer": {"lr": 3e-3},
            "cluster": {
                "nodes": 2, "threads": 1, "device": "cpu", "fences": [1, 1], "partition": partition,
                "slow_link": {"bandwidth": slow, "latency": "5 ms"}, "site": list(site),
            },
            "compression": compression,
            "output": {"sinks": [], "plot": False},
        }
    )  # fmt: skip


def train(config: RunConfig) -> tuple[fusionllm.api.TrainResult, str]:
    notes: list[Any] = []
    result = fusionllm.train(config=config, progress=notes.append)
    return result, " ".join(note.text for note in notes if isinstance(note, Note) and note.kind == "plan")


def test_the_planner_leaves_out_a_node_behind_a_slow_link(tmp_path):
    result, told = train(config_of(tmp_path, "1 Mbps", "dp"))
    assert result.plan.num_stages == 1 and len(result.losses) == 3
    assert "predicted" in told and "op-fence" in told and "equal-compute" in told
    assert result.summary.extra["predicted_step_s"] > 0


def test_the_deadline_rule_codes_a_slow_link_just_enough(tmp_path):
    config = config_of(tmp_path, "1 Mbps", "equal-compute", rule="deadline", floor="hadamard")
    result, told = train(config)
    assert result.plan.num_stages == 2
    assert "node0->node1: hadamard, back tangent(hadamard)" in told
    by_hand = config_of(tmp_path, "1 Mbps", "equal-compute", forward="hadamard", backward="tangent(hadamard)")
    assert result.losses == losses_in_one_process(by_hand, result.plan.boundaries)
    assert result.summary.val_coded_loss != result.summary.val_loss


def test_a_link_that_was_measured_wrongly_changes_its_codec_while_the_run_goes_on(tmp_path, monkeypatch):
    """The broker has the link probed at another rate than it has in the job, as if it changed in between."""
    fast = LinkShape(parse_bandwidth_bytes_per_s("1 Gbps"), 0.005)
    monkeypatch.setattr(server, "emulated_link", lambda options, a, b: fast)
    config = config_of(tmp_path, "1 Mbps", "equal-compute", rule="deadline", floor="hadamard", rule_every=4)
    config = msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, steps=12))
    result, told = train(config)
    assert "node0->node1" not in told
    (change,) = (e.text for e in result.history if isinstance(e, Note) and e.kind == "codecs")
    assert change.startswith("node0->node1: identity, back identity becomes hadamard, back tangent(hadamard) from step")
    first = int(change.partition("from step ")[2].split()[0]) - 1
    sent = [e.link_bytes["node0->node1"] for e in result.history if isinstance(e, StepMetrics)]
    assert 4 * min(sent[first + 1 :]) < max(sent[:first])
    by_hand = config_of(tmp_path, "1 Mbps", "equal-compute", forward="hadamard", backward="tangent(hadamard)")
    by_hand = msgspec.structs.replace(by_hand, train=config.train)
    assert result.losses == losses_in_one_process(by_hand, result.plan.boundaries, first)
    assert result.summary.val_coded_loss != result.summary.val_loss


def test_a_fast_link_stays_dense_under_the_deadline_rule(tmp_path):
    result, told = train(config_of(tmp_path, "10 Gbps", "equal-compute", rule="deadline"))
    assert result.plan.num_stages == 2 and "node0->node1" not in told
    assert result.summary.val_coded_loss is None


def test_the_papers_pair_of_scheduler_and_rule(tmp_path):
    result, told = train(config_of(tmp_path, "50 Mbps", "op-fence", rule="adatopk-paper", ratio=10))
    assert result.plan.num_stages == 2
    assert "topk-paper:ratio=30" in told  # the slowest link is sparsified three times the ratio


@pytest.mark.parametrize("line", [{"uplink": "1 Mbps"}, {"uplink": "10 Gbps", "downlink": "1 Mbps"}])
def test_a_declared_line_counts_where_the_measured_link_is_fast(tmp_path, line):
    """What is measured says 10 Gbps; the declared line of the second node's site is what the plan goes by."""
    site = ({"name": "fence1", **line},)
    result, told = train(config_of(tmp_path, "10 Gbps", "equal-compute", site, rule="deadline", floor="hadamard"))
    slow = "back tangent" if line["uplink"] == "1 Mbps" else "hadamard, back"
    assert result.plan.num_stages == 2 and "node0->node1" in told and slow in told
    cut_bytes, num_microbatches, line_bytes_per_s = 2 * 32 * 64 * 4, 3, 1e6 / 8
    plain, _ = train(config_of(tmp_path / "plain", "10 Gbps", "op-fence", site))
    assert plain.plan.num_stages == 2
    assert plain.summary.extra["predicted_step_s"] >= num_microbatches * cut_bytes / line_bytes_per_s
    alone, _ = train(config_of(tmp_path / "alone", "10 Gbps", "dp", site))
    assert alone.plan.num_stages == 1
