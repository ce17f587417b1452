"""The codecs of a stage's links: what values and gradients become on their way, and what both ends hold of them.

A link is a pair of stages. Its forward codec is for activations, its backward codec for gradients; `ir.codec.fit_codec`
says, from facts both ends have, what really travels. A message names its codec, so that dense may step in at any time.
Dense needs no framework but the stage's own; `compress`, and with it torch, is imported where a link really compresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fusionllm.compute import load_backend
from fusionllm.compute.backend import Array
from fusionllm.compute.stage import dtype_name
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import IDENTITY, CodecSpec, dense_num_bytes, fit_codec, parse_codec
from fusionllm.node.guard import Guard
from fusionllm.protocol import messages as m

if TYPE_CHECKING:
    import torch

    from fusionllm import compress

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
        from fusionllm import compress

        compress.check_num_bytes(num_bytes, spec, header.shape, header.dtype)


def can_compress() -> bool:
    """Whether codecs beyond dense are here: they compute with torch, whatever the stage's backend is."""
    return find_spec("torch") is not None


class StageCodecs:
    """Encoders and decoders of one stage, with their state; all for the thread that computes.

    Args:
        links: other stage -> codecs of the link with it; a stage that is not named gets everything dense.
        backend: whose arrays go in and come out.
    """

    def __init__(self, links: Mapping[int, m.LinkCodecs], backend: str = "torch") -> None:
        self._links = links
        self._backend, self._is_torch = load_backend(backend), backend == "torch"
        self.guard = Guard()
        # what the receiver of our messages remembers of them
        self._sent_memories: dict[tuple[str, int, str, str], Mapping[str, torch.Tensor]] = {}
        self._states: dict[tuple[str, int, str, str], compress.CodecState] = {}
        self._memories: dict[tuple[str, int, str], Mapping[str, torch.Tensor]] = {}
        # (seq, microbatch, value, other stage) -> the forward message as this end has it, for its gradient's codec
        self._references: dict[tuple[int, int, str, int], compress.Reference] = {}

    def encode(
        self, kind: m.TensorKind, stage: int, seq: int, microbatch_index: int, key: str, array: Array,
        *, dense: bool = False,
    ) -> tuple[str, list[Any]]:  # fmt: skip
        """The codec's name and the payload of an array for ``stage``. ``dense``: whatever the link's codec is."""
        link, shape, dtype = self._links.get(stage), tuple(array.shape), dtype_name(array)
        dense = dense or self.guard.is_dense((kind, stage))
        spec = IDENTITY if dense else link_spec(kind, link, shape, dtype)
        payload: list[Any] = [self._backend.to_bytes(array)]
        place = (seq, microbatch_index, key, stage)
        reference = self._references.pop(place, None) if kind == "gradient" else None
        wanted = kind == "activation" and self._wants_reference(link)
        if spec == IDENTITY and not wanted:
            return str(spec), payload
        tensor = array if self._is_torch else load_backend("torch").from_buffer(payload[0], dtype, shape)
        if spec != IDENTITY:
            spec, payload = self._compress((kind, stage, key, str(spec)), spec, tensor, reference)
        if wanted:
            self._references[place] = self._reference(tensor, spec, payload)
        return str(spec), payload

    def _compress(
        self, name: tuple[str, int, str, str], spec: CodecSpec, tensor: torch.Tensor,
        reference: compress.Reference | None,
    ) -> tuple[CodecSpec, list[Any]]:  # fmt: skip
        from fusionllm import compress

        shape = tuple(tensor.shape)
        state = replace(self._states.get(name) or compress.init(spec, shape, dtype_name(tensor)), shape=shape)
        spec, payload, self._states[name] = compress.encode_or_dense(tensor, state, reference=reference)
        if spec != IDENTITY:
            self._look_at(name, tensor, spec, payload, reference or compress.Reference())
        return spec, list(payload)

    def _look_at(
        self, name: tuple[str, int, str, str], tensor: torch.Tensor, spec: CodecSpec, payload: list[Any],
        reference: compress.Reference,
    ) -> None:  # fmt: skip
        """Keep up with what the receiver remembers; on a sample compare what it will have with what we have."""
        from fusionllm import compress

        shape, dtype, way = tuple(tensor.shape), dtype_name(tensor), name[:2]
        memory = compress.remember(payload, spec, shape, dtype, self._sent_memories.get(name, {}))
        self._sent_memories[name] = memory
        if self.guard.wants(way):
            decoded = compress.decode(payload, spec, shape, dtype, reference=replace(reference, memory=memory))
            self.guard.note(way, compress.measure_distortion(tensor, decoded, 1).nmse)

    def decode(self, source: int, header: m.TensorHeader, payload: bytearray) -> Array:
        """The array of a message that `check_payload` let in. Raises RemoteProtocolError."""
        link = self._links.get(source)
        place = (header.seq, header.microbatch_index, header.key, source)
        reference = self._references.pop(place, None) if header.kind == "gradient" else None
        spec = IDENTITY
        wanted = header.kind == "activation" and self._wants_reference(link)
        if header.codec == _DENSE and not wanted:
            return self._backend.from_buffer(payload, header.dtype, header.shape)
        if header.codec == _DENSE:
            tensor = load_backend("torch").from_buffer(payload, header.dtype, header.shape)
        else:
            spec = link_spec(header.kind, link, header.shape, header.dtype)
            tensor = self._decompress(source, header, payload, spec, reference)
        if wanted:
            self._references[place] = self._reference(tensor, spec, [memoryview(payload)])
        if self._is_torch:
            return tensor
        return self._backend.from_buffer(load_backend("torch").to_bytes(tensor), header.dtype, header.shape)

    def _decompress(
        self, source: int, header: m.TensorHeader, payload: bytearray, spec: CodecSpec,
        reference: compress.Reference | None,
    ) -> torch.Tensor:  # fmt: skip
        from fusionllm import compress

        name = (header.kind, source, header.key)
        memory = compress.remember(payload, spec, header.shape, header.dtype, self._memories.get(name, {}))
        self._memories[name] = memory
        held = replace(reference or compress.Reference(), memory=memory)
        if reference is None and spec.needs_reference:
            raise RemoteProtocolError(f"gradient of {header.key!r} by {spec} without its activation")
        return compress.decode(payload, spec, header.shape, header.dtype, reference=held)

    def finish(self, seq: int) -> None:
        """A step is over: forget what its messages left."""
        self._references = {place: held for place, held in self._references.items() if place[0] > seq}

    def _wants_reference(self, link: m.LinkCodecs | None) -> bool:
        return link is not None and parse_codec(link.backward).needs_reference

    def _reference(self, tensor: torch.Tensor, spec: CodecSpec, payload: list[Any]) -> compress.Reference:
        from fusionllm import compress

        kept = None if spec == IDENTITY else compress.support(payload, spec, tuple(tensor.shape))
        return compress.Reference(activation=tensor, support=kept)
