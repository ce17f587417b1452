"""OpGraph: a model, or one stage of it, as operators on named values. The `opdag` format, version 1.

Ground floor: knows no framework. Capture makes one, `ir.cuts` splits it into stages that are OpGraphs again, the
planner reads it, a backend executes it. Operators are functional ATen overload names (and a few ``ir.*``, ``sym.*``)
from our own table `ir.ops`; arguments are bound by the names of that table, so that an argument added or moved in a
framework release changes nothing. Written as JSON; tensors travel beside it as safetensors. Never pickled.

An argument is plain JSON: ``None``, bool, int, float, str, a list of arguments, or one of
``{"r": value_id}`` (a value), ``{"dt": "float32"}`` (a dtype), ``{"f": "inf"}`` (a float JSON cannot write).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import msgspec

from fusionllm.errors import GraphError
from fusionllm.ir.tensor import TensorSpec

FORMAT_VERSION = 1
MAX_GRAPH_BYTES = 256 << 20
UNUSED = "_"
Arg = Any


class Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A named value from outside the graph: a model input, or (in a stage) one received from another stage."""

    id: str
    spec: TensorSpec


class Param(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A parameter under its canonical name; ``aliases`` are the other names of the same tensor (tied weights)."""

    id: str
    spec: TensorSpec
    trainable: bool = True
    aliases: tuple[str, ...] = ()


class Buffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor of the model that is not trained: batch-norm statistics, rotary frequencies, a captured constant."""

    id: str
    spec: TensorSpec
    persistent: bool = True


class Op(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One operator call. ``outs`` and ``specs`` have one entry per result; ``"_"`` marks a result nobody reads."""

    name: str
    args: dict[str, Arg]
    outs: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    scope: str = ""
    source: str = ""
    rng: int | None = None

    def refs(self) -> Iterator[str]:
        """Ids of the values this call reads, in argument order, repeats included."""
        for arg in self.args.values():
            yield from arg_refs(arg)


class OpGraph(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model in one mode for one input signature, or one stage of it.

    Attributes:
        symbols: symbolic sizes with their smallest legal value, e.g. ``{"B": 1}``; bound from the inputs' shapes.
        inputs: raw inputs in the order of the model's signature (a stage lists those it needs).
        params, buffers: by original name. A value id is ``p:NAME`` or ``b:NAME``.
        ops: in execution order.
        outputs: ids of the results, the loss first.
        mutations: buffer id -> id of the value that replaces it after a forward pass.
        recv: (stage) values that other stages produce. send: (stage) ids of values other stages need.
        frozen: (stage) ids of those received floating-point values that no trained parameter stands behind: nobody
            needs their gradient.
    """

    format: Literal["opdag"] = "opdag"
    version: int = FORMAT_VERSION
    opset: int = 1
    producer: str = ""
    mode: Literal["train", "eval"] = "train"
    symbols: dict[str, int] = {}
    inputs: tuple[Value, ...]
    params: dict[str, Param]
    buffers: dict[str, Buffer] = {}
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    mutations: dict[str, str] = {}
    recv: tuple[Value, ...] = ()
    send: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    def specs(self) -> dict[str, TensorSpec]:
        """Spec of every value of the graph, by id."""
        specs = {v.id: v.spec for v in (*self.inputs, *self.recv)}
        specs |= {p.id: p.spec for p in self.params.values()}
        specs |= {b.id: b.spec for b in self.buffers.values()}
        for op in self.ops:
            specs |= {out: spec for out, spec in zip(op.outs, op.specs) if out != UNUSED}
        return specs

    def bind_symbols(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Values of the symbolic sizes, read off the concrete shapes of the inputs and received values.

        Raises GraphError when a shape contradicts the graph: wrong rank, wrong size, or a size below the least.
        """
        symbols: dict[str, int] = {}
        for value in (*self.inputs, *self.recv):
            if value.id not in shapes:
                continue
            shape, spec = shapes[value.id], value.spec
            if len(shape) != len(spec.shape):
                raise GraphError(f"value {value.id} has shape {list(shape)}, the graph expects {spec}")
            for size, dim in zip(shape, spec.shape):
                if isinstance(dim, str) and dim in self.symbols:
                    if symbols.setdefault(dim, size) != size or size < self.symbols[dim]:
                        least = self.symbols[dim]
                        raise GraphError(
                            f"value {value.id}: size {size} for {dim}, expected {symbols[dim]}, at least {least}"
                        )
                elif isinstance(dim, int) and dim != size:
                    raise GraphError(f"value {value.id} has shape {list(shape)}, the graph expects {spec}")
        return symbols

    def sizes(self, rows: int, length: int = 0) -> dict[str, int]:
        """Values of the symbolic sizes for ``rows`` rows and, where that is open too, sequences of ``length``.

        The first dimension of the first input is ``B`` in every captured graph.
        """
        return {name: rows if name == "B" else length or rows for name in self.symbols}

    @property
    def held(self) -> dict[str, Param | Buffer]:
        """The tensors that whoever runs this graph holds: parameters and buffers by name."""
        return {**self.params, **self.buffers}

    @property
    def num_params(self) -> int:
        """Number of parameter elements, tied ones counted once."""
        return sum(p.spec.numel({}) for p in self.params.values())

    def content_hash(self) -> str:
        """Identity of the graph: SHA-256 of its canonical JSON, producer and provenance left out."""
        bare = msgspec.structs.replace(
            self, producer="", ops=tuple(msgspec.structs.replace(op, scope="", source="") for op in self.ops)
        )
        return hashlib.sha256(encode_graph(bare)).hexdigest()


def arg_refs(arg: Arg) -> Iterator[str]:
    """Ids of the values an argument mentions."""
    if isinstance(arg, dict):
        if "r" in arg:
            yield arg["r"]
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from arg_refs(item)


def rename_refs(arg: Arg, names: Mapping[str, str]) -> Arg:
    """The same argument with value ids replaced."""
    if isinstance(arg, dict):
        return {"r": names.get(arg["r"], arg["r"])} if "r" in arg else arg
    if isinstance(arg, (list, tuple)):
        return [rename_refs(item, names) for item in arg]
    return arg


def encode_graph(graph: OpGraph) -> bytes:
    """The graph as JSON, deterministic."""
    # msgspec leaves out what *is* the default, and before Python 3.11 there are several empty tuples
    graph = msgspec.structs.replace(
        graph,
        recv=graph.recv or (),
        send=graph.send or (),
        frozen=graph.frozen or (),
        params={n: p if p.aliases else msgspec.structs.replace(p, aliases=()) for n, p in graph.params.items()},
    )
    return msgspec.json.encode(graph, order="deterministic")


def decode_graph(data: bytes, allow_ops: Collection[str] = ()) -> OpGraph:
    """Read a graph from outside and verify it.

    Args:
        allow_ops: operators that the reader allows beyond the list, as `ir.ops.allowed_ops` gives them.

    Raises:
        GraphError: too large, not JSON of this format, another version, or a broken rule of the IR.
    """
    from fusionllm.ir.verify import verify_graph

    if len(data) > MAX_GRAPH_BYTES:
        raise GraphError(f"graph of {len(data)} bytes, the limit is {MAX_GRAPH_BYTES}")
    try:
        graph = msgspec.json.decode(data, type=OpGraph)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as error:
        raise GraphError(f"not an opdag graph: {error}") from None
    verify_graph(graph, allow_ops)
    return graph
