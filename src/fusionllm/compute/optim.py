"""Optimizers of torch by name, learning-rate schedules as pure functions, optimizer state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import torch


class OptimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How parameters change.

    Attributes:
        name: ``adamw`` or ``sgd``, as in torch.optim. momentum: of sgd.
        schedule: of the learning rate after ``warmup_steps`` of linear warm-up: ``constant``, ``cosine`` or ``linear``
            down to ``min_lr_ratio`` of ``lr``.
        clip_norm: limit of the global gradient norm over all stages, 0: none.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    clip_norm: float = 0.0


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Learning rate of ``step`` (from 0) in a run of ``num_steps``."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    done = min(1.0, max(0.0, done))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


class Optimizer:
    """A torch optimizer over named parameters; works with none at all."""

    def __init__(self, config: OptimConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        self._names = list(parameters)
        tensors = list(parameters.values())
        self._torch: torch.optim.Optimizer | None = None
        if not tensors:
            return
        if config.name == "adamw":
            self._torch = torch.optim.AdamW(
                tensors, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
            )
        else:
            self._torch = torch.optim.SGD(
                tensors, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
            )

    def step(self, lr: float) -> None:
        """Update from the gradients, then drop them."""
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors named ``KIND/PARAMETER``, e.g. ``exp_avg/wte.weight``."""
        if self._torch is None:
            return {}
        raw = self._torch.state_dict()["state"]
        return {
            f"{kind}/{self._names[index]}": value.detach()
            for index, entry in raw.items()
            for kind, value in entry.items()
            if isinstance(value, torch.Tensor)
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`."""
        if self._torch is None or not tensors:
            return
        state: dict[int, dict[str, Any]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            state.setdefault(self._names.index(name), {})[kind] = tensor.clone()
        self._torch.load_state_dict({"state": state, "param_groups": self._torch.state_dict()["param_groups"]})
