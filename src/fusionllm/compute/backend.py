"""What a framework must give to compute here: a `Backend` of five methods, with its `Program` and `Optimizer`.

The rest of a stage (stash, tied gradients, clipping, learning rate, state) is `compute.stage.Stage`, the same for every
framework; docs/backends.md shows how to add one. Knows no framework: an array is whatever the backend makes of bytes,
with ``shape``, ``dtype`` and ``+``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from fusionllm.compute.options import ComputeOptions, OptimConfig
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.tensor import DTYPES

Array = Any


class Context(NamedTuple):
    """Where in the run a call is, for operators that draw random numbers. ``train`` False: dropout is off."""

    seed: int
    step: int
    microbatch_index: int
    train: bool


class Ran(NamedTuple):
    """What a forward gave.

    Attributes:
        outs: outputs and sent values by id, of their declared dtypes, free of any record for a backward.
        mutated: new values of mutated buffers by buffer id.
        kept: the framework's own record for `Program.backward`; None when it was not to be kept.
    """

    outs: dict[str, Array]
    mutated: dict[str, Array]
    kept: Any


class Ready(NamedTuple):
    """What a backend can do on this machine: the device chosen, those of `ir.ops.OPS`, the optimizers, the dtypes."""

    device: str
    operators: frozenset[str]
    optimizers: frozenset[str]
    dtypes: frozenset[str] = frozenset(DTYPES)


class Program(Protocol):
    """A stage's graph made ready for one device."""

    def place(self, array: Array) -> Array:
        """A copy of its own on the device."""

    def forward(
        self, tensors: Mapping[str, Array], values: Mapping[str, Array], context: Context, *, keep: bool
    ) -> Ran:
        """Run the graph.

        Args:
            tensors: parameters and buffers by id. values: inputs and received values by id, anywhere.

        Raises:
            GraphError: an operator failed.
        """

    def backward(
        self, kept: Any, seeds: Mapping[str, Array], loss_weight: float, totals: dict[str, Array]
    ) -> dict[str, Array]:
        """Reverse automatic differentiation of a kept forward.

        Args:
            seeds: gradients of sent values by id. loss_weight: root gradient of the loss, where the graph makes it.
            totals: gradients of trainable parameters by name so far; those of this call are added.

        Returns:
            Gradients of the received floating-point values that are not frozen, by id.
        """

    def peak_bytes(self) -> int:
        """Memory of the device needed at most so far; of a CPU, this process's (`compute.memory`); 0: nobody says."""


class Optimizer(Protocol):
    """Changes parameters by their gradients; its state goes by torch's names, so it may move between frameworks."""

    def square_sum(self, gradients: Mapping[str, Array]) -> float:
        """Sum of the squares of all elements, in float64."""

    def step(self, tensors: Mapping[str, Array], gradients: Mapping[str, Array], lr: float, scale: float) -> Any:
        """New parameters by name; one without a gradient is left out. ``scale``: what gradients are multiplied by."""

    def state(self) -> dict[str, Array]:
        """Tensors named ``KIND/PARAMETER``, e.g. ``exp_avg/wte.weight``; empty before the first step."""

    def load(self, tensors: Mapping[str, Array]) -> None:
        """The inverse of `state`."""


class Backend(Protocol):
    """One framework. Stateless."""

    def warm_up(self, device: str) -> Ready:
        """Import what a first step would, so that it need not wait. ``device``: a name, a kind or ``auto``.

        Raises:
            UserError: this machine has no such device; names those it has.
        """

    def program(self, graph: OpGraph, options: ComputeOptions, device: str, allow_ops: Collection[str] = ()) -> Program:
        """Raises GraphError for an operator that it does not have, or that is neither listed nor allowed."""

    def optimizer(self, config: OptimConfig, parameters: Mapping[str, Array]) -> Optimizer:
        """An optimizer over named parameters, none perhaps."""

    def from_buffer(self, buffer: Any, dtype: str, shape: tuple[int, ...]) -> Array:
        """An array over a buffer, without a copy. Raises RemoteProtocolError when the three do not agree."""

    def to_bytes(self, array: Array) -> memoryview:
        """The bytes of an array, little-endian and contiguous; a view of its memory where that can be."""


def checked_view(buffer: Any, dtype: str, shape: tuple[int, ...]) -> memoryview:
    """The bytes of a dense array from outside. Raises RemoteProtocolError when dtype, shape, length do not agree."""
    if dtype not in DTYPES:
        raise RemoteProtocolError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    view = memoryview(buffer).cast("B")
    if any(size < 0 for size in shape) or math.prod(shape) * DTYPES[dtype] != len(view):
        raise RemoteProtocolError(
            f"{dtype}{list(shape)} needs {math.prod(shape) * DTYPES[dtype]} bytes, got {len(view)}"
        )
    return view


def shaped_array(view: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """An array of numpy's over checked bytes, without a copy. Raises RemoteProtocolError when numpy cannot hold it."""
    try:
        return (np.frombuffer(view, dtype) if len(view) else np.empty(0, dtype)).reshape(shape)
    except (ValueError, OverflowError):  # e.g. a size past 64 bits beside a size of 0
        raise RemoteProtocolError(
            f"numpy cannot hold {dtype.name}{list(shape)[:16]}; sizes and rank are too large"
        ) from None


def array_bytes(array: Any) -> memoryview:
    """The bytes of what numpy can look at, contiguous; a view of its memory where that can be."""
    flat = np.asarray(array).reshape(-1)
    return np.ascontiguousarray(flat).view(np.uint8).data if flat.size else memoryview(b"")
