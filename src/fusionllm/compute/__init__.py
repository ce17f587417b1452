"""Executing graphs on a device: one backend per framework, the same operators and the same tests for each.

`options` is plain data; a framework is imported when its backend is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fusionllm.compute.groups import resolve_groups
from fusionllm.compute.optimizers import check_optimizer
from fusionllm.compute.options import ComputeOptions, OptimConfig, ParamGroup, learning_rate
from fusionllm.errors import UserError
from fusionllm.ir.cluster import NodeProfile

if TYPE_CHECKING:
    from fusionllm.compute.stage import TorchStage

#: name -> where its stage class is. A new backend is a class with TorchStage's methods and one line here.
BACKENDS = {"torch": "fusionllm.compute.stage:TorchStage"}
#: name -> how its devices are measured.
CALIBRATIONS = {"torch": "fusionllm.compute.calibrate:calibrate"}

__all__ = [
    "BACKENDS",
    "CALIBRATIONS",
    "ComputeOptions",
    "OptimConfig",
    "ParamGroup",
    "calibrate",
    "check_optimizer",
    "learning_rate",
    "load_backend",
    "resolve_groups",
    "warm_up",
]


def warm_up(name: str, device: str) -> str:
    """Import what a first step would, so that it does not have to wait for it.

    Returns:
        The device a stage is to be made for: ``device`` itself, or what ``auto`` came to.

    Raises:
        UserError: this machine has no such device; names those it has.
    """
    return load_backend(name).warm_up(device)


def calibrate(name: str, device: str) -> NodeProfile:
    """Measure a device with a backend. Raises UserError for a backend that cannot."""
    module, _, attribute = CALIBRATIONS.get(name, "").partition(":")
    if not module:
        raise UserError(f"backend {name!r} has no calibration; known: {', '.join(CALIBRATIONS)}")
    profile: NodeProfile = getattr(import_module(module), attribute)(device)
    return profile


def load_backend(name: str) -> type[TorchStage]:
    """The stage class of a backend of ``BACKENDS``; imports its framework."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: type[TorchStage] = getattr(import_module(module), attribute)
    return backend
