"""Codecs between node processes do to a run exactly what `compress` does to the numbers in one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from benchmarks.coded import losses_in_one_process

import fusionllm
from fusionllm.api.config import RunConfig, build_config
from fusionllm.api.trainer import Trainer
from fusionllm.store.checkpoint import list_checkpoints, load_checkpoint
from fusionllm.telemetry.events import Note, StepMetrics

TEXT = Path(__file__).parents[2] / "examples" / "data" / "shakespeare.txt"


def config_of(root: Path, **compression: object) -> RunConfig:
    return build_config(
        {
            "run": {"root": str(root), "seed": 5},
            "model": {
                "source": "llama",
                "config": {
                    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
                    "num_key_value_heads": 2, "max_position_embeddings": 32,
                },
            },
            "data": {"source": str(TEXT), "seq_len": 32},
            "train": {"steps": 5, "global_batch": 6, "microbatch_size": 2, "eval_batches": 2},
            "optimizer": {"lr": 3e-3},
            "cluster": {"nodes": 2, "threads": 1, "device": "cpu"},
            "compression": compression,
            "output": {"sinks": [], "plot": False},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> fusionllm.api.TrainResult:
    return fusionllm.train(config=config_of(tmp_path_factory.mktemp("dense")))


def bytes_between(result: fusionllm.api.TrainResult) -> int:
    return sum(result.summary.link_bytes[link] for link in ("node0->node1", "node1->node0"))


@pytest.mark.parametrize(
    ("forward", "backward"), [("hadamard", "tangent(hadamard:bits=2)"), ("klt", "tangent(topk:ratio=8)")]
)
def test_links_with_codecs_train_as_one_process_does_through_the_same_codecs(tmp_path, dense, forward, backward):
    config = config_of(tmp_path, forward=forward, backward=backward, links="all")
    result = fusionllm.train(config=config)
    assert result.losses == losses_in_one_process(config, result.plan.boundaries)
    assert result.losses[1:] != dense.losses[1:] and result.summary.val_coded_loss != result.summary.val_loss
    assert bytes_between(result) < bytes_between(dense) / 3


def test_the_last_steps_travel_dense_when_asked(tmp_path):
    config = config_of(tmp_path, forward="int8", backward="int8", links="all", dense_last=0.4)
    steps = [e for e in fusionllm.train(config=config).history if isinstance(e, StepMetrics)]
    sent = [e.link_bytes["node0->node1"] for e in steps]
    assert min(sent[3:]) > 2 * max(sent[1:3])


def test_links_inside_a_fence_stay_dense_by_default(tmp_path):
    config = config_of(tmp_path)
    config = msgspec.structs.replace(
        config,
        cluster=msgspec.structs.replace(config.cluster, nodes=3, fences=(2, 1)),
        compression=msgspec.structs.replace(config.compression, forward="hadamard", backward="hadamard"),
    )
    sent = fusionllm.train(config=config).summary.link_bytes
    assert sent["node1->node2"] < sent["node0->node1"] / 3


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("klt-ec:rate=2", "tangent:bits=8(klt-ec:rate=2)"),
        ("outlier:channels=2", "klt"),
        ("hadamard", "tangent(hadamard)"),
    ],
)
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path, forward, backward):
    config = config_of(tmp_path, forward=forward, backward=backward, links="all")
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, name="whole"),
        train=msgspec.structs.replace(config.train, checkpoint_every=3, eval_every=2, keep_checkpoints=3),
    )
    whole = fusionllm.train(config=config)
    cut = tmp_path / "cut"
    shutil.copytree(whole.run_dir, cut)
    checkpoints = cut / "checkpoints"
    shutil.rmtree(dict(list_checkpoints(checkpoints))[5])
    carried = load_checkpoint(checkpoints).manifest.codecs
    assert ("hadamard" in forward) or any("/send/activation/1/" in key for key in carried)
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name="cut", resume=True))
    again = fusionllm.train(config=config)
    assert again.losses == whole.losses[3:] and again.summary.val_coded_loss == whole.summary.val_coded_loss
    kept, remade = (load_checkpoint(r.run_dir / "checkpoints") for r in (whole, again))
    assert remade.manifest.files == kept.manifest.files


def test_links_that_went_dense_for_the_models_sake_stay_so_after_a_resume(tmp_path, monkeypatch):
    plain = Trainer.evaluate
    monkeypatch.setattr(
        Trainer, "evaluate", lambda self, step, tell: msgspec.structs.replace(plain(self, step, tell), loss=1.0 * step)
    )
    config = config_of(tmp_path, forward="int8", backward="int8", links="all", band=1e-9)
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, name="job"),
        train=msgspec.structs.replace(config.train, steps=3, eval_every=1),
    )
    first = fusionllm.train(config=config)
    assert [e.kind for e in first.history if isinstance(e, Note)] == ["quality"]
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, resume=True),
        train=msgspec.structs.replace(config.train, steps=5, eval_every=0),
    )
    runs = first, fusionllm.train(config=config)
    coded, dense = ([e.link_bytes["node0->node1"] for e in r.history if isinstance(e, StepMetrics)] for r in runs)
    assert min(dense) > 2 * coded[0]


def test_tied_gradients_by_a_codec_keep_the_copies_equal_and_their_loss_comes_later(tmp_path):
    """Both holders add up what was sent; a resumed run has what was held back."""
    config = config_of(tmp_path, tied_codec="ef(powersgd:rank=2)")
    tying = {**config.model.config, "tie_word_embeddings": True}
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, config=tying))
    dense = msgspec.structs.replace(
        config, compression=msgspec.structs.replace(config.compression, tied_codec="identity")
    )
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, name="whole"),
        train=msgspec.structs.replace(config.train, checkpoint_every=3, keep_checkpoints=3),
    )
    whole, plain = fusionllm.train(config=config), fusionllm.train(config=dense)
    assert whole.losses != plain.losses and max(abs(a - b) for a, b in zip(whole.losses, plain.losses)) < 0.05
    assert bytes_between(whole) < 0.8 * bytes_between(plain)
    cut = tmp_path / "cut"
    shutil.copytree(whole.run_dir, cut)
    shutil.rmtree(dict(list_checkpoints(cut / "checkpoints"))[5])
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name="cut", resume=True))
    again = fusionllm.train(config=config)
    assert again.losses == whole.losses[3:]
    kept, remade = (load_checkpoint(r.run_dir / "checkpoints").manifest for r in (whole, again))
    assert remade.files == kept.files and any("/tied/" in key for key in kept.codecs)


def test_codecs_begin_anew_where_others_are_asked_for(tmp_path):
    config = config_of(tmp_path, forward="klt", backward="klt", links="all")
    named = msgspec.structs.replace(config.run, name="job")
    fusionllm.train(config=msgspec.structs.replace(config, run=named))
    notes: list[object] = []
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(named, resume=True),
        train=msgspec.structs.replace(config.train, steps=6),
        compression=msgspec.structs.replace(config.compression, forward="outlier:channels=2"),
    )
    result = fusionllm.train(config=config, progress=notes.append)
    assert len(result.losses) == 1
    assert [n.text for n in notes if isinstance(n, Note) and n.kind == "codecs"]
