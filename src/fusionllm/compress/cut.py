"""A stage cut inside one process: a tensor and its gradient go through the codecs, and autograd follows.

What a link between two nodes does to the numbers, without the link: for convergence studies, for the quality
guard's dense comparison and for tests. ``Cut`` is the owner of both directions' state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusionllm.compress.codec import CodecState, Reference, payload_num_bytes
from fusionllm.compress.registry import decode, encode, init, remember, support
from fusionllm.ir.codec import CodecSpec


class Direction:
    """One direction of a cut: the sender's state, the receiver's memory, and what it cost."""

    def __init__(self, spec: CodecSpec, shape: Sequence[int], dtype: str) -> None:
        self.state: CodecState = init(spec, shape, dtype)
        self.memory: Mapping[str, Tensor] = {}
        self.num_bytes = 0
        self.num_messages = 0

    def send(self, x: Tensor, at_sender: Reference, at_receiver: Reference) -> tuple[Tensor, Tensor | None]:
        """Encode and decode: the tensor as the receiver sees it, and the positions a sparse codec kept."""
        spec, shape, dtype = self.state.spec, self.state.shape, self.state.dtype
        payload, self.state = encode(x, self.state, reference=at_sender)
        self.num_bytes += payload_num_bytes(payload)
        self.num_messages += 1
        self.memory = remember(payload, spec, shape, dtype, self.memory)
        held = Reference(at_receiver.activation, at_receiver.support, self.memory)
        seen = decode(payload, spec, shape, dtype, reference=held).to(x.device)
        return seen, support(payload, spec, shape)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
        seen, kept = cut.forward.send(x, Reference(), Reference())
        ctx.cut, ctx.kept = cut, kept
        ctx.save_for_backward(x, seen)
        return seen.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        original, seen = ctx.saved_tensors
        back, _ = ctx.cut.backward.send(gradient, Reference(seen, ctx.kept), Reference(original, ctx.kept))
        return back, None


class Cut:
    """Both directions of one cut.

    Args:
        forward: codec of the activation.
        backward: codec of its gradient; ``ir.codec.adjoint_codec(forward)`` for the exact adjoint.
        shape: of the activation, integers.
        dtype: a key of ``ir.tensor.DTYPES``.
    """

    def __init__(self, forward: CodecSpec, backward: CodecSpec, shape: Sequence[int], dtype: str) -> None:
        self.forward = Direction(forward, shape, dtype)
        self.backward = Direction(backward, shape, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """The activation as the next stage sees it; its gradient comes back through the backward codec."""
        seen: Tensor = _Through.apply(x, self)  # type: ignore[no-untyped-call]
        return seen
