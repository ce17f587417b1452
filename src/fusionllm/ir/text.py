"""Graphs as text: one line per input, parameter, operator and result, for people, diffs and logs; parses back exactly.

Ground floor: knows the graph, not who made it. What `parse_graph` reads is verified before it is handed on. Like this:

    opdag 1 opset 1 train
    symbol B >= 1
    input %ids : int64["B", 64]
    param %p:wte.weight : float32[512, 64] alias "lm_head.weight"
    %x = aten.embedding.default(weight=%p:wte.weight, indices=%ids) : float32[B, 64, 64] @ "wte"
    %y, _ = aten.native_dropout.default(input=%x, p=0.1, train=true) rng 0 : float32[B, 64, 64], bool[B, 64, 64]
    output %y

Ids, scopes and names are quoted as in JSON where they hold other than plain characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from fusionllm.errors import GraphError
from fusionllm.ir.graph import MAX_GRAPH_BYTES, UNUSED, Arg, Buffer, Op, OpGraph, Param, Value
from fusionllm.ir.tensor import DTYPES, Dim, TensorSpec
from fusionllm.ir.verify import MAX_DEPTH, verify_graph

_T = TypeVar("_T")
_STRING = r'"(?:[^"\\]|\\.)*"'
_PLAIN_ID = r"[A-Za-z0-9_.:/\-]+"
_PLAIN_DIM = r"[A-Za-z_][A-Za-z0-9_]*(?:[+*/%-]+[A-Za-z0-9_]+)*"
_INTEGER = r"-?[0-9]+(?![\w.])"
_FLOAT = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_WORD = r"[A-Za-z_][A-Za-z0-9_.]*"
_SPACE = re.compile(r" *")


def graph_to_text(graph: OpGraph) -> str:
    """The graph as text. `parse_graph` of it equals a verified graph."""
    return "\n".join(_lines(graph)) + "\n"


def parse_graph(text: str, allow_ops: Collection[str] = ()) -> OpGraph:
    """Read a graph back and verify it.

    Args:
        allow_ops: operators allowed beyond the list, as `ir.ops.allowed_ops` gives them.

    Raises:
        GraphError: too large, a line that is not of the form (with its number), or a broken rule of the IR.
    """
    if len(text) > MAX_GRAPH_BYTES:
        raise GraphError(f"graph of {len(text)} characters, the limit is {MAX_GRAPH_BYTES}")
    builder = _Builder()
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip(" \r"):
            _parse_line(_Reader(line.rstrip(" \r"), number), builder)
    graph = builder.finish()
    verify_graph(graph, allow_ops)
    return graph


# ---------------------------------------------------------------------------------------------------------- writing


def _lines(graph: OpGraph) -> Iterator[str]:
    producer = f" producer {_quote(graph.producer)}" if graph.producer else ""
    yield f"opdag {graph.version} opset {graph.opset} {graph.mode}{producer}"
    for name, least in graph.symbols.items():
        yield f"symbol {name} >= {least}"
    for kind, values in (("input", graph.inputs), ("recv", graph.recv)):
        for value in values:
            frozen = " frozen" if value.id in graph.frozen else ""
            yield f"{kind} {_id(value.id)} : {_spec(value.spec)}{frozen}"
    for param in graph.params.values():
        aliases = "".join(f" alias {_quote(a)}" for a in param.aliases)
        yield f"param {_id(param.id)} : {_spec(param.spec)}{'' if param.trainable else ' frozen'}{aliases}"
    for buffer in graph.buffers.values():
        yield f"buffer {_id(buffer.id)} : {_spec(buffer.spec)}{'' if buffer.persistent else ' transient'}"
    for op in graph.ops:
        yield _op(op)
    yield from (f"mutate {_id(buffer)} = {_id(value)}" for buffer, value in graph.mutations.items())
    yield from (f"output {_id(id)}" for id in graph.outputs)
    yield from (f"send {_id(id)}" for id in graph.send)


def _op(op: Op) -> str:
    outs = ", ".join(UNUSED if out == UNUSED else _id(out) for out in op.outs)
    args = ", ".join(f"{name}={_arg(arg)}" for name, arg in op.args.items())
    rng = "" if op.rng is None else f" rng {op.rng}"
    where = f" @ {_quote(op.scope)}" if op.scope or op.source else ""
    source = f" {_quote(op.source)}" if op.source else ""
    return f"{outs} = {op.name}({args}){rng} : {', '.join(_spec(s) for s in op.specs)}{where}{source}"


def _quote(text: str) -> str:
    return json.dumps(text)


def _id(id: str) -> str:
    return f"%{id if re.fullmatch(_PLAIN_ID, id) else _quote(id)}"


def _spec(spec: TensorSpec) -> str:
    return f"{spec.dtype}[{', '.join(_dim(d) for d in spec.shape)}]"


def _dim(dim: Dim) -> str:
    return str(dim) if isinstance(dim, int) or re.fullmatch(_PLAIN_DIM, dim) else _quote(dim)


def _arg(arg: Arg) -> str:
    if arg is None:
        return "none"
    if isinstance(arg, bool):
        return "true" if arg else "false"
    if isinstance(arg, str):
        return _quote(arg)
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_arg(item) for item in arg)}]"
    if isinstance(arg, dict):
        return _id(arg["r"]) if "r" in arg else str(arg.get("dt") or arg["f"])
    return repr(arg)


# ---------------------------------------------------------------------------------------------------------- reading


class _Reader:
    """A cursor over one line; spaces between tokens are skipped."""

    def __init__(self, line: str, number: int) -> None:
        self.line, self.number, self.at = line, number, 0

    def fail(self, expected: str) -> NoReturn:
        found = self.line[self.at : self.at + 40]
        raise GraphError(f"line {self.number}, column {self.at + 1}: expected {expected}, found {found!r}")

    def skip(self) -> None:
        match = _SPACE.match(self.line, self.at)
        self.at = match.end() if match else self.at

    def take(self, pattern: str) -> str | None:
        self.skip()
        match = re.compile(pattern).match(self.line, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def need(self, pattern: str, expected: str) -> str:
        token = self.take(pattern)
        return self.fail(expected) if token is None else token

    def at_end(self) -> bool:
        self.skip()
        return self.at == len(self.line)

    def integer(self) -> int:
        token = self.need(_INTEGER, "an integer")
        return self.fail("an integer of at most 64 bits") if len(token) > 20 else int(token)

    def string(self) -> str:
        token = self.need(_STRING, "a quoted string")
        return self._unquote(token)

    def _unquote(self, token: str) -> str:
        try:
            text = json.loads(token)
        except ValueError:
            self.fail("a string quoted as in JSON")
        return text if isinstance(text, str) else self.fail("a string")

    def id(self) -> str:
        self.need("%", "a value such as %x")
        plain = self.take(_PLAIN_ID)
        return self.string() if plain is None else plain

    def separated(self, item: Callable[[], _T], close: str) -> list[_T]:
        """Items up to the closing bracket."""
        items: list[_T] = []
        if self.take(re.escape(close)):
            return items
        while True:
            items.append(item())
            if self.take(re.escape(close)):
                return items
            self.need(",", f"',' or {close!r}")

    def listed(self, item: Callable[[], _T]) -> list[_T]:
        """One or more items with commas between."""
        items = [item()]
        while self.take(","):
            items.append(item())
        return items

    def spec(self) -> TensorSpec:
        dtype = self.need(_WORD, "a dtype")
        self.need(r"\[", "'['")
        return TensorSpec(dtype, tuple(self.separated(self.dim, "]")))

    def dim(self) -> Dim:
        plain = self.take(_PLAIN_DIM)
        if plain is not None:
            return plain
        quoted = self.take(_STRING)
        return self.integer() if quoted is None else self._unquote(quoted)

    def arg(self, depth: int = 1) -> Arg:
        if depth > MAX_DEPTH:
            self.fail(f"at most {MAX_DEPTH} levels of lists")
        if self.take(r"\["):
            return self.separated(lambda: self.arg(depth + 1), "]")
        if self.take("(?=%)") is not None:
            return {"r": self.id()}
        if (quoted := self.take(_STRING)) is not None:
            return self._unquote(quoted)
        if self.take(f"(?={_INTEGER})") is not None:
            return self.integer()
        if (number := self.take(_FLOAT)) is not None:
            return float(number)
        return self._word(self.need(rf"-?{_WORD}", "an argument"))

    def _word(self, word: str) -> Arg:
        constants: dict[str, Any] = {"none": None, "true": True, "false": False}
        if word in constants:
            return constants[word]
        if word in ("inf", "-inf", "nan"):
            return {"f": word}
        return {"dt": word} if word in DTYPES else self.fail(f"a dtype or constant, not {word[:40]!r}")


class _Builder:
    """Fields of the graph, gathered line by line."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.symbols: dict[str, int] = {}
        self.params: dict[str, Param] = {}
        self.buffers: dict[str, Buffer] = {}
        self.mutations: dict[str, str] = {}
        self.inputs: list[Value] = []
        self.recv: list[Value] = []
        self.ops: list[Op] = []
        self.outputs: list[str] = []
        self.send: list[str] = []
        self.frozen: list[str] = []

    def finish(self) -> OpGraph:
        if not self.header:
            raise GraphError("not an opdag text: the first line must be like 'opdag 1 opset 1 train'")
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(self).items() if k != "header"}
        try:
            return msgspec.convert({**self.header, **fields}, OpGraph, from_attributes=True)
        except msgspec.ValidationError as error:
            raise GraphError(f"not an opdag text: {error}") from None


