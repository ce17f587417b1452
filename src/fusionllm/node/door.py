"""What may come in: every tensor header is checked against the stage before a byte of its payload is kept.

Called in the loop's thread; reads what the assignment says and changes nothing.
"""

from __future__ import annotations

import math

import msgspec

from fusionllm.errors import GraphError, RemoteProtocolError
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.tensor import FLOATS, TensorSpec, bind_batch
from fusionllm.node.codecs import check_payload, parse_state_key
from fusionllm.protocol import messages as m
from fusionllm.protocol.stage import OWNER

MAX_ORDER_BYTES = 1 << 20


class Door:
    """Knows which tensors a stage of a job may be sent, by whom, and how large."""

    def __init__(self, assign: m.Assign, graph: OpGraph) -> None:
        self._assign, self._graph = assign, graph
        self._specs, self._held = graph.specs(), graph.held

    def admit(self, source: int, header: m.TensorHeader, num_bytes: int) -> None:
        """Check a header; ``source`` is a stage index or OWNER. Raises RemoteProtocolError."""
        if header.kind in ("step", "fetch", "offer"):
            if source != OWNER or num_bytes > (m.MAX_OFFER_BYTES if header.kind == "offer" else MAX_ORDER_BYTES):
                raise RemoteProtocolError(f"a {header.kind} message of {num_bytes} bytes from {source}")
            return
        if header.kind == "codec":
            self._admit_state(source, header.key, num_bytes)
            return
        spec = self._spec_of(header)
        try:
            symbols = bind_batch(spec.shape, header.shape, self._graph.symbols)
            fits = spec.dtype == header.dtype and spec.concrete(symbols) == header.shape
        except GraphError:
            fits = False
        options = self._assign.options
        limits = self._graph.sizes(options.microbatch_size, options.max_length)
        if not fits or any(size > limits[name] for name, size in symbols.items()):
            raise RemoteProtocolError(
                f"{header.kind} {header.key!r} is {header.dtype}{list(header.shape)}, "
                f"expected {spec} with sizes up to {limits}"
            )
        check_payload(header, num_bytes, self._assign.codecs.get(source), options.compression.tied)

    def _admit_state(self, source: int, key: str, num_bytes: int) -> None:
        """A codec holds no more per tensor than a square of the value's width, or the value, in 8 bytes."""
        end, place, _ = parse_state_key(key)
        tied = place.kind == "tied" and place.value in self._assign.tied
        spec, limit = self._graph.params[place.value].spec if tied else self._specs.get(place.value), 64
        if spec is not None:
            options = self._assign.options
            shape = spec.concrete(self._graph.sizes(options.microbatch_size, options.max_length))
            limit = 8 * max(math.prod(shape), (shape or (1,))[-1] ** 2, 1)
        known = tied or (place.stage in self._assign.codecs and (spec is not None or end == "guard"))
        if source != OWNER or not known or num_bytes > limit:
            raise RemoteProtocolError(f"{num_bytes} bytes of codec state {key[:80]!r} from {source}")

    def _spec_of(self, header: m.TensorHeader) -> TensorSpec:
        graph, assign = self._graph, self._assign
        if header.kind in ("input", "activation", "gradient") and header.key in self._specs:
            return self._specs[header.key]
        if header.kind == "weight" and header.key in self._held:
            return self._held[header.key].spec
        if header.kind == "optimizer" and (name := header.key.partition("/")[2]) in graph.params:
            return _state_spec(graph.params[name].spec, header)
        if header.kind == "tied" and header.key in assign.tied and header.shape:
            spec = graph.params[header.key].spec
            if not 1 <= header.shape[0] <= assign.options.num_microbatches:
                raise RemoteProtocolError(f"tied gradient of {header.shape[0]} microbatches")
            return msgspec.structs.replace(spec, shape=(header.shape[0], *spec.shape))
        raise RemoteProtocolError(f"nobody here asked for {header.kind} {header.key!r}")


def _state_spec(param: TensorSpec, header: m.TensorHeader) -> TensorSpec:
    """What a tensor of a parameter's optimizer state may be: a number, or of its shape (factored: some axes are 1)."""
    shape = header.shape
    fits = len(shape) == len(param.shape) and all(a in (1, b) for a, b in zip(shape, param.shape))
    dtype = header.dtype if header.dtype in FLOATS else param.dtype
    return TensorSpec(dtype, shape if fits or shape == () else param.shape)
