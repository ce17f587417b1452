"""The codecs of a stage's links: what values and gradients become on their way, and what both ends hold of them.

A link is a pair of stages. Its forward codec is for activations, its backward codec for gradients; `ir.codec.fit_codec`
says, from facts both ends have, what really travels. A message names its codec, so that dense may step in at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fusionllm import compress
from fusionllm.compute.wire import dtype_name, tensor_from_buffer, tensor_to_bytes
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import IDENTITY, CodecSpec, dense_num_bytes, fit_codec, parse_codec
from fusionllm.node.guard import Guard
from fusionllm.protocol import messages as m

_DENSE = str(IDENTITY)


def link_spec(kind: str, link: m.LinkCodecs | None, shape: tuple[int, ...], dtype: str) -> CodecSpec:
    """The codec of a message of ``kind`` on a link: identity for all but activations and gradients."""
    if link is None or kind not in ("activation", "gradient"):
        return IDENTITY
    return fit_codec(parse_codec(link.forward if kind == "activation" else link.backward), shape, dtype)


def check_payload(header: m.TensorHeader, num_bytes: int, link: m.LinkCodecs | None) -> None:
    """Refuse a payload whose codec or length is not what the link allows. Raises RemoteProtocolError."""
    spec = link_spec(header.kind, link, header.shape, header.dtype)
    if header.codec == _DENSE:
        if num_bytes != dense_num_bytes(header.shape, header.dtype):
            raise RemoteProtocolError(f"{header.kind} {header.key!r} of {num_bytes} bytes, sent dense")
    elif header.codec != str(spec):
        raise RemoteProtocolError(f"{header.kind} {header.key!r} by codec {header.codec[:80]!r}; this link has {spec}")
    else:
        compress.check_num_bytes(num_bytes, spec, header.shape, header.dtype)


class StageCodecs:
    """Encoders and decoders of one stage, with their state; all for the thread that computes.

    Args:
        links: other stage -> codecs of the link with it; a stage that is not named gets everything dense.
    """

    def __init__(self, links: Mapping[int, m.LinkCodecs]) -> None:
        self._links = links
        self.guard = Guard()
        # what the receiver of our messages remembers of them
        self._sent_memories: dict[tuple[str, int, str, str], Mapping[str, torch.Tensor]] = {}
        self._states: dict[tuple[str, int, str, str], compress.CodecState] = {}
        self._memories: dict[tuple[str, int, str], Mapping[str, torch.Tensor]] = {}
        # (seq, microbatch, value, other stage) -> the forward message as this end has it, for its gradient's codec
        self._references: dict[tuple[int, int, str, int], compress.Reference] = {}

    def encode(
        self, kind: m.TensorKind, stage: int, seq: int, microbatch_index: int, key: str, tensor: torch.Tensor,
        *, dense: bool = False,
    ) -> tuple[str, list[Any]]:  # fmt: skip
        """The codec's name and the payload of a tensor for ``stage``. ``dense``: whatever the link's codec is."""
        link, shape, dtype = self._links.get(stage), tuple(tensor.shape), dtype_name(tensor)
        dense = dense or self.guard.is_dense((kind, stage))
        spec = IDENTITY if dense else link_spec(kind, link, shape, dtype)
        payload: list[Any] = [tensor_to_bytes(tensor)]
        place = (seq, microbatch_index, key, stage)
        reference = self._references.pop(place, None) if kind == "gradient" else None
        if spec != IDENTITY:
            name = (kind, stage, key, str(spec))
            state = replace(self._states.get(name) or compress.init(spec, shape, dtype), shape=shape)
            spec, payload, self._states[name] = compress.encode_or_dense(tensor, state, reference=reference)
            if spec != IDENTITY:
                self._look_at(name, tensor, spec, payload, reference or compress.Reference())
        if kind == "activation" and self._wants_reference(link):
            self._references[place] = self._reference(tensor, spec, payload)
        return str(spec), payload

    def _look_at(
        self, name: tuple[str, int, str, str], tensor: torch.Tensor, spec: CodecSpec, payload: list[Any],
        reference: compress.Reference,
    ) -> None:  # fmt: skip
        """Keep up with what the receiver remembers; on a sample compare what it will have with what we have."""
        shape, dtype, way = tuple(tensor.shape), dtype_name(tensor), name[:2]
        memory = compress.remember(payload, spec, shape, dtype, self._sent_memories.get(name, {}))
        self._sent_memories[name] = memory
        if self.guard.wants(way):
            decoded = compress.decode(payload, spec, shape, dtype, reference=replace(reference, memory=memory))
            self.guard.note(way, compress.measure_distortion(tensor, decoded, 1).nmse)

    def decode(self, source: int, header: m.TensorHeader, payload: bytearray) -> torch.Tensor:
        """The tensor of a message that `check_payload` let in. Raises RemoteProtocolError."""
        link = self._links.get(source)
        place = (header.seq, header.microbatch_index, header.key, source)
        reference = self._references.pop(place, None) if header.kind == "gradient" else None
        spec = IDENTITY
        if header.codec == _DENSE:
            tensor = tensor_from_buffer(payload, header.dtype, header.shape)
        else:
            spec = link_spec(header.kind, link, header.shape, header.dtype)
            name = (header.kind, source, header.key)
            memory = compress.remember(payload, spec, header.shape, header.dtype, self._memories.get(name, {}))
            self._memories[name] = memory
            held = replace(reference or compress.Reference(), memory=memory)
            if reference is None and spec.needs_reference:
                raise RemoteProtocolError(f"gradient of {header.key!r} by {spec} without its activation")
            tensor = compress.decode(payload, spec, header.shape, header.dtype, reference=held)
        if header.kind == "activation" and self._wants_reference(link):
            self._references[place] = self._reference(tensor, spec, [memoryview(payload)])
        return tensor

    def finish(self, seq: int) -> None:
        """A step is over: forget what its messages left."""
        self._references = {place: held for place, held in self._references.items() if place[0] > seq}

    def _wants_reference(self, link: m.LinkCodecs | None) -> bool:
        return link is not None and parse_codec(link.backward).needs_reference

    def _reference(self, tensor: torch.Tensor, spec: CodecSpec, payload: list[Any]) -> compress.Reference:
        kept = None if spec == IDENTITY else compress.support(payload, spec, tuple(tensor.shape))
        return compress.Reference(activation=tensor, support=kept)
