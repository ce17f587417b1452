"""A pipeline in one process takes one codec for all cuts or one per cut, and the paper's rule gives the latter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.coded import CodedPipeline
from benchmarks.convergence import METHODS

from fusionllm.capture.export import Captured, capture_module
from fusionllm.compute import OptimConfig
from fusionllm.errors import UserError
from fusionllm.ir.codec import parse_codec, wire_num_bytes
from fusionllm.schedule.partition import partition_graph

WIDTH = 16


class Chain(torch.nn.Module):
    """Linear layers in a row and a mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def pipeline_of(forward: str, backward: str) -> CodedPipeline:
    torch.manual_seed(0)
    captured: Captured = capture_module(Chain(), {"x": torch.randn(8, WIDTH)})
    boundaries = partition_graph(captured.graph, 3, "equal-number", dict.fromkeys(captured.graph.symbols, 8))
    return CodedPipeline(captured, OptimConfig(), 1, boundaries, forward=forward, backward=backward)


def test_each_cut_has_its_own_codecs():
    pipeline = pipeline_of("int8 | identity", "identity | topk-paper:ratio=32")
    pipeline.train_step(0, [{"x": torch.randn(8, WIDTH).numpy()}])
    by_place = {(k[0], consumer): str(way.state.spec) for (k, consumer, _), way in pipeline._ways.items()}
    assert by_place == {("f", 1): "int8", ("f", 2): "identity", ("b", 1): "identity", ("b", 2): "topk-paper:ratio=32"}
    dense = 4 * 8 * WIDTH
    coded = [wire_num_bytes(parse_codec(c), (8, WIDTH), "float32") for c in ("int8", "topk-paper:ratio=32")]
    assert pipeline.bytes_sent() == (2 * dense + sum(coded), 4 * dense)


def test_another_number_of_codecs_than_cuts_is_refused():
    with pytest.raises(UserError, match="3 codecs for 2 cuts"):
        pipeline_of("int8 | int8 | int8", "identity")


def test_the_papers_rule_compresses_the_slow_link_of_two_labs_a_hundredfold():
    scenario = (Path(__file__).parents[2] / "examples" / "scenarios" / "two-labs.toml").read_text()
    assert '"1 Gbps"' in scenario and '"8 Mbps"' in scenario
    fast, slow, other = map(parse_codec, METHODS["adatopk-paper"][0].split(" | "))
    assert fast == other and (slow.value("ratio"), fast.value("ratio")) == (300, pytest.approx(2.4))
    assert wire_num_bytes(slow, (512, 256), "float32") == pytest.approx(512 * 256 * 4 / 100, rel=2e-3)
