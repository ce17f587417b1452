"""From an exported program to a small, plain OpGraph: fewer operators for every backend to know.

Views become reshape, dtype changes ``ir.cast``, dropout ``ir.dropout`` with an index into the run's randomness; clones,
aliases, asserts and devices go; results of multi-output operators get names of their own; tied parameters become
aliases of one; then dead code and common subexpressions are removed. Sits between torch.export and `ir.verify`.
"""

from __future__ import annotations

import math
import operator
import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.export.graph_signature import InputKind, OutputKind

import fusionllm
from fusionllm.errors import CaptureError
from fusionllm.ir.graph import UNUSED, Arg, Buffer, Op, OpGraph, Param, Value, rename_refs
from fusionllm.ir.modes import remove_dead
from fusionllm.ir.ops import OPS
from fusionllm.ir.tensor import TensorSpec

SYMBOL_OPS: dict[Any, str] = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.floordiv: "floordiv",
    operator.truediv: "truediv", operator.mod: "mod", operator.eq: "eq", operator.ne: "ne", operator.ge: "ge",
    operator.le: "le", operator.gt: "gt", operator.lt: "lt", operator.neg: "neg",
}  # fmt: skip
_DROPPED = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "sym_constrain_range"}
_IDENTITY = {"clone", "alias", "contiguous", "lift_fresh_copy", "lift_fresh"}
_RESHAPES = {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"}
_CASTS = {"to", "_to_copy"}
_BROADCAST = "aten.broadcast_tensors.default"
_DROPOUTS = {"aten.dropout.default", "aten.native_dropout.default"}
_RECURRENT = {"lstm", "gru"}
_STRIPPED = {"device", "layout", "pin_memory", "memory_format", "non_blocking"}


class GraphBuilder:
    """Builds the OpGraph of one exported program."""

    def __init__(
        self, program: Any, module: torch.nn.Module, names: tuple[str, ...], mode: Literal["train", "eval"],
        allow_ops: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._program, self._module, self._names, self._mode = program, module, names, mode
        self._allow_ops = allow_ops
        self._ids: dict[str, str] = {}
        self._ops: list[Op] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._params: dict[str, Param] = {}
        self._buffers: dict[str, Buffer] = {}
        self._inputs: dict[str, Value] = {}
        self._symbols: dict[str, str] = {}
        self._num_rng = 0

    def build(self) -> tuple[OpGraph, dict[str, torch.Tensor]]:
        self._bind_placeholders()
        for node in self._program.graph.nodes:
            if node.op == "call_function":
                self._add(node)
            elif node.op not in ("placeholder", "output"):
                raise CaptureError(f"the model has a {node.op} ({node.target}) that no graph can hold")
        outputs, mutations = self._outputs()
        graph = OpGraph(
            producer=f"torch {torch.__version__}",
            mode=self._mode,
            symbols=dict.fromkeys(self._symbols.values(), 1),
            inputs=tuple(self._inputs[n] for n in self._names if n in self._inputs),
            params=self._params,
            buffers=self._buffers,
            ops=tuple(self._ops),
            outputs=outputs,
            mutations=mutations,
        )
        graph = _renumber(merge_equal(remove_dead(graph)))
        return graph, {n: t for n, t in self._tensors.items() if n in graph.params or n in graph.buffers}

    # values from outside

    def _bind_placeholders(self) -> None:
        named = dict(self._module.named_parameters(remove_duplicate=False))
        canonical: dict[int, list[str]] = {}
        for name, parameter in named.items():
            canonical.setdefault(id(parameter), []).append(name)
        for names in canonical.values():
            parameter = named[names[0]]
            self._params[names[0]] = Param(
                f"p:{names[0]}", self._spec(parameter), bool(parameter.requires_grad), tuple(names[1:])
            )
            self._tensors[names[0]] = parameter.detach()
        nodes = {node.name: node for node in self._program.graph.nodes if node.op == "placeholder"}
        user = iter(self._names)
        for spec in self._program.graph_signature.input_specs:
            placeholder = spec.arg.name
            if spec.kind is InputKind.PARAMETER:
                name = canonical[id(named[spec.target.removeprefix("module.")])][0]
                self._ids[placeholder] = f"p:{name}"
            elif spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                self._bind_buffer(placeholder, spec.target)
            elif spec.kind is InputKind.USER_INPUT:
                name = next(user)
                value = nodes[placeholder].meta["val"]
                self._inputs[name] = Value(name, self._spec(value))
                self._ids[placeholder] = name
            else:
                raise CaptureError(f"the model takes a {spec.kind.name.lower()} input, which no graph can hold")

    def _bind_buffer(self, placeholder: str, target: str) -> None:
        tensor = self._program.state_dict.get(target)
        persistent = tensor is not None
        if tensor is None:
            tensor = self._program.constants[target]
        name = target.removeprefix("module.")
        self._buffers[name] = Buffer(f"b:{name}", self._spec(tensor), persistent)
        self._tensors[name] = tensor.detach()
        self._ids[placeholder] = f"b:{name}"

    def _outputs(self) -> tuple[tuple[str, ...], dict[str, str]]:
        (output,) = (node for node in self._program.graph.nodes if node.op == "output")
        outputs: list[str] = []
        mutations: dict[str, str] = {}
        for spec, value in zip(self._program.graph_signature.output_specs, output.args[0]):
            if spec.kind is OutputKind.USER_OUTPUT:
                outputs.append(self._ids[value.name])
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                mutations[f"b:{spec.target.removeprefix('module.')}"] = self._ids[value.name]
            else:
                raise CaptureError(
                    f"the model changes an input in place ({spec.kind.name.lower()}); work on a clone of it"
                )
        return tuple(outputs), mutations

    # operators

    def _add(self, node: Any) -> None:
        if node.target is operator.getitem:
            return  # named when its producer was added
        name = self._name_of(node)
        if name is None:
            return
        base = name.split(".")[1] if name.startswith("aten.") else ""
        if base in _IDENTITY or (base in _CASTS and self._same_dtype(node)):
            self._ids[node.name] = self._ids[node.args[0].name]
            return
        if name in _DROPOUTS:
            self._add_dropout(node)
            return
        if name == _BROADCAST:
            self._add_broadcast(node)
            return
        args = self._bind(node, name)
        if name in _RESHAPES:
            name, args = (
                "aten.reshape.default",
                {"self": args["self"], "shape": next(v for k, v in args.items() if k != "self")},
            )
        elif base in _CASTS:
            name, args = "ir.cast", {"x": args["self"], "dtype": {"dt": _dtype(node.meta["val"].dtype)}}
        elif base == "empty_like":
            name, args = "aten.zeros_like.default", args
        elif base in _RECURRENT and (not args["train"] or args["num_layers"] == 1):
            args["dropout"] = 0.0
        rng = self._next_rng() if any(args.get(chance) for chance in ("dropout_p", "dropout")) else None
        self._append(node, name, args, rng)

    def _name_of(self, node: Any) -> str | None:
        target = node.target
        if target in SYMBOL_OPS:
            return f"sym.{SYMBOL_OPS[target]}"
        if isinstance(target, torch._ops.OpOverload):
            if target._schema.name.split("::")[1] in _DROPPED:
                return None
            name = str(target)
            if name == "aten.sym_size.int":
                return "sym.size"
            base = name.split(".")[1]
            if name in _RESHAPES or name in _DROPOUTS or base in _IDENTITY or base in _CASTS:
                return name
            if name == _BROADCAST or base == "empty_like":
                return name
            if name in OPS or name in self._allow_ops:
                return name
            raise self._unknown(node, name)
        word = getattr(target, "__name__", str(target)).removeprefix("sym_")
        if f"sym.{word}" in OPS:
            return f"sym.{word}"
        raise self._unknown(node, getattr(target, "__name__", str(target)))

    def _unknown(self, node: Any, name: str) -> CaptureError:
        return CaptureError(
            f"operator {name} at {_source(node) or 'an unnamed line'} (in {_scope(node) or 'the root'}) is not in the "
            "allow-list; rewrite that line with other operators, or add or allow it as docs/operators.md shows"
        )

    def _add_broadcast(self, node: Any) -> None:
        """Losses of torch broadcast their arguments first; of equal shapes nothing is left to do."""
        for result in node.users:
            source = node.args[0][result.args[1]]
            if self._spec(source.meta["val"]) != self._spec(result.meta["val"]):
                raise self._unknown(node, f"{_BROADCAST} of unequal shapes")
            self._ids[result.name] = self._ids[source.name]

    def _add_dropout(self, node: Any) -> None:
        source, probability = node.args[0], node.args[1]
        results = [u for u in node.users if u.target is operator.getitem] or [node]
        if any(u.target is operator.getitem and u.args[1] != 0 and u.users for u in results):
            raise self._unknown(node, "native_dropout whose mask is used")
        training = node.args[2] if len(node.args) > 2 else True
        if probability == 0.0 or not training:
            for result in results:
                self._ids[result.name] = self._ids[source.name]
            return
        out = next(u for u in results if u is node or u.args[1] == 0)
        args = {"x": {"r": self._ids[source.name]}, "p": float(probability)}
        self._append(node, "ir.dropout", args, self._next_rng(), single=out)

    def _append(self, node: Any, name: str, args: dict[str, Arg], rng: int | None, single: Any = None) -> None:
        value = node.meta.get("val")
        if single is not None:
            outs, specs = [single.name], [self._spec(single.meta["val"])]
        elif isinstance(value, (tuple, list)):
            outs, specs = [UNUSED] * len(value), [self._spec(v) for v in value]
            for user in node.users:
                if user.target is operator.getitem:
                    outs[user.args[1]] = user.name
        else:
            outs, specs = [node.name], [self._spec(value)]
        for out in outs:
            if out != UNUSED:
                self._ids[out] = out
        self._ops.append(
            Op(
                name=name,
                args=args,
                outs=tuple(outs),
                specs=tuple(specs),
                scope=_scope(node),
                source=_source(node),
                rng=rng,
            )
        )

    def _next_rng(self) -> int:
        self._num_rng += 1
        return self._num_rng - 1

    def _same_dtype(self, node: Any) -> bool:
        return bool(node.meta["val"].dtype == node.args[0].meta["val"].dtype)

    # arguments

    def _bind(self, node: Any, name: str) -> dict[str, Arg]:
        if isinstance(node.target, torch._ops.OpOverload) and not name.startswith("sym."):
            schema = node.target._schema.arguments
            given = {a.name: v for a, v in zip(schema, node.args)} | dict(node.kwargs)
            defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
            given = {
                k: v for k, v in given.items()
                if k not in _STRIPPED and not (k in defaults and not isinstance(v, torch.fx.Node) and v == defaults[k])
            }  # fmt: skip
        else:
            given = dict(zip(OPS[name].args, node.args))
        known = OPS[name].args if name in OPS else None
        for key in given:
            if known is not None and key not in known:
                raise self._unknown(node, f"{name} with the argument {key}")
        return {key: self._encode(value, node) for key, value in given.items()}

    def _encode(self, value: Any, node: Any) -> Arg:
        if isinstance(value, torch.fx.Node):
            return {"r": self._ids[value.name]}
        if isinstance(value, (list, tuple)):
            return [self._encode(v, node) for v in value]
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"f": repr(value)}
        if isinstance(value, torch.dtype):
            return {"dt": _dtype(value)}
        raise self._unknown(node, f"{node.target} with an argument of type {type(value).__name__}")

    def _spec(self, value: Any) -> TensorSpec:
        if isinstance(value, torch.Tensor):
            return TensorSpec(_dtype(value.dtype), tuple(self._dim(s) for s in value.shape))
        if isinstance(value, (bool, torch.SymBool)):
            return TensorSpec("boolean")
        if isinstance(value, (int, torch.SymInt)):
            return TensorSpec("int")
        if isinstance(value, (float, torch.SymFloat)):
            return TensorSpec("float")
        raise CaptureError(f"a value of type {type(value).__name__} cannot stand in a graph")

    def _dim(self, size: Any) -> int | str:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        text = str(expression)
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        for symbol in sorted(expression.free_symbols, key=str):
            name = self._symbols.setdefault(str(symbol), "B" if not self._symbols else f"B{len(self._symbols)}")
            text = re.sub(rf"\b{re.escape(str(symbol))}\b", name, text)
        return text


def merge_equal(graph: OpGraph) -> OpGraph:
    """With equal calls computed once, where no gradient can tell; and without detaches of what carries none.

    Random operators are never merged. Neither are those a gradient flows through: their gradients would be summed
    before the operator, where the model sums them behind it, and rounding would differ.
    """
    carrying = {p.id for p in graph.params.values()}
    names: dict[str, str] = {}
    seen: dict[bytes, Op] = {}
    kept: list[Op] = []
    for op in graph.ops:
        op = msgspec.structs.replace(op, args={k: rename_refs(v, names) for k, v in op.args.items()})
        carries = any(ref in carrying for ref in op.refs())
        if op.name == "aten.detach.default":
            if not carries:
                names[op.outs[0]] = op.args["self"]["r"]
                continue
        elif carries:
            carrying.update(o for o, spec in zip(op.outs, op.specs) if spec.is_float and o != UNUSED)
        key = msgspec.json.encode((op.name, op.args), order="deterministic")
        twin = seen.get(key) if op.rng is None and carrying.isdisjoint(op.outs) else None
        if twin is not None and all(b != UNUSED or a == UNUSED for a, b in zip(op.outs, twin.outs)):
            names.update({a: b for a, b in zip(op.outs, twin.outs) if a != UNUSED})
            continue
        seen[key] = op
        kept.append(op)
    return msgspec.structs.replace(
        graph,
        ops=tuple(kept),
        outputs=tuple(names.get(o, o) for o in graph.outputs),
        mutations={b: names.get(v, v) for b, v in graph.mutations.items()},
    )


def _renumber(graph: OpGraph) -> OpGraph:
    """With rng indices 0, 1, ... in execution order."""
    count = iter(range(len(graph.ops)))
    ops = tuple(op if op.rng is None else msgspec.structs.replace(op, rng=next(count)) for op in graph.ops)
    return msgspec.structs.replace(graph, ops=ops)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scope(node: Any) -> str:
    stack: Mapping[str, Any] | None = node.meta.get("nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("module").removeprefix(".")


def _source(node: Any) -> str:
    return (user_line(node.meta.get("stack_trace") or "") or "").split(" (`")[0]


_USER_CODE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_PACKAGES = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, fusionllm.__file__))
_PYTHON = tuple(
    {str(Path(path).resolve()) + os.sep for path in (str(Path(os.__file__).parent), sysconfig.get_path("stdlib"))}
)


def user_line(text: str) -> str | None:
    """``file.py:12 (`code`)`` of the last frame in a stack trace that is not torch's, Python's own or ours."""
    frames = [(path, line, code) for path, line, _, code in _USER_CODE.findall(text) if _is_users(path)]
    if not frames:
        return None
    path, line, code = frames[-1]
    return f"{'/'.join(Path(path).parts[-2:])}:{line} (`{code.strip()[:100]}`)"


def _is_users(path: str) -> bool:
    if path.startswith("<") or path.startswith(_PACKAGES):
        return False
    return not str(Path(path).resolve()).startswith(_PYTHON) or _INSTALLED.search(path) is not None
