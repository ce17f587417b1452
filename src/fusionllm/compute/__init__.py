"""Executing graphs on a device: one backend per framework, the same operators and the same tests for each.

`options`, `backend` and `stage` need no framework; one is imported when its backend is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from fusionllm.compute.backend import Backend, Ready
from fusionllm.compute.groups import resolve_groups
from fusionllm.compute.optimizers import check_optimizer
from fusionllm.compute.options import ComputeOptions, OptimConfig, ParamGroup, learning_rate
from fusionllm.errors import UserError, known_names
from fusionllm.ir.cluster import NodeProfile

#: name of the backend, and of its framework's package -> where its class is, best first. A new one is a line here.
BACKENDS = {
    "torch": "fusionllm.compute.torch_backend:TorchBackend",
    "jax": "fusionllm.compute.jax.backend:JaxBackend",
    "tinygrad": "fusionllm.compute.tinygrad.backend:TinygradBackend",
}

#: name -> how its devices are measured.
CALIBRATIONS = {
    "torch": "fusionllm.compute.calibrate:calibrate",
    "jax": "fusionllm.compute.jax.calibrate:calibrate",
    "tinygrad": "fusionllm.compute.tinygrad.calibrate:calibrate",
}

__all__ = [
    "BACKENDS",
    "CALIBRATIONS",
    "ComputeOptions",
    "OptimConfig",
    "ParamGroup",
    "calibrate",
    "check_optimizer",
    "choose_backend",
    "framework_versions",
    "learning_rate",
    "load_backend",
    "resolve_groups",
    "warm_up",
]


def choose_backend(wish: str) -> str:
    """The name of an installed backend; ``auto``: the first of ``BACKENDS`` that is. Imports nothing.

    Raises:
        UserError: unknown, or not installed; says how to install it.
    """
    if wish not in ("auto", *BACKENDS):
        raise UserError(f"backend {wish!r} is not known; {known_names(wish, ('auto', *BACKENDS))}")
    for name in BACKENDS if wish == "auto" else [wish]:
        if find_spec(name) is not None:
            return name
    ways = " or ".join(f"pip install 'fusionllm[{name}]'" for name in (BACKENDS if wish == "auto" else [wish]))
    raise UserError(f"{'no tensor framework is' if wish == 'auto' else f'{wish} is not'} installed here; {ways}")


def framework_versions() -> dict[str, str]:
    """Releases of the frameworks installed here, by name."""

    def found() -> Iterator[tuple[str, str]]:
        for name in BACKENDS:
            try:
                yield name, version(name)
            except PackageNotFoundError:
                continue

    return dict(found())


def warm_up(name: str, device: str) -> Ready:
    """`Backend.warm_up` of a backend by name: the device a stage is to be made for, the operators it has."""
    return load_backend(choose_backend(name)).warm_up(device)


def calibrate(name: str, device: str, precision: str = "float32") -> NodeProfile:
    """Measure a device with a backend as it trains in a precision. Raises UserError for a backend that cannot."""
    module, _, attribute = CALIBRATIONS.get(name, "").partition(":")
    if not module:
        raise UserError(f"backend {name!r} has no calibration; {known_names(name, CALIBRATIONS)}")
    profile: NodeProfile = getattr(import_module(module), attribute)(device, precision)
    return profile


@lru_cache
def load_backend(name: str) -> Backend:
    """A backend of ``BACKENDS``; imports its framework."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
