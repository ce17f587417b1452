"""The codecs of a stage's links: what values and gradients become on their way, and what both ends hold of them.

A link is a pair of stages. Its forward codec is for activations, its backward codec for gradients; `ir.codec.fit_codec`
says, from facts both ends have, what really travels. Which codecs a step uses, its order says; a message names its own,
one of the link's choice or dense, so that its receiver need not have read the order.
What encoders and decoders carry from message to message is part of a checkpoint: ``END/KIND/STAGE/VALUE/CODEC/TENSOR``.
Dense needs no framework but the stage's own; `compress`, and with it torch, is imported where a link really compresses.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

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
_ENDS = ("send", "sent", "received", "guard")


class Place(NamedTuple):
    """Whose messages: the kind, the other stage, the value and the codec, as text."""

    kind: str
    stage: int
    value: str
    codec: str


def parse_state_key(key: str) -> tuple[str, Place, str]:
    """(end, place, tensor) of a codec's tensor in a checkpoint. Raises RemoteProtocolError."""
    end, *parts = key.split("/")
    known = end in _ENDS and len(parts) == 5 and parts[0] in ("activation", "gradient", "tied")
    if not known or not parts[1].isdecimal() or len(parts[1]) > 6:
        raise RemoteProtocolError(f"{key[:80]!r} names no state of a codec")
    kind, stage, value, codec, tensor = parts
    return end, Place(kind, int(stage), value, codec), tensor


def link_spec(kind: str, link: m.LinkCodecs | None, shape: tuple[int, ...], dtype: str) -> CodecSpec:
    """The codec of a message of ``kind`` on a link: identity for all but activations and gradients."""
    if link is None or kind not in ("activation", "gradient"):
        return IDENTITY
    return fit_codec(parse_codec(link.forward if kind == "activation" else link.backward), shape, dtype)


def check_payload(
    header: m.TensorHeader, num_bytes: int, choice: m.LinkChoice | None, tied: str = _DENSE
) -> None:  # fmt: skip
    """Refuse a payload whose codec or length is not what the link allows. Raises RemoteProtocolError."""
    if header.codec == _DENSE:
        if num_bytes != dense_num_bytes(header.shape, header.dtype):
            raise RemoteProtocolError(f"{header.kind} {header.key!r} of {num_bytes} bytes, sent dense")
        return
    known = {"activation": choice.forward, "gradient": choice.backward}.get(header.kind, ()) if choice else ()
    shape = header.shape
    if header.kind == "tied":  # one gradient of the step, as it is
        known, shape = (tied,), header.shape[1:]
    specs = {str(spec): spec for spec in (fit_codec(parse_codec(t), shape, header.dtype) for t in known)}
    if header.codec not in specs:
        raise RemoteProtocolError(
            f"{header.kind} {header.key!r} by codec {header.codec[:80]!r}; this link has {', '.join(specs) or _DENSE}"
        )
    from fusionllm import compress

    compress.check_num_bytes(num_bytes, specs[header.codec], shape, header.dtype)


def can_compress() -> bool:
    """Whether codecs beyond dense are here: they compute with torch, whatever the stage's backend is."""
    return find_spec("torch") is not None


