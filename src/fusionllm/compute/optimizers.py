"""Which optimizers there are and what each can be told, as data; needs no tensor framework.

The names and defaults are those of torch.optim in lower case (a test compares them with torch). Left out: ``lbfgs``,
which evaluates the whole model several times a step, and ``sparseadam``, whose gradients no graph makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fusionllm.compute.options import OptimConfig
from fusionllm.errors import UserError, known_names

_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}

#: name -> its options with torch's defaults, less ``lr``, ``weight_decay`` and the switches of its implementation.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adadelta": {"rho": 0.9, "eps": 1e-6},
    "adafactor": {"beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0},
    "adagrad": {"lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10, "fused": None},
    "adam": {**_ADAM, "amsgrad": False, "decoupled_weight_decay": False, "fused": None},
    "adamax": _ADAM,
    "adamw": {**_ADAM, "amsgrad": False, "fused": None},
    "asgd": {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6},
    "muon": {
        "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5,
        "adjust_lr_fn": None,
    },
    "nadam": {**_ADAM, "momentum_decay": 4e-3, "decoupled_weight_decay": False},
    "radam": {**_ADAM, "decoupled_weight_decay": False},
    "rmsprop": {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False},
    "rprop": {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
    "sgd": {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "fused": None},
}  # fmt: skip
#: Options that every optimizer has, or all but muon.
_SHARED: dict[str, Any] = {"foreach": None, "maximize": False}
#: Optimizers that know no weight decay.
NO_WEIGHT_DECAY = frozenset({"rprop"})
#: Instead of torch's defaults: betas as for language models (GPT-3, arXiv 2005.14165), and steps of muon as large as
#: adamw's (Liu et al., Muon is Scalable, arXiv 2502.16982), so that one learning rate serves both.
_OURS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.95)},
    "adamw": {"betas": (0.9, 0.95)},
    "muon": {"adjust_lr_fn": "match_rms_adamw"},
}


def known_options(name: str) -> dict[str, Any]:
    """Options of an optimizer with torch's defaults. Raises UserError for a name that is not known."""
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer.name is {name!r}; {known_names(name, OPTIMIZERS)}")
    return OPTIMIZERS[name] if name == "muon" else {**OPTIMIZERS[name], **_SHARED}


def arguments(config: OptimConfig, name: str, options: Mapping[str, Any], weight_decay: float) -> dict[str, Any]:
    """Keyword arguments of torch's optimizer ``name`` without ``lr``: what is set, checked, over our defaults.

    ``betas``, ``eps`` and ``momentum`` of the run are for its own optimizer; muon's betas are those of the adamw beside
    it. Raises UserError that names what is wrong and what there is.
    """
    known = known_options(name)
    named = {"betas": config.betas, "eps": config.eps, "momentum": config.momentum}
    mine = {key: value for key, value in named.items() if value is not None and name == config.name}
    if config.name == "muon" and config.betas is not None:
        mine.pop("betas", None)
        mine |= {"betas": config.betas} if name == "adamw" else {}
    given = {**mine, **options}
    for key, value in given.items():
        if key not in known:
            raise UserError(
                f"optimizer.{key} = {value!r}: {name} has no such option; {known_names(key, sorted(known))}"
            )
        _check_type(name, key, value, known[key])
    decay: dict[str, Any] = {"weight_decay": weight_decay} if name not in NO_WEIGHT_DECAY else {}
    if not decay and weight_decay:
        raise UserError(f"optimizer.weight_decay is {weight_decay}, and {name} knows none; set it to 0")
    values = {**_OURS.get(name, {}), **given}
    return {**decay, **{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}}


def _check_type(name: str, key: str, value: Any, default: Any) -> None:
    if default is None:
        good = isinstance(value, str) if key == "adjust_lr_fn" else isinstance(value, bool)
        what = "a word" if key == "adjust_lr_fn" else "true or false"
    elif isinstance(default, bool):
        good, what = isinstance(value, bool), "true or false"
    elif isinstance(default, tuple):
        good = isinstance(value, (list, tuple)) and len(value) == len(default) and all(
            _is_number(v) or (v is None and d is None) for v, d in zip(value, default)
        )  # fmt: skip
        what = f"{len(default)} numbers"
    else:
        good = _is_number(value) and (isinstance(value, int) or isinstance(default, float))
        what = "a whole number" if isinstance(default, int) else "a number"
    if not good:
        raise UserError(f"optimizer.{key} = {value!r}: {name} wants {what}, e.g. {default}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_optimizer(config: OptimConfig) -> None:
    """Check names and options of the run's optimizer and of its groups. Raises UserError."""
    arguments(config, config.name, config.options, 0.0)
    if config.lr <= 0:
        raise UserError(f"optimizer.lr is {config.lr}; it must be above zero")
    if config.weight_decay < 0:
        raise UserError(f"optimizer.weight_decay is {config.weight_decay}; it must be at least 0")
    for group in config.groups:
        if not group.match:
            raise UserError("a group of optimizer.groups matches nothing; give match = [names of parameters]")
        if group.lr_scale < 0 or (group.weight_decay or 0) < 0:
            raise UserError(f"optimizer.groups {list(group.match)}: lr_scale and weight_decay must be at least 0")
        name = group.name or config.name
        arguments(config, name, _options_of(config, group.name, group.options), 0.0)


def _options_of(config: OptimConfig, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group: its own, over the run's where it has the run's optimizer."""
    return {**(config.options if name in ("", config.name) else {}), **options}


def group_arguments(config: OptimConfig, parameter: str, num_dims: int) -> tuple[str, float, dict[str, Any]]:
    """(optimizer, factor of the learning rate, its other arguments) of a parameter, in any partition the same.

    Muon is for matrices; everything else goes to adamw.
    """
    group = next((g for g in config.groups if g.has(parameter)), None)
    name, scale, own, decay = config.name, 1.0, dict(config.options), config.weight_decay
    if group is not None:
        name, scale = group.name or config.name, group.lr_scale
        own = _options_of(config, group.name, group.options)
        decay = config.weight_decay if group.weight_decay is None else group.weight_decay
    if name == "muon" and num_dims != 2:
        name, own = "adamw", {}
    return name, scale, arguments(config, name, own, decay)
