"""Low-rank cuts: the stream crosses in few channels, training goes on, and what is exported computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.coded import CodedPipeline

from fusionllm.capture.bottleneck import add_bottlenecks, is_open, notice, without_bottlenecks
from fusionllm.capture.export import Captured, capture_module
from fusionllm.capture.options import BottleneckConfig, ModelConfig
from fusionllm.capture.sources import resolve_model
from fusionllm.capture.weights import export_hf, write_back
from fusionllm.compute import OptimConfig
from fusionllm.errors import UserError
from fusionllm.estimate.flops import anchored_flops
from fusionllm.ir.codec import parse_codec, wire_num_bytes
from fusionllm.schedule.partition import partition_graph

RANK = 4
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": 3, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 24, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
    },
    "llama": {
        "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 24, "max_position_embeddings": 16,
    },
}  # fmt: skip


def tokens(seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    """A pattern to learn: each token is the last plus one or two."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 3, (rows, 12), generator=generator).cumsum(1) % 24
    return {"input_ids": ids, "labels": ids}


def config(source: str = "gpt2", **bottleneck: Any) -> ModelConfig:
    return ModelConfig(source=source, config=SHAPES[source], bottleneck=BottleneckConfig(cuts=2, **bottleneck))


def model_of(source: str = "gpt2", **bottleneck: Any) -> torch.nn.Module:
    return resolve_model(config(source, **bottleneck), base_dir=Path(), seed=1).module


def train(
    module: torch.nn.Module, steps: int, forward: str = "int4", backward: str = "tangent(int4)", lr: float = 1e-2
) -> tuple[list[float], CodedPipeline]:
    """Train in three stages through codecs and write the weights back. Returns losses and the pipeline."""
    captured: Captured = capture_module(module, tokens(0))
    graph = captured.graph
    symbols = dict.fromkeys(graph.symbols, 4)
    boundaries = partition_graph(graph, 3, "equal-compute", symbols, costs=anchored_flops(graph, symbols))
    optim = OptimConfig(name="adamw", lr=lr, warmup_steps=5)
    pipeline = CodedPipeline(captured, optim, steps, boundaries, forward=forward, backward=backward)
    batches = [{n: t.numpy() for n, t in tokens(step).items()} for step in range(steps)]
    losses = [pipeline.train_step(step, [batch]) for step, batch in enumerate(batches)]
    write_back(module, pipeline.state())
    return losses, pipeline


def crossing(pipeline: CodedPipeline) -> set[tuple[int, ...]]:
    return {shape for _, _, shape in pipeline._ways}


@pytest.mark.parametrize("source", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["learned", "fixed"])
def test_only_the_rank_crosses_and_the_model_learns(source: str, kind: str) -> None:
    module = model_of(source, rank=RANK, kind=kind)
    losses, pipeline = train(module, 60)
    assert crossing(pipeline) == {(4, 12, RANK)}
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0
    codecs = [parse_codec(text) for text in ("int4", "tangent(int4)")]
    each_way = sum(wire_num_bytes(spec, (4, 12, RANK), "float32") for spec in codecs)
    assert pipeline.bytes_sent()[0] == 60 * 2 * each_way