def _parse_line(reader: _Reader, into: _Builder) -> None:
    keyword = reader.take(r"[a-z]+(?= )")
    if not into.header and keyword != "opdag":
        reader.fail("'opdag' first")
    if keyword is None:
        into.ops.append(_parse_op(reader))
    elif keyword in _STATEMENTS:
        _STATEMENTS[keyword](reader, into)
    else:
        reader.fail(f"an operator or one of {', '.join(_STATEMENTS)}")
    if not reader.at_end():
        reader.fail("the end of the line")


def _parse_header(reader: _Reader, into: _Builder) -> None:
    if into.header:
        reader.fail("one header only")
    into.header["version"] = reader.integer()
    reader.need("opset", "'opset'")
    into.header["opset"] = reader.integer()
    into.header["mode"] = reader.need("train|eval", "train or eval")
    if reader.take("producer"):
        into.header["producer"] = reader.string()


def _parse_symbol(reader: _Reader, into: _Builder) -> None:
    name = reader.need(r"[^ ]+", "a name")
    reader.need(">=", "'>='")
    _put(into.symbols, name, reader.integer(), reader)


def _parse_value(reader: _Reader) -> Value:
    id = reader.id()
    reader.need(":", "':'")
    return Value(id, reader.spec())


def _parse_received(reader: _Reader, into: _Builder) -> None:
    into.recv.append(_parse_value(reader))
    if reader.take("frozen"):
        into.frozen.append(into.recv[-1].id)


