"""Precisions other than float32 train, and say what memory they took."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fusionllm
from fusionllm.store.checkpoint import load_checkpoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x).float(), y)


def train(tmp_path, precision: str, **options):
    numbers = np.random.default_rng(0)
    xs = numbers.normal(size=(256, 16)).astype("float32")
    rows = [{"x": x, "y": np.int64(np.argmax(x[:4]))} for x in xs]
    base = {"steps": 12, "nodes": 2, "global_batch": 32, "microbatch_size": 16, "threads": 1}
    base |= {} if "optimizer" in options else {"lr": 1e-2}
    run = {"root": str(tmp_path), "name": precision}
    return fusionllm.train(Net(), rows, run=run, plot=False, precision=precision, **(base | options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("precision"), "float32")


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "bfloat16-weights"])
def test_a_shorter_type_learns_nearly_as_much(tmp_path, whole, precision):
    short = train(tmp_path, precision)
    assert short.losses != whole.losses
    assert short.losses[0] == pytest.approx(whole.losses[0], abs=0.02)
    assert short.losses[-1] == pytest.approx(whole.losses[-1], abs=0.1)
    assert whole.losses[-1] < 0.8 * whole.losses[0]
    checkpoint = load_checkpoint(short.run_dir / "checkpoints")
    dtype = "bfloat16" if precision == "bfloat16-weights" else "float32"
    assert {entry.dtype for entry in checkpoint.manifest.weights.values()} == {dtype}
    masters = {n for n in checkpoint.manifest.optimizer if n.startswith("master/")}
    assert len(masters) == (len(checkpoint.manifest.weights) if precision == "bfloat16-weights" else 0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16-weights"])
def test_state_kept_off_the_device_changes_nothing(tmp_path, precision):
    own, off = (
        train(tmp_path / place, precision, optimizer={"lr": 1e-2, "offload": place == "off"})
        for place in ("own", "off")
    )
    assert off.losses == own.losses
    first, second = (load_checkpoint(run.run_dir / "checkpoints") for run in (own, off))
    assert first.manifest.optimizer == second.manifest.optimizer
    for name in first.manifest.optimizer:
        assert bytes(first.read_optimizer(name).data) == bytes(second.read_optimizer(name).data)


def test_memory_is_estimated_and_measured_per_node(whole):
    memory = whole.summary.extra["memory"]
    assert memory.keys() == {"node0", "node1"}
    for node in memory.values():
        assert 4 * 4000 < node["estimated_bytes"] < node["peak_bytes"]
