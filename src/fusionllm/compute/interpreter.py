"""Executes an OpGraph: a list of calls made once, walked for every microbatch; values are freed after their last use.

Autograd records the calls, so the backward of a stage is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from fusionllm.compute.backend import Context
from fusionllm.compute.ops_torch import FACTORIES, RANDOM, resolve
from fusionllm.errors import GraphError
from fusionllm.ir.graph import UNUSED, Arg, Op, OpGraph, arg_refs


class _Ref:
    __slots__ = ("id",)

    def __init__(self, id: str) -> None:
        self.id = id


def _decode(arg: Arg, names: Mapping[str, str]) -> Any:
    if isinstance(arg, dict):
        if "r" in arg:
            return _Ref(names.get(arg["r"], arg["r"]))
        if "dt" in arg:
            return getattr(torch, arg["dt"])
        return float(arg["f"])
    return [_decode(a, names) for a in arg] if isinstance(arg, (list, tuple)) else arg


def _getter(value: Any) -> Callable[[dict[str, Any]], Any]:
    """How to get an argument from the values at hand; constants are made once."""
    if isinstance(value, _Ref):
        name = value.id
        return lambda env: env[name]
    if isinstance(value, list) and any(_mentions(v) for v in value):
        parts = [_getter(v) for v in value]
        return lambda env: [part(env) for part in parts]
    return lambda env: value


def _mentions(value: Any) -> bool:
    return isinstance(value, _Ref) or (isinstance(value, list) and any(_mentions(v) for v in value))


class _Call:
    """One operator, ready to be called: ``run(env, context)`` writes its results into ``env``."""

    __slots__ = ("dead", "function", "keywords", "name", "outs", "positional", "random", "rng", "single")

    def __init__(
        self, op: Op, dead: list[str], device: torch.device, allow_ops: Collection[str], names: Mapping[str, str]
    ) -> None:
        self.name, self.dead, self.rng = op.name, dead, op.rng
        self.outs = op.outs
        self.single = len(op.outs) == 1
        self.random = op.name in RANDOM
        args = {key: _decode(arg, names) for key, arg in op.args.items()}
        if self.random:
            self.function, order = RANDOM[op.name], None
        else:
            self.function, order = resolve(op.name, allow_ops)
        if op.name in FACTORIES:
            args["device"] = device
        positional = []
        for key in order or ():
            if key not in args:
                break
            positional.append(_getter(args.pop(key)))
        self.positional = positional
        self.keywords = {key: _getter(value) for key, value in args.items()}

    def run(self, env: dict[str, Any], context: Context) -> None:
        args = [get(env) for get in self.positional]
        keywords = {key: get(env) for key, get in self.keywords.items()} if self.keywords else {}
        if self.random:
            result = self.function(context, self.rng, *args, **keywords)
        else:
            result = self.function(*args, **keywords)
        if self.single and not isinstance(result, (tuple, list)):
            env[self.outs[0]] = result
        else:
            for out, value in zip(self.outs, result):
                if out != UNUSED:
                    env[out] = value
        for name in self.dead:
            del env[name]


class Program:
    """A graph made ready for a device. Raises GraphError for an operator this backend does not have or allow.

    Args:
        apart: operators whose parameters and buffers are looked up by keys of their own.

    Attributes:
        apart: those keys, and the id each stands for.
    """

    def __init__(
        self, graph: OpGraph, device: torch.device, allow_ops: Collection[str] = (), apart: Collection[str] = ()
    ) -> None:
        self.graph = graph
        held = {entry.id for entry in graph.held.values()}
        names = [
            {ref: f"{ref} of {index}" for ref in op.refs() if ref in held} if op.name in apart else {}
            for index, op in enumerate(graph.ops)
        ]
        self.apart = {key: ref for own in names for ref, key in own.items()}
        kept = {*graph.outputs, *graph.send, *graph.mutations.values()}
        outside = {v.id for v in (*graph.inputs, *graph.recv)}
        last: dict[str, int] = {}
        for index, op in enumerate(graph.ops):
            last.update(dict.fromkeys((o for o in op.outs if o != UNUSED), index))
            for arg in op.args.values():
                last.update(dict.fromkeys(arg_refs(arg), index))
        made = {out for op in graph.ops for out in op.outs} | outside
        dead: dict[int, list[str]] = {}
        for name, index in last.items():
            if name not in kept and name in made:
                dead.setdefault(index, []).append(name)
        self._calls = [_Call(op, dead.get(i, []), device, allow_ops, names[i]) for i, op in enumerate(graph.ops)]
        self._wanted = (*graph.outputs, *graph.send)

    def __call__(self, values: Mapping[str, Any], context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the graph.

        Args:
            values: inputs, received values, parameters and buffers by id, and by the keys of ``apart``.

        Returns:
            (outputs and sent values by id, new values of mutated buffers by buffer id).
        """
        env = dict(values)
        for call in self._calls:
            try:
                call.run(env, context)
            except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise GraphError(f"operator {call.name} failed: {error}") from error
        return {i: env[i] for i in self._wanted}, {b: env[v] for b, v in self.graph.mutations.items()}
