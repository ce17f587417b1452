"""AdamW and SGD by the formulas of torch.optim, state under torch's names: it may move to a torch node and back.

Written out instead of optax's: that one rounds its bias corrections to float32 and keeps no state by parameter name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fusionllm.compute.options import OptimConfig

Arrays = dict[str, Any]


def _adamw(config: OptimConfig, p: Any, g: Any, state: Arrays, lr: Any) -> tuple[Any, Arrays]:
    b1, b2 = config.betas
    step = state["step"] + 1
    mean = state["exp_avg"] + (g - state["exp_avg"]) * (1 - b1)
    square = state["exp_avg_sq"] * b2 + g * g * (1 - b2)
    # float64, as torch's Python numbers are
    count = step.astype(jnp.float64)
    size = (lr / (1 - b1**count)).astype(p.dtype)
    spread = jnp.sqrt(square) / jnp.sqrt(1 - b2**count).astype(p.dtype) + config.eps
    p = p * (1 - lr * config.weight_decay).astype(p.dtype) - size * (mean / spread)
    return p, {"step": step, "exp_avg": mean, "exp_avg_sq": square}


def _sgd(config: OptimConfig, p: Any, g: Any, state: Arrays, lr: Any) -> tuple[Any, Arrays]:
    if config.weight_decay:
        g = g + config.weight_decay * p
    if config.momentum:
        g = config.momentum * state["momentum_buffer"] + g
        state = {"momentum_buffer": g}
    return p - lr.astype(p.dtype) * g, state


#: name -> (update of one parameter, kinds of state; ``step`` is a float32 number, the others are as the parameter).
RULES: dict[str, Any] = {"adamw": (_adamw, ("step", "exp_avg", "exp_avg_sq")), "sgd": (_sgd, ("momentum_buffer",))}


@partial(jax.jit, static_argnames="config", donate_argnames=("tensors", "states"))
def _update(
    config: OptimConfig, tensors: Arrays, gradients: Arrays, states: dict[str, Arrays], lr: Any, scale: Any
) -> tuple[Arrays, dict[str, Arrays]]:
    new = {
        n: RULES[config.name][0](config, p, gradients[n] * scale.astype(p.dtype), states[n], lr)
        for n, p in tensors.items()
    }
    return {n: p for n, (p, _) in new.items()}, {n: s for n, (_, s) in new.items()}


_square_sum = jax.jit(lambda gradients: sum(jnp.sum(jnp.square(g.astype(jnp.float64))) for g in gradients.values()))


class JaxOptimizer:
    """An optimizer over named parameters; the parameters that go into a step are used up by it."""

    def __init__(self, config: OptimConfig, parameters: Mapping[str, Any]) -> None:
        self._config = config
        kinds = RULES[config.name][1]
        self._kinds = kinds if config.name != "sgd" or config.momentum else ()
        self._states: dict[str, Arrays] = {}

    def square_sum(self, gradients: Mapping[str, Any]) -> float:
        return float(_square_sum(dict(gradients))) if gradients else 0.0

    def step(self, tensors: Mapping[str, Any], gradients: Mapping[str, Any], lr: float, scale: float) -> Arrays:
        changing = {n: p for n, p in tensors.items() if n in gradients}
        states = {n: self._states.get(n) or self._fresh(p) for n, p in changing.items()}
        rates = jnp.asarray(lr, jnp.float64), jnp.asarray(scale, jnp.float64)
        new, after = _update(self._config, changing, {n: gradients[n] for n in changing}, states, *rates)
        self._states.update(after)
        return dict(new)

    def _fresh(self, parameter: Any) -> Arrays:
        return {
            kind: jnp.zeros((), jnp.float32) if kind == "step" else jnp.zeros_like(parameter) for kind in self._kinds
        }

    def state(self) -> Arrays:
        return {f"{kind}/{n}": a for n, entry in self._states.items() for kind, a in entry.items()}

    def load(self, tensors: Mapping[str, Any]) -> None:
        for key, array in tensors.items():
            kind, _, name = key.partition("/")
            self._states.setdefault(name, {})[kind] = jnp.array(array, copy=True)
