"""Emulated compute: small real stages whose forward and backward take as long as a GPU's would, on real-size tensors.

For speed on links only: losses of such runs mean nothing, and every output says that compute was emulated. The boundary
is that of GPT-2 XL, one row of 1,024 tokens by 1,600 channels. Our nodes and torch's pipeline pad the same model in the
same way: what real compute leaves of the time is slept.

``python -m benchmarks.wan_padded FORWARD_S BACKWARD_S FILE join ...`` is `fusionllm join ...` with stages that are
padded, where that is more than zero, and metered into a file.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.wan_meter import BACKWARD, FORWARD, Meter
from fusionllm.compute import BACKENDS
from fusionllm.compute.torch_backend import TorchBackend

SEQ_LEN, WIDTH, VOCAB = 1024, 1600, 256


class Block(torch.nn.Module):
    """[B, T, D] -> [B, T, D], a few milliseconds of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = torch.nn.LayerNorm(WIDTH), torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x) * self.scale


class Thin(torch.nn.Module):
    """A language model of GPT-2 XL's width with hardly any compute; ``parts`` in order are the model."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        embed, head = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.parts = torch.nn.ModuleList([embed, *(Block() for _ in range(num_blocks)), head])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = input_ids
        for part in self.parts:
            x = part(x)
        return F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def thin() -> torch.nn.Module:
    """The model, for ``model.source = "python:benchmarks.wan_padded:thin"``."""
    return Thin()


def thin_24() -> torch.nn.Module:
    """The same with a block for each of up to 24 stages."""
    return Thin(24)


def pad(started_s: float, seconds: float) -> None:
    """Sleep until ``seconds`` have passed since ``started_s``."""
    time.sleep(max(0.0, started_s + seconds - time.perf_counter()))


class PaddedProgram:
    """A stage's program that takes its time and meters its training."""

    forward_s = backward_s = 0.0
    meter = Meter()

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._train = self.meter.around(FORWARD, inner.forward)
        self._backward = self.meter.around(BACKWARD, inner.backward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # all but computing is the inner one's

    def forward(self, *args: Any, **options: Any) -> Any:
        started_s = time.perf_counter()
        forward = self._train if options.get("keep") else self._inner.forward
        out = forward(*args, **options)
        pad(started_s, self.forward_s)
        return out

    def backward(self, *args: Any, **options: Any) -> Any:
        started_s = time.perf_counter()
        out = self._backward(*args, **options)
        pad(started_s, self.backward_s)
        return out


class PaddedBackend(TorchBackend):
    """Torch with padded programs."""

    def program(self, *args: Any, **options: Any) -> Any:
        return PaddedProgram(super().program(*args, **options))


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


def run_node(words: list[str]) -> None:
    """`fusionllm` with padded stages. ``words``: seconds forward, backward, the meter's file, then its own."""
    from fusionllm.cli.main import main

    PaddedProgram.forward_s, PaddedProgram.backward_s = float(words[0]), float(words[1])
    PaddedProgram.meter = Meter(words[2])
    BACKENDS["torch"] = "benchmarks.wan_padded:PaddedBackend"
    main(words[3:])


if __name__ == "__main__":
    import benchmarks.wan_padded as module  # the worker loads the class from there, not from __main__

    module.run_node(sys.argv[1:])
