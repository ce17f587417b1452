"""The tinygrad backend whole: device, program, optimizer.

Between calls all arrays are numpy's; a call makes tensors of them. tinygrad is lazy and has no record that outlives
what it computed, so a forward keeps what it was given, and the backward computes it again. Its settings and its cache
of compiled code are of one thread, so every call runs in `_THREAD`.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tinygrad import Context as Setting
from tinygrad import Device, Tensor, dtypes

from fusionllm.compute.backend import Context, Ran, Ready, array_bytes, checked_view, shaped_array
from fusionllm.compute.memory import resident_peak_bytes
from fusionllm.compute.optimizers import group_arguments, known_options
from fusionllm.compute.options import ComputeOptions, OptimConfig
from fusionllm.compute.philox import keep_mask, seed_of
from fusionllm.compute.tinygrad.operators import RANDOM, TABLE
from fusionllm.errors import GraphError, RemoteProtocolError, UserError
from fusionllm.ir.graph import UNUSED, Arg, Op, OpGraph
from fusionllm.ir.ops import OPS

T = TypeVar("T")
Values = dict[str, Any]
_OPTIMIZERS = ("adamw", "sgd")
_DTYPES = frozenset({"float64", "float32", "int64", "int32", "int16", "int8", "uint8", "bool"})
_THREAD = ThreadPoolExecutor(1, "tinygrad")


@lru_cache
def _compiler() -> str | None:
    """Where tinygrad finds clang: CC, the machine's, else the one in the package ``ziglang``, as one file for CC."""
    if found := shutil.which(os.environ.get("CC", "clang")):
        return found
    spec = find_spec("ziglang")
    if os.name != "posix" or spec is None or spec.origin is None:
        return None
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusionllm" / "tinygrad"
    place.mkdir(parents=True, exist_ok=True)
    script, made = place / "clang", place / f"clang.{os.getpid()}"
    made.write_text(f'#!/bin/sh\nexec {shlex.quote(str(Path(spec.origin).parent / "zig"))} clang "$@"\n')
    made.chmod(0o755)
    made.replace(script)
    os.environ["CC"] = str(script)
    return str(script)


def _device(name: str) -> str:
    """The framework's name of a device. A CPU without a compiler is interpreted: right, and slow."""
    if name == "cpu":
        return "CPU" if _compiler() else "PYTHON"
    return name.upper()


def _on(device: str, function: Callable[..., T], *args: Any) -> T:
    """Call in `_THREAD`, for a device of the framework. Compiles there too: its own processes outlive a killed node."""

    def call() -> T:
        with Setting(DEV=device, PARALLEL=0):
            return function(*args)

    return _THREAD.submit(call).result()


def run_alone(device: str, function: Callable[[Any], Any], operand: np.ndarray) -> np.ndarray:
    """One operator by itself on a device, from an array to another."""
    return _on(_device(device), lambda: _arrays([function(Tensor(operand))])[0])


def run_backward(device: str, function: Callable[[Any], Any], operand: np.ndarray) -> np.ndarray:
    """The operand's gradient, of a result like it weighted by itself. The forward is computed again, as in a stage."""

    def work() -> np.ndarray:
        x = Tensor(operand)
        y = function(x)
        return _arrays([(y * Tensor(operand)).sum().gradient(x)[0], y])[0]

    return _on(_device(device), work)


