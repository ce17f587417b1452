"""Emulated compute for torch's own pipeline: small real stages whose forward and backward take as long as a GPU's.

For speed on links only: losses of such runs mean nothing, and every output says that compute was emulated. The boundary
is that of the modelled model; what real compute leaves of the time is slept. Our own nodes: `wan_modelled`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

VOCAB = 256


class Block(torch.nn.Module):
    """[B, T, D] -> [B, T, D], a few milliseconds of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.scale = torch.nn.LayerNorm(width), torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x) * self.scale


class Thin(torch.nn.Module):
    """A language model of a given width with hardly any compute; ``parts`` in order are the model."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        embed, head = torch.nn.Embedding(VOCAB, width), torch.nn.Linear(width, VOCAB, bias=False)
        self.parts = torch.nn.ModuleList([embed, *(Block(width) for _ in range(num_blocks)), head])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = input_ids
        for part in self.parts:
            x = part(x)
        return F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def thin_1600() -> torch.nn.Module:
    """For up to 24 stages, as ``model.source = "python:benchmarks.wan_padded:thin_1600"``."""
    return Thin(24, 1600)


def thin_5120() -> torch.nn.Module:
    """The same with the boundary of a 13B Llama."""
    return Thin(24, 5120)


def pad(started_s: float, seconds: float) -> None:
    """Sleep until ``seconds`` have passed since ``started_s``."""
    time.sleep(max(0.0, started_s + seconds - time.perf_counter()))


class _Begin(torch.autograd.Function):
    """At a stage's output: a backward begins here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: dict[str, float]) -> torch.Tensor:
        ctx.clock = clock
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.clock["began"] = time.perf_counter()
        return grad, None


class _End(torch.autograd.Function):
    """At a stage's input: its backward ends here, no sooner than it would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: dict[str, float], seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        pad(ctx.clock["began"], ctx.seconds)
        return grad, None, None


class PaddedCut(torch.nn.Module):
    """A stage of torch's pipeline over `Thin` that takes its time."""

    def __init__(self, model: Thin, rank: int, size: int, boundary: torch.dtype, times_s: tuple[float, float]) -> None:
        super().__init__()
        each = (len(model.parts) - 2) // size
        first, end = 1 + rank * each, 1 + (rank + 1) * each
        self.first, self.last = rank == 0, rank == size - 1
        parts = list(model.parts)
        self.parts = torch.nn.ModuleList(parts[0 if self.first else first : len(parts) if self.last else end])
        self._boundary, (self._forward_s, self._backward_s) = boundary, times_s
        self._clock: dict[str, float] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        started_s = time.perf_counter()
        if self.first:  # ids have no gradient: the first stage's backward ends at its embedding
            x = _End.apply(self.parts[0](x), self._clock, self._backward_s)
        else:
            x = _End.apply(x.float(), self._clock, self._backward_s)
        for part in list(self.parts)[1 if self.first else 0 :]:
            x = part(x)
        x = _Begin.apply(x, self._clock)
        pad(started_s, self._forward_s)
        return x if self.last else x.to(self._boundary)
