"""The one verifier of OpGraphs: run at every hand-over, on everything that comes from outside.

Ground floor: knows the graph and the allow-list, nothing of who made the graph or who will execute it. What passes
here can be split, planned, written as text and executed without another look: every operator is listed, every
argument is of its schema, every value is defined before it is read, every size is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from fusionllm.errors import GraphError, near_names
from fusionllm.ir.graph import FORMAT_VERSION, UNUSED, Arg, Op, OpGraph
from fusionllm.ir.ops import OPS, OPSET, OpSchema
from fusionllm.ir.tensor import DTYPES, SCALARS, TensorSpec, dim_symbols

MAX_OPS = 200_000
MAX_VALUES = 1_000_000
MAX_TENSORS = 200_000
MAX_SYMBOLS = 64
MAX_RANK = 32
MAX_DIM = 1 << 48
MAX_DEPTH = 8
MAX_TEXT = 4096
_MAX_INT = 1 << 63
_FLOAT_WORDS = ("inf", "-inf", "nan")


def verify_graph(graph: OpGraph, allow_ops: Collection[str] = ()) -> None:
    """Check every rule of the IR.

    Args:
        allow_ops: operators allowed beyond the list, as `ir.ops.allowed_ops` gives them.

    Raises:
        GraphError: the first broken rule, with the operator, the value and what was expected. The one who reads the
            graph (owner, broker or node) refuses it.
    """
    _check_header(graph)
    defined = _check_tensors(graph)
    rng_indexes: set[int] = set()
    for index, op in enumerate(graph.ops):
        where = f"operator {index} ({op.name})"
        _check_op(op, where, defined, graph, allow_ops)
        if op.rng is not None:
            if op.rng in rng_indexes:
                raise GraphError(f"{where}: rng index {op.rng} is used twice; each random operator has its own")
            rng_indexes.add(op.rng)
        if len(defined) > MAX_VALUES:
            raise GraphError(f"more than {MAX_VALUES} values")
    _check_ends(graph, defined)


def _check_header(graph: OpGraph) -> None:
    if graph.version != FORMAT_VERSION:
        raise GraphError(f"opdag version {graph.version}, this release reads version {FORMAT_VERSION}")
    if not 1 <= graph.opset <= OPSET:
        raise GraphError(f"opset {graph.opset}, this release knows 1 to {OPSET}; upgrade fusionllm or capture again")
    if len(graph.ops) > MAX_OPS:
        raise GraphError(f"graph of {len(graph.ops)} operators, the limit is {MAX_OPS}")
    if len(graph.params) + len(graph.buffers) + len(graph.inputs) + len(graph.recv) > MAX_TENSORS:
        raise GraphError(f"more than {MAX_TENSORS} inputs, parameters and buffers")
    if len(graph.symbols) > MAX_SYMBOLS:
        raise GraphError(f"{len(graph.symbols)} symbolic sizes, the limit is {MAX_SYMBOLS}")
    _check_text(graph.producer, "producer")
    for name, least in graph.symbols.items():
        if not name.isidentifier() or len(name) > 64:
            raise GraphError(f"symbol {name[:80]!r} is not an identifier")
        if not 0 <= least <= MAX_DIM:
            raise GraphError(f"symbol {name}: least value {least} is outside 0 to {MAX_DIM}")


def _check_tensors(graph: OpGraph) -> set[str]:
    """Check inputs, parameters and buffers; returns the ids they define."""
    defined: set[str] = set()
    names: set[str] = set()
    for value in (*graph.inputs, *graph.recv):
        if value.id[:2] in ("p:", "b:"):
            raise GraphError(f"value {value.id}: p: and b: are for parameters and buffers")
        _define(value.id, value.spec, f"value {value.id[:80]!r}", defined, graph.symbols)
    for kind, prefix, tensors in (("parameter", "p:", graph.params), ("buffer", "b:", graph.buffers)):
        for name, tensor in tensors.items():
            where = f"{kind} {name[:80]!r}"
            if tensor.id != prefix + name:
                raise GraphError(f"{where} has id {tensor.id[:80]!r}, expected {prefix + name[:80]!r}")
            _define(tensor.id, tensor.spec, where, defined, graph.symbols)
            if not tensor.spec.is_tensor:
                raise GraphError(f"{where} is a {tensor.spec.dtype}, expected a tensor")
            if any(isinstance(dim, str) for dim in tensor.spec.shape):
                raise GraphError(f"{where} has shape {tensor.spec}, expected sizes known in advance")
            _check_names((name, *getattr(tensor, "aliases", ())), where, names)
    return defined


def _check_names(new: Iterable[str], where: str, names: set[str]) -> None:
    for name in new:
        _check_text(name, f"{where} name")
        if name in names:
            raise GraphError(f"{where}: the name {name!r} is taken; names and aliases are unique in a graph")
        names.add(name)


def _define(id: str, spec: TensorSpec, where: str, defined: set[str], symbols: Mapping[str, int]) -> None:
    if not id or id == UNUSED or not id.isprintable():
        raise GraphError(f"{where}: {id[:80]!r} is not a value id")
    _check_text(id, f"{where} id")
    if id in defined:
        raise GraphError(f"{where}: value {id!r} is defined twice")
    defined.add(id)
    _check_spec(spec, where, symbols)


def _check_spec(spec: TensorSpec, where: str, symbols: Mapping[str, int]) -> None:
    if spec.dtype not in DTYPES and spec.dtype not in SCALARS:
        raise GraphError(f"{where}: unknown dtype {spec.dtype[:40]!r}; known: {', '.join((*DTYPES, *SCALARS))}")
    if len(spec.shape) > (MAX_RANK if spec.is_tensor else 0):
        raise GraphError(f"{where}: {len(spec.shape)} dimensions for {spec.dtype}, the limit is {MAX_RANK}, scalars 0")
    for dim in spec.shape:
        if isinstance(dim, int):
            if not 0 <= dim <= MAX_DIM:
                raise GraphError(f"{where}: size {dim} is outside 0 to {MAX_DIM}")
        elif unknown := dim_symbols(dim) - symbols.keys():
            raise GraphError(f"{where}: dimension {dim!r} names {sorted(unknown)}; declared: {sorted(symbols)}")


def _schema(op: Op, where: str, allow_ops: Collection[str]) -> OpSchema:
    """The listed schema; of an allowed operator what it is given: its library checks the arguments when called."""
    schema = OPS.get(op.name)
    if schema is not None:
        return schema
    if op.name in allow_ops:
        if odd := [name for name in op.args if not name.isidentifier() or len(name) > 64]:
            raise GraphError(f"{where} has an argument named {odd[0][:80]!r}")
        return OpSchema(tuple(op.args), 0)
    near = near_names(op.name, (*OPS, *allow_ops), 3)
    hint = f"; near ones: {', '.join(near)}" if near else ""
    raise GraphError(
        f"{where[:120]} is not in the list of operators of opset {OPSET} and not allowed here by name{hint}"
    )


def _check_op(op: Op, where: str, defined: set[str], graph: OpGraph, allow_ops: Collection[str]) -> None:
    schema = _schema(op, where, allow_ops)
    if schema.opset > graph.opset:
        raise GraphError(f"{where} needs opset {schema.opset}, the graph declares {graph.opset}")
    if extra := sorted(op.args.keys() - set(schema.args)):
        raise GraphError(f"{where} has no argument {extra[0][:80]!r}; it takes {', '.join(schema.args) or 'none'}")
    if missing := [name for name in schema.args[: schema.num_required] if name not in op.args]:
        raise GraphError(f"{where} lacks the argument {missing[0]!r}")
    for name, arg in op.args.items():
        _check_arg(arg, f"{where} argument {name}", defined, 1)
    if len(op.outs) != len(op.specs):
        raise GraphError(f"{where} has {len(op.outs)} results and {len(op.specs)} result types")
    if all(out == UNUSED for out in op.outs):
        raise GraphError(f"{where} has no result that is read; leave it out")
    if op.rng is not None and (not schema.rng or not 0 <= op.rng < MAX_OPS):
        raise GraphError(f"{where} has rng index {op.rng}, " + ("out of range" if schema.rng else "but is not random"))
    if schema.rng and op.rng is None and _draws(op):
        raise GraphError(f"{where} draws random numbers but has no rng index; other stages could not draw the same")
    _check_text(op.scope, f"{where} scope")
    _check_text(op.source, f"{where} source")
    for out, spec in zip(op.outs, op.specs):
        if out[:2] in ("p:", "b:"):
            raise GraphError(f"{where}: result {out[:80]!r} is named like a parameter or buffer")
        if out == UNUSED:
            _check_spec(spec, where, graph.symbols)
        else:
            _define(out, spec, where, defined, graph.symbols)


def _draws(op: Op) -> bool:
    """Whether a random operator may draw: its probability is anything but absent or 0."""
    chances = [op.args.get(name) for name in ("p", "dropout_p", "dropout")]
    return any(c is not None and (not isinstance(c, (int, float)) or c != 0) for c in chances)


def _check_arg(arg: Arg, where: str, defined: set[str], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise GraphError(f"{where} is nested deeper than {MAX_DEPTH}")
    if arg is None or isinstance(arg, bool):
        return
    if isinstance(arg, int):
        if not -_MAX_INT <= arg < _MAX_INT:
            raise GraphError(f"{where} is an integer of {arg.bit_length()} bits, the limit is 64")
    elif isinstance(arg, float):
        if not math.isfinite(arg):
            raise GraphError(f'{where} is {arg}; write it as {{"f": "{arg}"}}')
    elif isinstance(arg, str):
        _check_text(arg, where)
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            _check_arg(item, where, defined, depth + 1)
    else:
        _check_tagged(arg, where, defined)


def _check_tagged(arg: Arg, where: str, defined: set[str]) -> None:
    """``{"r": id}``, ``{"dt": dtype}`` or ``{"f": word}``."""
    if not isinstance(arg, dict) or len(arg) != 1:
        raise GraphError(f"{where} is a {type(arg).__name__} the format does not know")
    ((tag, content),) = arg.items()
    if not isinstance(content, str):
        raise GraphError(f"{where}: a {tag!r} argument holds a {type(content).__name__}, expected text")
    if tag == "r":
        if content not in defined:
            raise GraphError(f"{where} reads value {content[:80]!r}, which is not defined before it")
    elif tag == "dt":
        if content not in DTYPES:
            raise GraphError(f"{where} names dtype {content[:40]!r}; known: {', '.join(DTYPES)}")
    elif tag != "f" or content not in _FLOAT_WORDS:
        raise GraphError(f"{where} holds {str(arg)[:80]}; expected a value (r), a dtype (dt) or inf, -inf, nan (f)")


def _check_ends(graph: OpGraph, defined: set[str]) -> None:
    """Outputs, mutations and what a stage sends are values of the graph, each listed once."""
    made = {out for op in graph.ops for out in op.outs}
    for kind, ids in (("output", graph.outputs), ("sent value", graph.send)):
        if len(set(ids)) != len(ids):
            raise GraphError(f"an {kind} is listed twice" if kind == "output" else f"a {kind} is listed twice")
        for id in ids:
            if id not in defined or id[:2] in ("p:", "b:"):
                raise GraphError(f"{kind} {id[:80]!r} is not a value the graph computes")
            if kind == "sent value" and id not in made:
                raise GraphError(f"{kind} {id[:80]!r} is not computed by this stage")
    named = set(graph.frozen)
    if tuple(v.id for v in graph.recv if v.id in named and v.spec.is_float) != graph.frozen:
        raise GraphError("the frozen values are not floating-point values this stage receives, each once and in order")
    for buffer, value in graph.mutations.items():
        if buffer[:2] != "b:" or buffer[2:] not in graph.buffers:
            raise GraphError(f"mutation of {buffer[:80]!r}, which is not a buffer of the graph")
        if value not in made or value == UNUSED:
            raise GraphError(f"mutation of {buffer}: {value[:80]!r} is not computed by the graph")


def _check_text(text: str, where: str) -> None:
    if len(text) > MAX_TEXT:
        raise GraphError(f"{where[:200]}: text of {len(text)} characters, the limit is {MAX_TEXT}")