class StageCodecs:
    """Encoders and decoders of one stage, with their state; all for the thread that computes.

    Args:
        links: other stage -> codecs that the link with it may use; one that is not named has dense alone.
        backend: whose arrays go in and come out.
    """

    def __init__(self, links: Mapping[int, m.LinkChoice], backend: str = "torch") -> None:
        self._links = links
        # stages whose gradients may come by a codec that looks at the activation
        self._referring = {k for k, c in links.items() if any(parse_codec(t).needs_reference for t in c.backward)}
        self._backend, self._is_torch = load_backend(backend), backend == "torch"
        self.guard = Guard()
        #: Seconds spent encoding since somebody set it to zero.
        self.encode_s = 0.0
        self._states: dict[Place, compress.CodecState] = {}
        # states of a checkpoint whose first message is still to come
        self._stored: dict[Place, Mapping[str, torch.Tensor]] = {}
        # what the receiver of our messages remembers of them, and what we do of those we received
        self._sent_memories: dict[Place, Mapping[str, torch.Tensor]] = {}
        self._memories: dict[Place, Mapping[str, torch.Tensor]] = {}
        # (seq, microbatch, value, other stage) -> the forward message as this end has it, for its gradient's codec
        self._references: dict[tuple[int, int, str, int], compress.Reference] = {}

    def check(self, orders: Mapping[int, m.LinkCodecs]) -> None:
        """Refuse an order of codecs that are not among the link's choice. Raises RemoteProtocolError."""
        for stage, link in orders.items():
            choice = self._links.get(stage, m.LinkChoice((), ()))
            for codec, known in ((link.forward, choice.forward), (link.backward, choice.backward)):
                if codec not in (*known, _DENSE):
                    raise RemoteProtocolError(
                        f"an order of codec {codec[:80]!r} on the link with stage {stage}, which has "
                        f"{', '.join(known) or _DENSE}"
                    )

    def encode(
        self, kind: m.TensorKind, stage: int, seq: int, microbatch_index: int, key: str, array: Array,
        link: m.LinkCodecs | None = None,
    ) -> tuple[str, list[Any]]:  # fmt: skip
        """The codec's name and the payload of an array for ``stage``; ``link``: the step's codecs, None for dense."""
        shape, dtype = tuple(array.shape), dtype_name(array)
        spec = link_spec(kind, link, shape, dtype)
        if self.guard.is_dense((kind, stage, str(spec))):
            spec = IDENTITY
        payload: list[Any] = [self._backend.to_bytes(array)]
        place = (seq, microbatch_index, key, stage)
        reference = self._references.pop(place, None) if kind == "gradient" else None
        wanted = kind == "activation" and link is not None and parse_codec(link.backward).needs_reference
        if spec == IDENTITY and not wanted:
            return str(spec), payload
        started_s = time.perf_counter()  # the array's bytes are here: a device has finished what made them
        tensor = array if self._is_torch else load_backend("torch").from_buffer(payload[0], dtype, shape)
        if spec != IDENTITY:
            spec, payload = self._compress(Place(kind, stage, key, str(spec)), spec, tensor, reference)
        if wanted:
            self._references[place] = self._reference(tensor, spec, payload)
        self.encode_s += time.perf_counter() - started_s
        return str(spec), payload

    def encode_tied(self, key: str, gradient: Array, codec: str) -> tuple[str, list[Any], Array]:
        """Codec, payload and what its receivers will have, of the gradient [1, *shape] of a parameter.

        All holders add up the same numbers, so that the parameter stays the same everywhere: what was lost comes with
        a later gradient, ours too.
        """
        shape, dtype = tuple(gradient.shape[1:]), dtype_name(gradient)
        spec = fit_codec(parse_codec(codec), shape, dtype)
        payload: list[Any] = [self._backend.to_bytes(gradient)]
        if spec == IDENTITY:
            return _DENSE, payload, gradient
        tensor = load_backend("torch").from_buffer(payload[0], dtype, shape)
        spec, payload = self._compress(Place("tied", 0, key, str(spec)), spec, tensor, None)
        if spec == IDENTITY:
            return _DENSE, payload, gradient
        return str(spec), payload, self._decode_tied(bytearray().join(payload), spec, shape, dtype)

    def _decode_tied(self, payload: bytearray, spec: CodecSpec, shape: tuple[int, ...], dtype: str) -> Array:
        from fusionllm import compress

        tensor = compress.decode(payload, spec, shape, dtype)[None]
        return self._backend.from_buffer(load_backend("torch").to_bytes(tensor), dtype, (1, *shape))

    def _compress(
        self, name: Place, spec: CodecSpec, tensor: torch.Tensor, reference: compress.Reference | None
    ) -> tuple[CodecSpec, list[Any]]:  # fmt: skip
        from fusionllm import compress

        shape = tuple(tensor.shape)
        state = self._states.get(name) or compress.init(spec, shape, dtype_name(tensor))
        if name in self._stored:
            state = state.load_state_dict(self._stored.pop(name))
        state = replace(state, shape=shape)
        spec, payload, self._states[name] = compress.encode_or_dense(tensor, state, reference=reference)
        if spec != IDENTITY and name.kind != "tied":  # the error of a gradient with what came before is none
            self._look_at(name, tensor, spec, payload, reference or compress.Reference())
        return spec, list(payload)

    def _look_at(
        self, name: Place, tensor: torch.Tensor, spec: CodecSpec, payload: list[Any], reference: compress.Reference
    ) -> None:  # fmt: skip
        """Keep up with what the receiver remembers; on a sample compare what it will have with what we have."""
        from fusionllm import compress

        shape, dtype, way = tuple(tensor.shape), dtype_name(tensor), (name.kind, name.stage, name.codec)
        memory = compress.remember(payload, spec, shape, dtype, self._sent_memories.get(name, {}))
        self._sent_memories[name] = memory
        if self.guard.wants(way):
            decoded = compress.decode(payload, spec, shape, dtype, reference=replace(reference, memory=memory))
            self.guard.note(way, compress.measure_distortion(tensor, decoded, 1).nmse)

    def decode(self, source: int, header: m.TensorHeader, payload: bytearray) -> Array:
        """The array of a message that `check_payload` let in. Raises RemoteProtocolError."""
        if header.kind == "tied" and header.codec != _DENSE:
            return self._decode_tied(payload, parse_codec(header.codec), header.shape[1:], header.dtype)
        place = (header.seq, header.microbatch_index, header.key, source)
        reference = self._references.pop(place, None) if header.kind == "gradient" else None
        spec = IDENTITY
        wanted = header.kind == "activation" and source in self._referring
        if header.codec == _DENSE and not wanted:
            return self._backend.from_buffer(payload, header.dtype, header.shape)
        if header.codec == _DENSE:
            tensor = load_backend("torch").from_buffer(payload, header.dtype, header.shape)
        else:
            spec = parse_codec(header.codec)
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

        name = Place(header.kind, source, header.key, str(spec))
        memory = compress.remember(payload, spec, header.shape, header.dtype, self._memories.get(name, {}))
        self._memories[name] = memory
        held = replace(reference or compress.Reference(), memory=memory)
        if reference is None and spec.needs_reference:
            raise RemoteProtocolError(f"gradient of {header.key!r} by {spec} without its activation")
        return compress.decode(payload, spec, header.shape, header.dtype, reference=held)

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, by keys that `parse_state_key` reads; between steps only."""
        states = {place: state.tensors for place, state in self._states.items()}
        ends = {"send": {**self._stored, **states}, "sent": self._sent_memories, "received": self._memories}
        found = {
            "/".join((end, *map(str, place), name)): tensor
            for end, places in ends.items() for place, tensors in places.items() for name, tensor in tensors.items()
        }  # fmt: skip
        for (kind, stage, codec), looks in self.guard.state().items():
            import torch

            found[f"guard/{kind}/{stage}//{codec}/looks"] = torch.tensor(looks, dtype=torch.float64)
        return found

    def load(self, key: str, dtype: str, shape: tuple[int, ...], payload: bytearray) -> None:
        """Take a tensor that `state` gave. Raises RemoteProtocolError."""
        end, place, name = parse_state_key(key)
        tensor = load_backend("torch").from_buffer(payload, dtype, shape)
        if end == "guard":
            self.guard.load((place.kind, place.stage, place.codec), tensor.flatten().tolist())
            return
        places = {"send": self._stored, "sent": self._sent_memories, "received": self._memories}[end]
        places[place] = {**places.get(place, {}), name: tensor}

    def finish(self, seq: int) -> None:
        """A step is over: forget what its messages left."""
        self._references = {place: held for place, held in self._references.items() if place[0] > seq}

    def _reference(self, tensor: torch.Tensor, spec: CodecSpec, payload: list[Any]) -> compress.Reference:
        from fusionllm import compress

        kept = None if spec == IDENTITY else compress.support(payload, spec, tuple(tensor.shape))
        return compress.Reference(activation=tensor, support=kept)
