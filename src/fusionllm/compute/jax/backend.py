"""The door of the JAX backend, and the process-wide settings it needs.

64-bit numbers are on, since graphs name int64 and float64; what a graph declares float32 stays float32. Products are of
full precision, as torch's by default. Compilations are kept on disk between runs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

# One thread per process is said to torch by this variable; XLA only listens to its own, before it starts.
if os.environ.get("OMP_NUM_THREADS") == "1" and "multi_thread_eigen" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()

import jax
import numpy as np

from fusionllm.compute.backend import Ready, array_bytes, checked_view, shaped_array
from fusionllm.compute.jax.operators import TABLE
from fusionllm.compute.jax.optim import RULES, JaxOptimizer
from fusionllm.compute.jax.program import JaxProgram
from fusionllm.compute.options import ComputeOptions, OptimConfig
from fusionllm.errors import GraphError, UserError
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.ops import OPS

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")
if jax.config.jax_compilation_cache_dir is None:
    _cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fusionllm" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(_cache))


def _devices() -> dict[str, Any]:
    """Devices by name, ``gpu:0`` and so on, the best first, ``cpu`` last."""
    found = {f"{d.platform}:{d.id}": d for d in jax.devices() if d.platform != "cpu"}
    return {**found, "cpu": jax.devices("cpu")[0]}


def find_device(name: str) -> Any:
    """A device by the name `JaxBackend.warm_up` gave."""
    return _devices()[name]


def _choose_device(wish: str) -> str:
    devices = list(_devices())
    for device in devices:
        if wish in ("auto", device, device.partition(":")[0]):
            return device
    raise UserError(f"device {wish!r} is not here; jax on this machine has {', '.join(devices)}, or choose auto")


class JaxBackend:
    """jax, 0.6 or newer."""

    def warm_up(self, device: str) -> Ready:
        """Start XLA on the device."""
        chosen = _choose_device(device)
        jax.device_put(np.zeros(1, np.float32), find_device(chosen)).block_until_ready()
        return Ready(chosen, frozenset(TABLE) & frozenset(OPS), frozenset(RULES))

    def program(
        self, graph: OpGraph, options: ComputeOptions, device: str, allow_ops: Collection[str] = ()
    ) -> JaxProgram:
        if own := sorted({op.name for op in graph.ops} & set(allow_ops) - set(OPS)):
            raise GraphError(f"operator {own[0]!r} is of a torch library; let a torch node take this stage")
        return JaxProgram(graph, options, find_device(device))

    def optimizer(self, config: OptimConfig, parameters: Mapping[str, Any]) -> JaxOptimizer:
        return JaxOptimizer(config, parameters)

    def from_buffer(self, buffer: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return shaped_array(checked_view(buffer, dtype, shape), jax.numpy.dtype(dtype), shape)

    def to_bytes(self, array: Any) -> memoryview:
        return array_bytes(array)