def _parse_param(reader: _Reader, into: _Builder) -> None:
    value = _parse_value(reader)
    trainable = reader.take("frozen") is None
    aliases = []
    while reader.take("alias"):
        aliases.append(reader.string())
    _put(into.params, value.id[2:], Param(value.id, value.spec, trainable, tuple(aliases)), reader)


def _parse_buffer(reader: _Reader, into: _Builder) -> None:
    value = _parse_value(reader)
    _put(into.buffers, value.id[2:], Buffer(value.id, value.spec, reader.take("transient") is None), reader)


def _parse_mutation(reader: _Reader, into: _Builder) -> None:
    buffer = reader.id()
    reader.need("=", "'='")
    _put(into.mutations, buffer, reader.id(), reader)


def _put(table: dict[str, _T], name: str, item: _T, reader: _Reader) -> None:
    if name in table:
        reader.fail(f"{name[:80]!r} once only")
    table[name] = item


_STATEMENTS: dict[str, Callable[[_Reader, _Builder], None]] = {
    "opdag": _parse_header,
    "symbol": _parse_symbol,
    "input": lambda reader, into: into.inputs.append(_parse_value(reader)),
    "recv": _parse_received,
    "param": _parse_param,
    "buffer": _parse_buffer,
    "mutate": _parse_mutation,
    "output": lambda reader, into: into.outputs.append(reader.id()),
    "send": lambda reader, into: into.send.append(reader.id()),
}


def _parse_op(reader: _Reader) -> Op:
    def out() -> str:
        return UNUSED if reader.take(r"_(?![\w])") else reader.id()

    def named_arg() -> tuple[str, Arg]:
        name = reader.need(_WORD, "an argument name")
        reader.need("=", "'='")
        return name, reader.arg()

    outs = reader.listed(out)
    reader.need("=", "'='")
    name = reader.need(_WORD, "an operator")
    reader.need(r"\(", "'('")
    args: dict[str, Arg] = {}
    for arg_name, arg in reader.separated(named_arg, ")"):
        _put(args, arg_name, arg, reader)
    rng = reader.integer() if reader.take("rng") else None
    reader.need(":", "':'")
    specs: Sequence[TensorSpec] = reader.listed(reader.spec)
    scope = source = ""
    if reader.take("@"):
        scope = reader.string()
        source = "" if reader.at_end() else reader.string()
    return Op(name=name, args=args, outs=tuple(outs), specs=tuple(specs), scope=scope, source=source, rng=rng)
