"""Optimizers by the formulas of torch.optim, state under torch's names: it may move to a torch node and back.

Written out instead of optax's: that one rounds its bias corrections to float32 and keeps no state by parameter name.
Weights shorter than float32 have a master, as on torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fusionllm.compute.optimizers import group_arguments, known_options
from fusionllm.compute.options import OptimConfig
from fusionllm.errors import UserError, known_names

Arrays = dict[str, Any]
#: (parameter, gradient, state before, count of steps with this one, learning rate, options) -> (parameter, state).
#: Count and rate are float64, as torch's Python numbers are.
Rule = Callable[[Any, Any, Arrays, Any, Any, dict[str, Any]], tuple[Any, Arrays]]


def _number(value: Any, like: Any) -> Any:
    return jnp.asarray(value, jnp.float64).astype(like.dtype)


def _decayed(p: Any, g: Any, o: Mapping[str, Any]) -> Any:
    return g + o["weight_decay"] * p if o.get("weight_decay") else g


def _zeros(state: Arrays, kind: str, p: Any) -> Any:
    return state[kind] if kind in state else jnp.zeros_like(p)


def _adam(p: Any, g: Any, state: Arrays, count: Any, lr: Any, o: dict[str, Any]) -> tuple[Any, Arrays]:
    b1, b2 = o["betas"]
    if o.get("decoupled_weight_decay"):
        p = p * _number(1 - lr * o["weight_decay"], p)
    else:
        g = _decayed(p, g, o)
    mean, square = _zeros(state, "exp_avg", p), _zeros(state, "exp_avg_sq", p)
    mean, square = mean + (g - mean) * (1 - b1), square * b2 + g * g * (1 - b2)
    new, spread = {"exp_avg": mean, "exp_avg_sq": square}, square
    if o["amsgrad"]:
        new["max_exp_avg_sq"] = spread = jnp.maximum(_zeros(state, "max_exp_avg_sq", p), square)
    spread = jnp.sqrt(spread) / _number(jnp.sqrt(1 - b2**count), p) + o["eps"]
    return p - _number(lr / (1 - b1**count), p) * (mean / spread), new


def _adamw(p: Any, g: Any, state: Arrays, count: Any, lr: Any, o: dict[str, Any]) -> tuple[Any, Arrays]:
    return _adam(p, g, state, count, lr, {**o, "decoupled_weight_decay": True})


def _sgd(p: Any, g: Any, state: Arrays, count: Any, lr: Any, o: dict[str, Any]) -> tuple[Any, Arrays]:
    g, momentum, new = _decayed(p, g, o), o["momentum"], {}
    if momentum:
        held = state.get("momentum_buffer")
        held = g if held is None else momentum * held + (1 - o["dampening"]) * g
        g, new = (g + momentum * held if o["nesterov"] else held), {"momentum_buffer": held}
    return p - _number(lr, p) * g, new


def _adagrad(p: Any, g: Any, state: Arrays, count: Any, lr: Any, o: dict[str, Any]) -> tuple[Any, Arrays]:
    g = _decayed(p, g, o)
    before = state["sum"] if "sum" in state else jnp.full_like(p, o["initial_accumulator_value"])
    total = before + g * g
    rate = _number(lr / (1 + (count - 1) * o["lr_decay"]), p)
    return p - rate * (g / (jnp.sqrt(total) + o["eps"])), {"sum": total}


def _adadelta(p: Any, g: Any, state: Arrays, count: Any, lr: Any, o: dict[str, Any]) -> tuple[Any, Arrays]:
    g, rho = _decayed(p, g, o), o["rho"]
    square = rho * _zeros(state, "square_avg", p) + (1 - rho) * g * g
    moved = _zeros(state, "acc_delta", p)
    delta = jnp.sqrt(moved + o["eps"]) / jnp.sqrt(square + o["eps"]) * g
    return p - _number(lr, p) * delta, {"square_avg": square, "acc_delta": rho * moved + (1 - rho) * delta * delta}


def _adamax(p: Any, g: Any, state: Arrays, count: Any, lr: Any, o: dict[str, Any]) -> tuple[Any, Arrays]:
    (b1, b2), g = o["betas"], _decayed(p, g, o)
    mean = _zeros(state, "exp_avg", p)
    mean = mean + (g - mean) * (1 - b1)
    largest = jnp.maximum(_zeros(state, "exp_inf", p) * b2, jnp.abs(g) + o["eps"])
    return p - _number(lr / (1 - b1**count), p) * (mean / largest), {"exp_avg": mean, "exp_inf": largest}


def _rmsprop(p: Any, g: Any, state: Arrays, count: Any, lr: Any, o: dict[str, Any]) -> tuple[Any, Arrays]:
    g, alpha = _decayed(p, g, o), o["alpha"]
    square = alpha * _zeros(state, "square_avg", p) + (1 - alpha) * g * g
    new, spread = {"square_avg": square}, square
    if o["centered"]:
        mean = _zeros(state, "grad_avg", p)
        new["grad_avg"] = mean = mean + (g - mean) * (1 - alpha)
        spread = square - mean * mean
    change = g / (jnp.sqrt(spread) + o["eps"])
    if o["momentum"]:
        new["momentum_buffer"] = change = o["momentum"] * _zeros(state, "momentum_buffer", p) + change
    return p - _number(lr, p) * change, new


#: name of an optimizer -> how a parameter changes, and whether its state counts steps.
RULES: dict[str, tuple[Rule, bool]] = {
    "sgd": (_sgd, False), "adam": (_adam, True), "adamw": (_adamw, True), "adagrad": (_adagrad, True),
    "adadelta": (_adadelta, True), "adamax": (_adamax, True), "rmsprop": (_rmsprop, True),
}  # fmt: skip
_square_sum = jax.jit(lambda gradients: sum(jnp.sum(jnp.square(g.astype(jnp.float64))) for g in gradients.values()))


class JaxOptimizer:
    """Optimizers over named parameters; the parameters that go into a step are used up by it.

    Raises UserError for an optimizer that is not in ``RULES``.
    """

    def __init__(self, config: OptimConfig, parameters: Mapping[str, Any]) -> None:
        self._ways = {n: group_arguments(config, n, p.ndim) for n, p in parameters.items()}
        for kind, _, _ in self._ways.values():
            if kind not in RULES:
                raise UserError(f"the jax backend has no optimizer {kind!r}; {known_names(kind, RULES)}")
        self._states: dict[str, Arrays] = {}
        self._update = jax.jit(self._trace, donate_argnames=("tensors", "states"))

    def square_sum(self, gradients: Mapping[str, Any]) -> float:
        return float(_square_sum(dict(gradients))) if gradients else 0.0

    def step(self, tensors: Mapping[str, Any], gradients: Mapping[str, Any], lr: float, scale: float) -> Arrays:
        changing = {n: p for n, p in tensors.items() if n in gradients}
        given = {n: gradients[n] for n in changing}
        states = {n: self._states.get(n, {}) for n in changing}
        new, after = self._update(changing, given, states, jnp.float64(lr), jnp.float64(scale))
        self._states.update(after)
        return dict(new)

    def _trace(
        self, tensors: Arrays, gradients: Arrays, states: dict[str, Arrays], lr: Any, scale: Any
    ) -> tuple[Arrays, dict[str, Arrays]]:
        new, after = {}, {}
        for name, p in tensors.items():
            new[name], after[name] = self._one(name, p, gradients[name], states[name], lr, scale)
        return new, after

    def _one(self, name: str, p: Any, g: Any, state: Arrays, lr: Any, scale: Any) -> tuple[Any, Arrays]:
        kind, factor, given = self._ways[name]
        options = {**known_options(kind), **given}
        rule, counts = RULES[kind]
        target = _master(p, state)
        step = state.get("step", jnp.zeros((), jnp.float32)) + 1
        g = (g * _number(scale, g)).astype(target.dtype)
        g = -g if options["maximize"] else g
        target, new = rule(target, g, state, step.astype(jnp.float64), lr * factor, options)
        new = {**({"step": step} if counts else {}), **new}
        if target.dtype != p.dtype:
            new["master"] = target
        return target.astype(p.dtype), new

    def state(self) -> Arrays:
        return {f"{kind}/{n}": a for n, entry in self._states.items() for kind, a in entry.items()}

    def load(self, tensors: Mapping[str, Any]) -> None:
        for key, array in tensors.items():
            kind, _, name = key.partition("/")
            self._states.setdefault(name, {})[kind] = jnp.array(array, copy=True)


def _master(p: Any, state: Arrays) -> Any:
    """What changes: the parameter, or of a short one its float32 master, where that is still its own."""
    if p.dtype not in (jnp.bfloat16, jnp.float16):
        return p
    fresh = p.astype(jnp.float32)
    return jnp.where(state["master"].astype(p.dtype) == p, state["master"], fresh) if "master" in state else fresh
