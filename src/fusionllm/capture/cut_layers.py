"""Low-rank cuts as layers of a model: where a stage ends, the residual stream passes through few channels.

On the path before capture: what is attached here is captured like any other layer, and the partitioner, which likes
places where little crosses, cuts at the narrow tensor. Two kinds:

- ``learned``: ``up(down(h))`` with trained matrices, plus an embedding of the tokens that the next stage computes by
  itself. With ``anneal`` the way past the bottleneck opens over that many training forwards, until nothing is lost.
- ``fixed``: every layer writes into one fixed subspace on top of frozen embeddings, so ``(h - embeddings) @ basis`` is
  all there is to send, and nothing is lost. The result is an ordinary model with constrained weights (``merge``).

Must know torch only: an exported model carries this file's source with it. Reference: Protocol Models (2506.01260)
for the fixed kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: What is attached lies under this name in the model, and so in its checkpoints.
NAME = "bottlenecks"


class Bottleneck(nn.Module):
    """A learned cut.

    Args:
        width, rank: channels of the stream, channels that cross.
        vocab_size, num_positions: sizes of the next stage's own embeddings; 0 for none.
        anneal: training forwards over which the way past the bottleneck opens; 0 keeps it shut.
    """

    forwards: Tensor

    def __init__(self, width: int, rank: int, vocab_size: int, num_positions: int, anneal: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.tokens = nn.Embedding(vocab_size, width) if vocab_size else None
        self.places = nn.Embedding(num_positions, width) if num_positions else None
        self.anneal = anneal
        if anneal:
            self.register_buffer("forwards", torch.zeros(()))
        self.reset()

    def reset(self) -> None:
        """A projection to begin with, and embeddings of GPT-2's scale."""
        with torch.no_grad():
            nn.init.orthogonal_(self.down.weight)
            self.up.weight.copy_(self.down.weight.t())
            for table in (self.tokens, self.places):
                if table is not None:
                    nn.init.normal_(table.weight, std=0.02)

    def forward(self, h: Tensor, ids: Tensor | None) -> Tensor:
        """The stream [..., length, width] and the tokens [..., length] -> the stream as the next stage has it."""
        back: Tensor = self.up(self.down(h))
        if self.tokens is not None:
            back = back + self.tokens(ids)
        if self.places is not None:
            back = back + self.places.weight[: h.shape[-2]]
        if not self.anneal:
            return back
        share = (self.forwards / self.anneal).clamp(max=1.0)
        if self.training:
            self.forwards.add_(1.0)
        # With a share of 1 this is h, to the bit.
        return share * h + (1 - share) * back


class Subspace(nn.Module):
    """A fixed cut: the basis that all layers write into, and the trained part of the embedding, inside it."""

    basis: Tensor

    def __init__(self, width: int, rank: int, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("basis", torch.zeros(width, rank))
        self.tokens = nn.Embedding(vocab_size, rank)
        self.reset()

    def reset(self) -> None:
        """A random basis."""
        with torch.no_grad():
            nn.init.orthogonal_(self.basis)
            nn.init.normal_(self.tokens.weight, std=0.02 * (self.basis.shape[0] / self.basis.shape[1]) ** 0.5)

    def project(self, x: Tensor) -> Tensor:
        return functional.linear(x @ self.basis, self.basis)


def _on_stream(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A block returns the stream, or a tuple that begins with it."""
    return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def attach(model: nn.Module, plan: dict[str, Any]) -> None:
    """Add the cuts of a plan to a model, as its submodule ``bottlenecks`` and hooks.

    Args:
        plan: ``kind``, ``rank``, ``width``, ``anneal``; names of submodules: ``after`` (the blocks before the cuts),
            ``tokens`` and ``places`` (the model's embeddings, or None), ``writers`` (fixed: what adds to the stream);
            ``embed``: learned cuts have embeddings of their own.
    """
    seen: dict[str, Tensor] = {}
    tokens: Any = model.get_submodule(plan["tokens"]) if plan["tokens"] else None
    places: Any = model.get_submodule(plan["places"]) if plan["places"] else None
    if tokens is not None:
        tokens.register_forward_hook(lambda module, args, out: seen.update(ids=args[0]))
    if plan["kind"] == "fixed":
        _attach_fixed(model, plan, tokens, places, seen)
        return
    num_tokens, num_places = (t.num_embeddings if plan["embed"] and t is not None else 0 for t in (tokens, places))
    cuts = [Bottleneck(plan["width"], plan["rank"], num_tokens, num_places, plan["anneal"]) for _ in plan["after"]]
    model.add_module(NAME, nn.ModuleList(cuts))

    def through(cut: Bottleneck) -> Callable[[Any, Any, Any], Any]:
        return lambda module, args, out: _on_stream(out, lambda h: cut(h, seen.get("ids")))

    for name, cut in zip(plan["after"], cuts):
        model.get_submodule(name).register_forward_hook(through(cut))


def _attach_fixed(model: nn.Module, plan: dict[str, Any], tokens: Any, places: Any, seen: dict[str, Tensor]) -> None:
    space = Subspace(plan["width"], plan["rank"], tokens.num_embeddings)
    model.add_module(NAME, space)
    tokens.weight.requires_grad_(False)
    if places is not None:
        places.weight.requires_grad_(False)

    def base(length: int) -> Tensor:
        frozen = functional.embedding(seen["ids"], tokens.weight)
        return frozen if places is None else frozen + places.weight[:length]

    def cut(h: Tensor) -> Tensor:
        crossing = (h - base(h.shape[-2])) @ space.basis
        # Once more, after what crosses: each side of the cut computes its own.
        return base(h.shape[-2]) + functional.linear(crossing, space.basis)

    tokens.register_forward_hook(
        lambda module, args, out: out + functional.linear(space.tokens(args[0]), space.basis)
    )  # fmt: skip
    for name in plan["writers"]:
        model.get_submodule(name).register_forward_hook(lambda module, args, out: space.project(out))
    for name in plan["after"]:
        model.get_submodule(name).register_forward_hook(lambda module, args, out: _on_stream(out, cut))