class TinygradBackend:
    """tinygrad, 0.14 or newer."""

    def warm_up(self, device: str) -> Ready:
        chosen = device
        if device == "auto":
            try:
                chosen = _THREAD.submit(lambda: Device.DEFAULT.lower()).result()
            except RuntimeError:  # it found none
                chosen = "cpu"
        try:
            run_alone(chosen, lambda x: x + 1, np.ones(1, np.float32))
        except Exception as error:  # whatever a driver that is not there does
            raise UserError(
                f"device {chosen!r} is not here, or not one of tinygrad's ({str(error)[:200]}); cpu always is"
            ) from None
        return Ready(chosen, frozenset(TABLE) & frozenset(OPS), frozenset(_OPTIMIZERS), _DTYPES)

    def program(
        self, graph: OpGraph, options: ComputeOptions, device: str, allow_ops: Collection[str] = ()
    ) -> TinygradProgram:
        return TinygradProgram(graph, options, _device(device))

    def optimizer(self, config: OptimConfig, parameters: Mapping[str, Any]) -> TinygradOptimizer:
        return TinygradOptimizer(config, parameters)

    def from_buffer(self, buffer: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        view = checked_view(buffer, dtype, shape)
        if dtype not in _DTYPES:
            raise RemoteProtocolError(f"the tinygrad backend has no {dtype}; it has {', '.join(sorted(_DTYPES))}")
        return shaped_array(view, np.dtype(dtype), shape)

    def to_bytes(self, array: Any) -> memoryview:
        return array_bytes(array)


class TinygradProgram:
    """A graph on a device."""

    def __init__(self, graph: OpGraph, options: ComputeOptions, device: str) -> None:
        if options.precision != "float32":
            raise UserError(f"precision {options.precision!r} is not of tinygrad's here; it has float32")
        for op in graph.ops:
            if op.name not in OPS:
                raise GraphError(f"operator {op.name!r} is not in the allow-list; a node executes listed operators")
            if op.name not in TABLE:
                raise GraphError(f"the tinygrad backend has no operator {op.name!r}; let a torch node take this stage")
        self._graph, self._device = graph, device
        specs = graph.specs()
        self._outs = (*graph.outputs, *graph.send)
        self._loss_id = graph.outputs[0] if graph.outputs else None
        self._seeded = [i for i in (*graph.send, *graph.outputs[:1]) if specs[i].is_float]
        self._received = {v.id for v in graph.recv if v.spec.is_float} - set(graph.frozen)
        self._parameters = {n: p.id for n, p in graph.params.items() if p.trainable}

    def place(self, array: Any) -> np.ndarray:
        return np.array(array, copy=True)

    def forward(self, tensors: Mapping[str, Any], values: Mapping[str, Any], context: Context, *, keep: bool) -> Ran:
        outs, mutated = _on(self._device, self._forward, tensors, values, context)
        return Ran(outs, mutated, (dict(tensors), dict(values), context) if keep else None)

    def _forward(
        self, tensors: Mapping[str, Any], values: Mapping[str, Any], context: Context
    ) -> tuple[Values, Values]:
        env = self._run(tensors, values, context)
        made = iter(_arrays([env[i] for i in (*self._outs, *self._graph.mutations.values())]))
        return dict(zip(self._outs, made)), dict(zip(self._graph.mutations, made))

    def backward(
        self, kept: Any, seeds: Mapping[str, Any], loss_weight: float, totals: dict[str, Any]
    ) -> dict[str, Any]:
        values = kept[1]
        targets = [*self._parameters.values(), *sorted(self._received & set(values))]
        found = _on(self._device, self._backward, kept, seeds, loss_weight, targets)
        for name, i in self._parameters.items():
            if (gradient := found[i]) is not None:
                totals[name] = totals[name] + gradient if name in totals else gradient
        return {i: found[i] if found[i] is not None else np.zeros_like(values[i]) for i in targets if i in values}

    def _backward(self, kept: Any, seeds: Mapping[str, Any], loss_weight: float, targets: list[str]) -> Values:
        env = self._run(*kept)
        roots = [env[i] * self._tensor(seeds[i]) for i in self._seeded if i in seeds]
        if self._loss_id in self._seeded:
            roots.append(env[self._loss_id] * loss_weight)
        parts = [root.sum() for root in roots]
        return dict(zip(targets, self._gradients(parts, [env[i] for i in targets]), strict=True))

    def peak_bytes(self) -> int:
        return resident_peak_bytes()

    def _gradients(self, parts: list[Any], targets: list[Any]) -> list[Any]:
        """Of the sum of ``parts``, a number each; None for a target that none depends on."""
        if not parts or not targets:
            return [None] * len(targets)
        total = sum(parts[1:], parts[0])
        nodes = total.uop.toposort()
        reached = [t.uop in nodes for t in targets]  # asked before computing, which changes what is in a tensor
        made = iter(_arrays(total.gradient(*(t for t, near in zip(targets, reached) if near))))
        return [next(made) if near else None for near in reached]

    def _tensor(self, array: Any) -> Any:
        return Tensor(np.array(array))

    def _run(self, tensors: Mapping[str, Any], values: Mapping[str, Any], context: Context) -> Values:
        env = {i: self._tensor(a) for i, a in {**tensors, **values}.items()}
        for op in self._graph.ops:
            self._call(op, env, context)
        return env

    def _call(self, op: Op, env: Values, context: Context) -> None:
        args = {key: _argument(arg, env) for key, arg in op.args.items()}
        try:
            if op.name in RANDOM:
                result = TABLE[op.name](self._draw(op, context), **args)
            else:
                result = TABLE[op.name](**args)
            results = result if isinstance(result, (list, tuple)) else [result]
            for out, spec, value in zip(op.outs, op.specs, results):
                if out != UNUSED:
                    env[out] = value.cast(_dtype(spec.dtype)) if spec.is_tensor else value
        except Exception as error:  # the framework raises all kinds, assertions too
            raise GraphError(f"operator {op.name} failed: {str(error)[:500]}") from error

    def _draw(self, op: Op, context: Context) -> Any:
        if not context.train or op.rng is None:
            return None
        key = seed_of(context.seed, context.step, context.microbatch_index, op.rng)

        def draw(x: Any, p: float) -> Any:
            kept = keep_mask(key, math.prod(x.shape), p).reshape(x.shape)
            return x * self._tensor(kept).cast(x.dtype) / (1 - p)

        return draw


class TinygradOptimizer:
    """adamw and sgd by torch's formulas and names of state, in numpy."""

    def __init__(self, config: OptimConfig, parameters: Mapping[str, Any]) -> None:
        self._ways = {n: group_arguments(config, n, p.ndim) for n, p in parameters.items()}
        for kind, _, given in self._ways.values():
            if kind not in _OPTIMIZERS or given.get("amsgrad") or given.get("maximize"):
                raise UserError(f"the tinygrad backend has adamw and sgd in their plain form, not this {kind!r}")
        self._states: dict[str, dict[str, Any]] = {}

    def square_sum(self, gradients: Mapping[str, Any]) -> float:
        return float(sum(np.square(g.astype(np.float64)).sum() for g in gradients.values()))

    def step(self, tensors: Mapping[str, Any], gradients: Mapping[str, Any], lr: float, scale: float) -> Values:
        return {n: self._one(n, tensors[n], g * g.dtype.type(scale), lr) for n, g in gradients.items() if n in tensors}

    def _one(self, name: str, p: Any, g: Any, lr: float) -> Any:
        kind, factor, given = self._ways[name]
        o, state, lr = {**known_options(kind), **given}, self._states.setdefault(name, {}), lr * factor
        if kind == "sgd":
            g = g + o.get("weight_decay", 0.0) * p
            if o["momentum"]:
                held = state.get("momentum_buffer")
                held = g if held is None else o["momentum"] * held + (1 - o["dampening"]) * g
                state["momentum_buffer"] = held
                g = g + o["momentum"] * held if o["nesterov"] else held
            return p - lr * g
        b1, b2 = o["betas"]
        state["step"] = step = np.float32(state.get("step", 0) + 1)
        mean, square = state.get("exp_avg", np.zeros_like(p)), state.get("exp_avg_sq", np.zeros_like(p))
        state["exp_avg"] = mean = mean + (g - mean) * (1 - b1)
        state["exp_avg_sq"] = square = square * b2 + g * g * (1 - b2)
        p, count = p * (1 - lr * o.get("weight_decay", 0.0)), float(step)
        return p - lr / (1 - b1**count) * (mean / (np.sqrt(square) / math.sqrt(1 - b2**count) + o["eps"]))

    def state(self) -> Values:
        return {f"{kind}/{n}": np.asarray(a) for n, entry in self._states.items() for kind, a in entry.items()}

    def load(self, tensors: Mapping[str, Any]) -> None:
        for key, array in tensors.items():
            kind, _, name = key.partition("/")
            self._states.setdefault(name, {})[kind] = np.array(array, copy=True)


def _arrays(tensors: Sequence[Any]) -> list[np.ndarray]:
    """Their values, computed together: what they have in common once."""
    held = [t.clone() if t.device is None else t for t in tensors]  # None: a constant
    if held:
        held[0].realize(*held[1:])
    return [np.array(t.numpy()) for t in held]


def _argument(arg: Arg, env: Values) -> Any:
    if isinstance(arg, dict):
        if "r" in arg:
            return env[arg["r"]]
        return _dtype(arg["dt"]) if "dt" in arg else float(arg["f"])
    return [_argument(a, env) for a in arg] if isinstance(arg, (list, tuple)) else arg


def _dtype(name: str) -> Any:
    if name not in _DTYPES:
        raise ValueError(f"the tinygrad backend has no {name}")
    return getattr(dtypes, name)
