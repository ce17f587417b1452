"""A stage's graph as two compiled functions: the forward returns its own reverse as data, the backward applies it.

The reverse is a pytree of what the backward needs, so nothing is computed twice and microbatches may be under way
together. Compiled once per shape of the inputs; compilations are kept on disk (see `backend`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusionllm.compute.backend import Context, Ran
from fusionllm.compute.jax.layers import RANDOM
from fusionllm.compute.jax.operators import HIGHER, LOWER, lowered, resolve
from fusionllm.compute.jax.random import dropout
from fusionllm.compute.memory import resident_peak_bytes
from fusionllm.compute.options import ComputeOptions
from fusionllm.compute.philox import seed_of
from fusionllm.errors import GraphError, UserError
from fusionllm.ir.graph import UNUSED, Arg, Op, OpGraph

Values = dict[str, Any]


def _argument(arg: Arg, env: Values) -> Any:
    if isinstance(arg, dict):
        if "r" in arg:
            return env[arg["r"]]
        return jnp.dtype(arg["dt"]) if "dt" in arg else float(arg["f"])
    return [_argument(a, env) for a in arg] if isinstance(arg, (list, tuple)) else arg


class _Call:
    """One operator of a trace."""

    def __init__(self, op: Op, precision: str) -> None:
        self.op, self._function, self._autocast = op, resolve(op.name), precision == "bfloat16"
        self._random = op.name in RANDOM

    def run(self, env: Values, draw: Callable[[int], Any] | None) -> None:
        op = self.op
        args = {key: _argument(arg, env) for key, arg in op.args.items()}
        if self._autocast and op.name in LOWER | HIGHER:
            dtype = jnp.bfloat16 if op.name in LOWER else jnp.float32
            args = {key: lowered(arg, dtype) for key, arg in args.items()}
        try:
            if self._random:
                own = None if draw is None or op.rng is None else draw(op.rng)
                result = self._function(own, **args)
            else:
                result = self._function(**args)
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, NotImplementedError) as error:
            raise GraphError(f"operator {op.name} failed: {error}") from error
        results = result if isinstance(result, (list, tuple)) else [result]
        for out, spec, value in zip(op.outs, op.specs, results):
            if out != UNUSED:
                env[out] = self._declared(value, spec.dtype) if spec.is_tensor else value

    def _declared(self, value: Any, dtype: str) -> Any:
        """Numbers promote otherwise than in torch; under autocast float32 may stay bfloat16."""
        value = jnp.asarray(value)
        if self._autocast and dtype == "float32" and value.dtype == jnp.bfloat16:
            return value
        return value.astype(dtype)


class JaxProgram:
    """A graph on a JAX device."""

    def __init__(self, graph: OpGraph, options: ComputeOptions, device: Any) -> None:
        if options.precision not in ("float32", "bfloat16"):
            raise UserError(f"precision {options.precision!r} is for torch; jax has float32 and bfloat16")
        self._device = device
        self._calls = [_Call(op, options.precision) for op in graph.ops]
        self._rngs = [op.rng for op in graph.ops if op.rng is not None]
        self._mutations = graph.mutations
        specs = graph.specs()
        self._dtypes = {i: specs[i].dtype for i in (*graph.outputs, *graph.send)}
        self._loss_id = graph.outputs[0] if graph.outputs else None
        self._received = {v.id for v in graph.recv if v.spec.is_float} - set(graph.frozen)
        # outs that a gradient may come in through, and the parameters it can reach
        self._seeded = {i for i in (*graph.send, *graph.outputs[:1]) if specs[i].is_float}
        reached = _behind(graph, self._seeded)
        self._parameters = {n: p.id for n, p in graph.params.items() if p.trainable and p.id in reached}
        self._plain = jax.jit(self._trace_plain, static_argnames="train")
        self._keep = jax.jit(self._trace_keep)
        self._reverse = jax.jit(self._trace_reverse, donate_argnames="totals")

    def place(self, array: Any) -> Any:
        return jax.device_put(jnp.array(array, copy=True), self._device)

    def forward(self, tensors: Mapping[str, Any], values: Mapping[str, Any], context: Context, *, keep: bool) -> Ran:
        keys = [seed_of(context.seed, context.step, context.microbatch_index, rng) for rng in self._rngs]
        words = np.array([[k & 0xFFFFFFFF, k >> 32] for k in keys], np.uint32).reshape(-1, 2)
        with jax.default_device(self._device):
            if not keep:
                outs, mutated = self._plain(dict(tensors), dict(values), words, train=context.train)
                return Ran(outs, mutated, None)
            parameters = {i: tensors[i] for i in self._parameters.values()}
            leaves = {i: a for i, a in values.items() if i in self._received}
            rest = {i: a for i, a in {**tensors, **values}.items() if i not in parameters and i not in leaves}
            outs, seeded, mutated, reverse = self._keep(parameters, leaves, rest, words)
            return Ran({**outs, **seeded}, mutated, (reverse, seeded))

    def backward(
        self, kept: Any, seeds: Mapping[str, Any], loss_weight: float, totals: dict[str, Any]
    ) -> dict[str, Any]:
        reverse, outs = kept
        full = {i: seeds[i] if i in seeds else np.zeros(out.shape, out.dtype) for i, out in outs.items()}
        before = {n: totals[n] for n in self._parameters if n in totals}
        with jax.default_device(self._device):
            after, grads = self._reverse(reverse, full, np.float64(loss_weight), totals=before)
        totals.update(after)
        return dict(grads)

    def peak_bytes(self) -> int:
        statistics = self._device.memory_stats() or {}
        return int(statistics.get("peak_bytes_in_use", 0)) or resident_peak_bytes()

    # traced

    def _run(self, env: Values, words: Any, train: bool) -> tuple[Values, Values]:
        place = {rng: index for index, rng in enumerate(self._rngs)}

        def draw(rng: int) -> Any:
            return lambda x, p, stream: dropout(x, p, words[place[rng]], stream)

        for call in self._calls:
            call.run(env, draw if train else None)
        outs = {i: env[i].astype(dtype) for i, dtype in self._dtypes.items()}
        return outs, {b: env[v] for b, v in self._mutations.items()}

    def _trace_plain(self, tensors: Values, values: Values, words: Any, *, train: bool) -> tuple[Values, Values]:
        return self._run({**tensors, **values}, words, train)

    def _trace_keep(self, parameters: Values, leaves: Values, rest: Values, words: Any) -> Any:
        def function(parameters: Values, leaves: Values) -> tuple[Values, tuple[Values, Values]]:
            outs, mutated = self._run({**rest, **parameters, **leaves}, words, True)
            seeded = {i: outs.pop(i) for i in self._seeded}
            return seeded, (outs, mutated)

        seeded, reverse, (outs, mutated) = jax.vjp(function, parameters, leaves, has_aux=True)
        return outs, seeded, mutated, reverse

    def _trace_reverse(self, reverse: Any, seeds: Values, loss_weight: Any, totals: Values) -> tuple[Values, Values]:
        if self._loss_id in seeds:
            loss = seeds[self._loss_id]
            seeds = {**seeds, self._loss_id: loss + loss_weight.astype(loss.dtype)}
        parameters, leaves = reverse({i: g.astype(self._dtypes[i]) for i, g in seeds.items()})
        new = {n: parameters[i] for n, i in self._parameters.items()}
        return {n: totals[n] + g if n in totals else g for n, g in new.items()}, leaves


def _behind(graph: OpGraph, ids: set[str]) -> set[str]:
    """Ids of all values that a gradient of one of ``ids`` flows back to, by the operators between."""
    found = set(ids)
    for op in reversed(graph.ops):
        if op.name != "aten.detach.default" and any(
            out in found for out, spec in zip(op.outs, op.specs) if spec.is_float
        ):
            found.update(op.refs())
    return found