@pytest.mark.parametrize("source", ["gpt2", "llama"])
def test_fixed_cuts_lose_nothing_and_merge_into_the_weights(source: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = model_of(source, rank=RANK, kind="fixed")
    _, pipeline = train(module, 20)
    before = {n: p for n, p in model_of(source, rank=RANK, kind="fixed").named_parameters() if not p.requires_grad}
    assert before and all(torch.equal(p, module.get_parameter(n)) for n, p in before.items())
    module.eval()
    with torch.no_grad():
        here = module(**tokens(99)).loss.item()
        assert without_bottlenecks(module)(**tokens(99)).loss.item() == pytest.approx(here, abs=2e-5)
        export_hf(module, tmp_path / "out")
        there = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert there(**tokens(99)).loss.item() == pytest.approx(here, abs=2e-5)
    # Without codecs the stages compute what the whole model does: the cut itself loses nothing.
    batch = {n: t.numpy() for n, t in tokens(99).items()}
    assert pipeline.mean_loss([batch], coded=False) == pytest.approx(here, abs=2e-5)


def test_learned_cuts_that_stay_are_exported_with_their_own_modelling_file(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = model_of(rank=RANK)
    train(module, 20)
    module.eval()
    export_hf(module, tmp_path / "out")
    with torch.no_grad():
        here = module(**tokens(99)).loss.item()
        there = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
        assert there(**tokens(99)).loss.item() == pytest.approx(here, abs=1e-6)
    with pytest.raises(UserError, match="still carry its stream"):
        without_bottlenecks(module)
    with pytest.raises(UserError, match=r"model\.bottleneck\.rank = 4, cuts = 2"):
        resolve_model(ModelConfig(source="out"), base_dir=tmp_path, seed=0)
    with pytest.raises(UserError, match="keep the rank"):
        resolve_model(ModelConfig(source="out", bottleneck=BottleneckConfig(rank=5, cuts=2)), base_dir=tmp_path, seed=0)


def test_the_rank_grows_back_and_an_ordinary_model_is_left(tmp_path: Path) -> None:
    """A job with cuts, then a shorter one that anneals them away, from the folder of the first."""
    from transformers import AutoModelForCausalLM

    first = model_of(rank=RANK)
    losses, _ = train(first, 80)
    export_hf(first, tmp_path / "first")
    again = ModelConfig(source="first", bottleneck=BottleneckConfig(rank=RANK, cuts=2, anneal=30))
    second = resolve_model(again, base_dir=tmp_path, seed=7).module
    with torch.no_grad():
        whole = first.eval()(**tokens(99)).loss.item()
        assert second.eval()(**tokens(99)).loss.item() == pytest.approx(whole, abs=1e-6)
    more, _ = train(second.train(), 29, "hadamard", "tangent(hadamard)", lr=2e-3)
    assert not is_open(second)
    even_more, _ = train(second.train(), 10, "hadamard", "tangent(hadamard)", lr=1e-3)
    assert is_open(second)
    assert max(more + even_more) < losses[0] - 0.5
    second.eval()
    export_hf(second, tmp_path / "second")
    with torch.no_grad():
        here = second(**tokens(99)).loss.item()
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval()
        assert plain(**tokens(99)).loss.item() == pytest.approx(here, abs=1e-6)
    assert here < losses[0] - 0.8


def test_a_config_that_does_not_fit_says_so() -> None:
    for bottleneck, text in (
        ({"rank": 32}, "the model's width is 32"),
        ({"rank": 4, "cuts": 3}, "has 3 layers, so there can be 1 to 2"),
        ({"rank": 4, "kind": "fixed"}, "resid_pdrop = 0"),
    ):
        shape = {**SHAPES["gpt2"], "resid_pdrop": 0.1}
        with pytest.raises(UserError, match=text):
            resolve_model(
                ModelConfig(source="gpt2", config=shape, bottleneck=BottleneckConfig(**bottleneck)),
                base_dir=Path(), seed=0,
            )  # fmt: skip
    tied = ModelConfig(
        source="gpt2", config={**SHAPES["gpt2"], "tie_word_embeddings": True},
        bottleneck=BottleneckConfig(rank=4, kind="fixed"),
    )  # fmt: skip
    with pytest.raises(UserError, match="tie_word_embeddings = false"):
        resolve_model(tied, base_dir=Path(), seed=0)
    with pytest.raises(UserError, match="destroys it"):
        add_bottlenecks(model_of(), BottleneckConfig(rank=4, kind="fixed"), pretrained=True)
    with pytest.raises(UserError, match="has 0 layers"):
        add_bottlenecks(torch.nn.Linear(4, 4), BottleneckConfig(rank=2))


def test_the_job_says_what_it_does_to_the_model() -> None:
    assert notice(BottleneckConfig()) == ""
    assert "trust_remote_code" in resolve_model(config(rank=4), base_dir=Path(), seed=0).notice
    assert "ordinary model" in notice(BottleneckConfig(rank=4, anneal=10))
    assert "frozen" in notice(BottleneckConfig(rank=4, kind="fixed"))
