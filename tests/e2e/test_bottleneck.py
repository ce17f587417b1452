"""A low-rank cut between two node processes: few bytes cross, the losses are one process's, and the export loads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tests.e2e.test_codecs import bytes_between, config_of, losses_in_one_process

import fusionllm
from fusionllm.api.prepare import prepare
from fusionllm.capture.options import BottleneckConfig
from fusionllm.estimate.flops import anchored_flops
from fusionllm.ir.codec import parse_codec, wire_num_bytes
from fusionllm.schedule.partition import partition_graph

RANK = 4


@pytest.mark.parametrize("kind", ["learned", "fixed"])
def test_a_run_with_a_low_rank_cut(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    config = config_of(tmp_path, forward="int4", backward="tangent(int4)", links="all")
    bottleneck = BottleneckConfig(rank=RANK, cuts=1, kind=kind)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, bottleneck=bottleneck))
    result = fusionllm.train(config=config)
    graph = prepare(config, Path.cwd()).captured.graph
    symbols = dict.fromkeys(graph.symbols, 2)
    boundaries = partition_graph(graph, 2, "equal-compute", symbols, costs=anchored_flops(graph, symbols))
    assert result.losses == losses_in_one_process(config, boundaries)
    both_ways = sum(
        wire_num_bytes(parse_codec(text), (2, 32, RANK), "float32") for text in ("int4", "tangent(int4)")
    )  # fmt: skip
    dense = 2 * 2 * 32 * 32 * 4
    assert dense / both_ways > 20
    # 15 microbatches each way besides the validations, heads and the loss: far from the dense 15 x 16 KiB.
    assert bytes_between(result) < 15 * dense
    fusionllm.export(result.run_dir, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=kind == "learned").eval()
    ids = torch.arange(24)[None] % 200
    with torch.no_grad():
        here = result.model.eval()(input_ids=ids, labels=ids).loss.item()
        assert loaded(input_ids=ids, labels=ids).loss.item() == pytest.approx(here, abs=1e-4)
