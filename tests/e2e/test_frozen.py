"""A model that is partly frozen: nothing is computed, sent or kept for what does not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fusionllm
from fusionllm.store.checkpoint import load_checkpoint
from fusionllm.store.run_dir import RunDir


class Adapted(nn.Module):
    """A frozen body, a trained head."""

    def __init__(self, body_trains: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
        self.head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.body.requires_grad_(body_trains)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.head(self.body(x)).squeeze(1) - y).square().mean()


def train(tmp_path, body_trains: bool, steps: int = 4, **run):
    numbers = np.random.default_rng(0)
    rows = [{"x": numbers.normal(size=64).astype("float32"), "y": np.float32(i % 3)} for i in range(96)]
    options = {
        "steps": steps,
        "nodes": 2,
        "global_batch": 32,
        "microbatch_size": 16,
        "lr": 1e-2,
        "threads": 1,
        "plot": False,
    }
    run = {"root": str(tmp_path), **run}
    return fusionllm.train(Adapted(body_trains), rows, run=run, partition="equal-number", **options)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    return train(tmp_path_factory.mktemp("frozen"), False, name="frozen")


def test_no_gradient_goes_below_the_first_trained_operator(tmp_path, frozen):
    assert frozen.plan.stages[0].num_ops > 4
    whole = train(tmp_path, True).summary.link_bytes["node1->node0"]
    assert whole > 5 * frozen.summary.link_bytes["node1->node0"]  # nothing but acknowledgements is left


def test_only_what_is_trained_is_kept_and_the_run_goes_on_from_it(frozen):
    folder = RunDir.open(frozen.run_dir.parent, "frozen")
    checkpoint = load_checkpoint(folder.checkpoints)
    assert {n.partition(".")[0] for n in checkpoint.manifest.weights} == {"head"}
    assert {n.partition("/")[2].partition(".")[0] for n in checkpoint.manifest.optimizer} == {"head"}
    before, fresh = frozen.model.state_dict(), Adapted(False).state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, fresh[name]) == name.startswith("body")
    again = train(frozen.run_dir.parent, False, steps=6, name="frozen", resume=True)
    assert again.losses[:4] == frozen.losses and len(again.losses) == 6 and again.losses[5] < again.losses[0]
    after = again.model.state_dict()
    assert all(torch.equal(after[name], before[name]) == name.startswith("body") for name in before)
