"""Optimizers of torch by name over named parameters, their state by parameter name.

What torch updates are the parameters themselves, or masters: copies in float32 of weights kept in a shorter type
(Micikevicius et al., Mixed Precision Training, arXiv 1710.03740), or in the machine's memory when its state is to stay
off the device. Every parameter is updated from its own gradient and state alone, so any partition does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fusionllm.compute.optimizers import group_arguments, known_options
from fusionllm.compute.options import OptimConfig
from fusionllm.errors import GraphError, UserError

#: Key of a master among the state's tensors.
MASTER = "master"
_CLASSES: dict[str, str] = {
    "adadelta": "Adadelta", "adafactor": "Adafactor", "adagrad": "Adagrad", "adam": "Adam", "adamax": "Adamax",
    "adamw": "AdamW", "asgd": "ASGD", "muon": "Muon", "nadam": "NAdam", "radam": "RAdam", "rmsprop": "RMSprop",
    "rprop": "Rprop", "sgd": "SGD",
}  # fmt: skip


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Torch's class of a name of ``OPTIMIZERS``. Raises UserError when this torch is too old for it."""
    known_options(name)
    found = getattr(torch.optim, _CLASSES[name], None)
    if found is None:
        raise UserError(f"torch {torch.__version__} has no {_CLASSES[name]}; upgrade torch on this node")
    made: type[torch.optim.Optimizer] = found
    return made


def has_optimizer(name: str) -> bool:
    """Whether this torch has an optimizer of ``OPTIMIZERS``."""
    return hasattr(torch.optim, _CLASSES[name])


class Optimizer:
    """The optimizers of a stage; works with no parameter at all."""

    def __init__(self, config: OptimConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = dict(parameters)
        self._targets = {name: self._target(tensor, config.offload) for name, tensor in parameters.items()}
        groups: dict[str, _Alike] = {}
        for name, tensor in self._targets.items():
            kind, scale, arguments = group_arguments(config, name, tensor.dim())
            if tensor.device.type == "cuda" and "fused" in known_options(kind) and "foreach" not in arguments:
                arguments.setdefault("fused", tensor.is_floating_point())
            groups.setdefault(repr((kind, scale, arguments)), _Alike(kind, scale, arguments, [])).names.append(name)
        self._made = [_Made(alike, self._targets, config.lr) for alike in groups.values()]

    @staticmethod
    def _target(parameter: torch.Tensor, offload: bool) -> torch.Tensor:
        """What torch updates for a parameter: itself, or its master."""
        device = torch.device("cpu") if offload else parameter.device
        dtype = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
        if (dtype, device) == (parameter.dtype, parameter.device):
            return parameter
        return parameter.detach().to(device, dtype, copy=True).requires_grad_()

    def step(self, lr: float) -> None:
        """Update from the gradients, then drop them."""
        for name, target in self._targets.items():
            parameter = self._parameters[name]
            if target is not parameter and parameter.grad is not None:
                target.grad = parameter.grad.to(target.device, target.dtype)
                parameter.grad = None
        for made in self._made:
            made.step(lr)
        with torch.no_grad():
            for name, target in self._targets.items():
                if target is not self._parameters[name]:
                    self._parameters[name].copy_(target)

    def reload(self, name: str) -> None:
        """A parameter was given another value from outside; its master follows."""
        target = self._targets.get(name)
        if target is not None and target is not self._parameters[name]:
            with torch.no_grad():
                target.copy_(self._parameters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors named ``KIND/PARAMETER``, e.g. ``exp_avg/wte.weight``, masters among them."""
        masters = {
            f"{MASTER}/{n}": t.detach() for n, t in self._targets.items() if t.dtype != self._parameters[n].dtype
        }
        return {k: t for made in self._made for k, t in made.state().items()} | masters

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`. Raises GraphError for a tensor that is not of the form of its parameter's state."""
        by_name: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if name not in self._targets:
                raise GraphError(f"optimizer tensor {key!r} is of no parameter of this stage")
            if kind != MASTER:
                by_name.setdefault(name, {})[kind] = tensor
                continue
            target = self._targets[name]
            if tensor.shape != target.shape:
                raise GraphError(f"{key!r} has shape {list(tensor.shape)}, expected {list(target.shape)}")
            with torch.no_grad():
                target.copy_(tensor)
        for made in self._made:
            made.load({n: by_name[n] for n in made.names if n in by_name})


class _Alike(NamedTuple):
    """Parameters that change alike."""

    kind: str
    scale: float
    arguments: dict[str, Any]
    names: list[str]


class _Made:
    """An optimizer of torch over parameters that change alike; one for each, since torch checks no group's options."""

    def __init__(self, alike: _Alike, tensors: Mapping[str, torch.Tensor], lr: float) -> None:
        self.names, self._scale = alike.names, alike.scale
        make: Any = optimizer_class(alike.kind)
        try:
            self._torch: torch.optim.Optimizer = make(
                [tensors[name] for name in alike.names], lr=lr * alike.scale, **alike.arguments
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"{alike.kind} refuses its options: {error}") from None

    def step(self, lr: float) -> None:
        for group in self._torch.param_groups:
            group["lr"] = lr * self._scale
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        raw = self._torch.state_dict()["state"]
        return {
            f"{kind}/{self.names[index]}": value.detach()
            for index, entry in raw.items()
            for kind, value in entry.items()
            if isinstance(value, torch.Tensor)
        }

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        if not tensors:
            return
        held = self._torch.state_dict()
        for name, entry in tensors.items():
            own = held["state"].setdefault(self.names.index(name), {})
            own.update({kind: tensor.clone() for kind, tensor in entry.items()})
        self._torch.load_state_dict(held)
