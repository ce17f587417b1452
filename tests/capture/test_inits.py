"""How parameters begin, read off constructors: the steps, and values distributed as the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fusionllm.capture.inits import recorded
from fusionllm.capture.sources import ModelConfig, resolve_model
from fusionllm.errors import CaptureError
from fusionllm.store.initial import initial_values


class Zoo(nn.Module):
    """One of each way to begin."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.lstm = nn.Linear(64, 64), nn.Conv2d(8, 16, 3), nn.LSTM(32, 32)
        self.table = nn.Embedding(200, 16, padding_idx=2)
        self.norm = nn.LayerNorm(16)
        self.own = nn.Parameter(torch.linspace(0, 1, 5))
        self.cut = nn.Parameter(torch.empty(80, 80))
        nn.init.trunc_normal_(self.cut, std=0.5, a=-0.6, b=0.6)
        self.scaled = nn.Parameter(torch.empty(80, 80))
        nn.init.kaiming_normal_(self.scaled)
        with torch.no_grad():
            self.scaled.mul_(0.5)


@pytest.mark.parametrize("name", ["zoo", "gpt2", "llama"])
def test_values_are_distributed_as_the_models_own(name):
    torch.manual_seed(4)
    shape = {"gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128},
             "llama": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
                       "vocab_size": 128}}.get(name, {})  # fmt: skip
    if name == "zoo":
        with recorded() as record:
            empty = Zoo()
        inits, values = record.of(empty)
        own = Zoo()
        assert values.keys() == {"own"} and torch.equal(values["own"], own.own)
    else:
        source = resolve_model(ModelConfig(source=name, config=shape), base_dir=Path(), seed=0, empty=True)
        inits, own = source.inits, resolve_model(ModelConfig(source=name, config=shape), base_dir=Path(), seed=0).module
    for parameter, theirs in own.named_parameters():
        if parameter not in inits:
            continue
        mine = torch.from_numpy(initial_values(inits[parameter], 0, parameter, tuple(theirs.shape)).numpy().copy())
        near = 6 * theirs.std().item() / theirs.numel() ** 0.5 + 1e-7
        assert mine.mean().item() == pytest.approx(theirs.mean().item(), abs=near), parameter
        spread = 0.02 + 5 / theirs.numel() ** 0.5
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=spread, abs=1e-7), parameter
        assert mine.abs().max().item() <= 1.6 * theirs.abs().max().item() + 1e-7, parameter
    if name == "zoo":
        assert inits["table.weight"].zero_rows == (2,)
        cut = initial_values(inits["cut"], 0, "cut", (80, 80)).numpy()
        assert abs(cut).max() <= 0.6


def test_what_cannot_be_told_is_refused():
    class Odd(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(300, 300))
            if how == "orthogonal":
                nn.init.orthogonal_(self.weight)
            elif how == "out":
                with torch.no_grad():
                    torch.eye(300, out=self.weight)

    for how in ("orthogonal", "out", "not at all"):
        with recorded() as record:
            model = Odd(how)
        with pytest.raises(CaptureError, match="'weight' begins cannot be told"):
            record.of(model)
