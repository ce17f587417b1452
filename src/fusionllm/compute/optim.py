"""Optimizers of torch by name, their state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusionllm.compute.options import OptimConfig


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
