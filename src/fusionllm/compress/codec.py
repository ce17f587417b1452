"""What a codec is: three functions and an explicit state. On the path: Tensor -> **Payload** -> Tensor.

Must not know sockets, frames, plans or models. A codec is a ``Codec`` of plain functions, listed in
``compress.CODECS`` and described (parameters, wire size) in ``ir.codec.FORMATS``. State never hides:
whatever must survive a crash is in ``CodecState.tensors``, a flat dict that safetensors can store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fusionllm.errors import LocalProtocolError, RemoteProtocolError, UserError
from fusionllm.ir.codec import CodecSpec
from fusionllm.ir.tensor import DTYPES

_INNER = "inner."

#: What travels: buffers that a socket can write one after the other without joining them.
Payload = list[memoryview]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Reference:
    """What both ends still hold of the forward message when its gradient travels back.

    Attributes:
        activation: the forward tensor, same shape as the gradient: at the gradient's sender the decoded one,
            at its receiver the original.
        support: flat positions the forward codec kept, int64, strictly increasing.
        memory: what the receiver remembers of this link's earlier messages, from ``compress.remember``.
    """

    activation: Tensor | None = None
    support: Tensor | None = None
    memory: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CodecState:
    """A codec on one direction of one link for one tensor: what ``encode`` takes and gives back.

    Attributes:
        spec: the codec.
        shape: of every tensor that goes through, integers.
        dtype: a key of ``ir.tensor.DTYPES``.
        tensors: what must survive a crash; empty for a stateless codec.
    """

    spec: CodecSpec
    shape: tuple[int, ...]
    dtype: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> CodecState:
        return replace(self, tensors=dict(tensors))

    def state_dict(self) -> dict[str, Tensor]:
        """A copy to store in a checkpoint, beside the spec's text."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> CodecState:
        """This state with stored tensors. Raises UserError when they are another codec's."""
        want = {name: (tuple(t.shape), t.dtype) for name, t in self.tensors.items()}
        have = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        if want != have:
            raise UserError(f"codec state of {self.spec} needs {want} but the checkpoint has {have}")
        return self.with_tensors({n: t.clone().to(self.tensors[n].device) for n, t in tensors.items()})

    def for_inner(self) -> CodecState:
        """The state of the codec that a wrapper wraps; its tensors lie under ``inner.`` in the wrapper's."""
        tensors = {n[len(_INNER) :]: t for n, t in self.tensors.items() if n.startswith(_INNER)}
        return CodecState(inner_spec(self.spec), self.shape, self.dtype, tensors)


def inner_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An inner codec's state tensors under the names they have in the wrapper's state."""
    return {_INNER + name: tensor for name, tensor in tensors.items()}


def inner_spec(spec: CodecSpec) -> CodecSpec:
    """What a verified wrapper wraps."""
    if spec.inner is None:
        raise LocalProtocolError(f"codec {spec} wraps no other")
    return spec.inner


InitFn = Callable[[CodecSpec, tuple[int, ...], str], dict[str, Tensor]]
EncodeFn = Callable[[Tensor, CodecState, Reference], tuple[Payload, Mapping[str, Tensor]]]
DecodeFn = Callable[[memoryview, CodecSpec, tuple[int, ...], str, Reference], Tensor]
SupportFn = Callable[[memoryview, CodecSpec, tuple[int, ...]], Tensor]
Memory = Mapping[str, Tensor]
RememberFn = Callable[[memoryview, CodecSpec, tuple[int, ...], str, Memory], Memory]


def no_state(spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> dict[str, Tensor]:
    """``init`` of a stateless codec."""
    return {}


@dataclass(frozen=True)
class Codec:
    """One codec's code.

    Attributes:
        encode: (tensor of state.shape, state, reference) -> (payload of exactly the wire size, new state
        tensors).
        decode: (payload, spec, shape, dtype, reference) -> tensor on the CPU; the payload's length is already
            checked against the spec's size, everything else in it is hostile.
        init: (spec, shape, dtype) -> state tensors.
        support: payload -> flat kept positions; None for a codec that keeps every position.
        remember: (payload, spec, shape, dtype, memory) -> the receiver's memory after it; None where each
            payload stands alone.
    """

    encode: EncodeFn
    decode: DecodeFn
    init: InitFn = no_state
    support: SupportFn | None = None
    remember: RememberFn | None = None


def payload_num_bytes(payload: Sequence[memoryview]) -> int:
    return sum(part.nbytes for part in payload)


def to_bytes_view(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy where it lies contiguous on the CPU. bfloat16, 0-d, empty too."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def from_bytes_view(data: memoryview, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The inverse: an own, writable copy. Raises RemoteProtocolError for another length."""
    expected = math.prod(shape) * dtype.itemsize
    if data.nbytes != expected:
        raise RemoteProtocolError(f"{data.nbytes} bytes cannot be {tuple(shape)} of {dtype}: that takes {expected}")
    if not expected:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(tuple(shape))


def require_finite(statistic: Tensor, state: CodecState) -> None:
    """Refuse NaN and infinity, by a statistic (a maximum, a scale) that any such value poisons."""
    if not bool(torch.isfinite(statistic).all()):
        raise UserError(
            f"the tensor {state.dtype}{list(state.shape)} for codec {state.spec} holds NaN or infinity; "
            "only identity and cast carry them; find its origin (learning rate too high?) or send this "
            "message with identity"
        )


def check_tensor(x: Tensor, state: CodecState) -> None:
    """The caller's duty: the tensor that the state was made for."""
    if tuple(x.shape) != state.shape or x.dtype != TORCH_DTYPES[state.dtype]:
        raise LocalProtocolError(
            f"codec {state.spec} was set up for {state.dtype}{list(state.shape)} but got "
            f"{x.dtype}{list(x.shape)}; make one state per direction, link and shape"
        )
