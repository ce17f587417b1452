"""How a stage computes and how parameters change, as data. Needs no tensor framework."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from fusionllm.ir.cluster import Precision

Kind = Literal["norms", "biases", "embeddings"]


class ComputeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stage computes.

    Attributes:
        precision: ``float32``; ``bfloat16`` or ``float16``: products in it (autocast), weights in float32, with
            float16 the loss scaled; ``bfloat16-weights``: weights and values in it, masters in float32.
        recompute: keep only a stage's inputs, run its forward again in the backward.
        tied: ``step`` or ``microbatch``: how often tied gradients are exchanged.
        num_threads: of torch on a CPU.
    """

    precision: Precision = "float32"
    recompute: bool = False
    seed: int = 0
    num_threads: int = 1
    tied: Literal["step", "microbatch"] = "step"


class ParamGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters that change in a way of their own. The first group that a name matches is its group.

    Attributes:
        match: names of parameters, with ``*``, ``?`` and ``[ab]``, e.g. ``"transformer.h.*.attn.*"``.
        name: of their optimizer, empty: that of the run. lr_scale: times the run's learning rate.
        weight_decay, options: instead of the run's.
    """

    match: tuple[str, ...]
    name: str = ""
    lr_scale: float = 1.0
    weight_decay: float | None = None
    options: dict[str, Any] = {}

    def has(self, parameter: str) -> bool:
        return any(parameter == pattern or fnmatchcase(parameter, pattern) for pattern in self.match)


class OptimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How parameters change.

    Attributes:
        name: of an optimizer of torch.optim in lower case, see ``OPTIMIZERS``.
        betas, eps, momentum: of the optimizers that have them; None: torch's own, for betas (0.9, 0.95).
        options: others by torch's names, e.g. ``{nesterov = true}``.
        no_decay: kinds of parameters that weight decay leaves alone: ``norms``, ``biases``, ``embeddings``. None: all
            three for adamw and muon, none for the others.
        groups: parameters that change in a way of their own.
        schedule: of the learning rate after ``warmup_steps`` of linear warm-up: ``constant``, ``cosine`` or ``linear``
            down to ``min_lr_ratio`` of ``lr``.
        clip_norm: limit of the global gradient norm over all stages, 0: none.
        offload: keep the optimizer's state in the machine's memory, not the device's, and update there.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None
    options: dict[str, Any] = {}
    no_decay: tuple[Kind, ...] | None = None
    groups: tuple[ParamGroup, ...] = ()
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    clip_norm: float = 0.0
    offload: bool = False


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
