"""The torch backend: autograd records a walk over the graph, so the backward of a stage is torch's own.

Reference of the others: what it computes is bit for bit what the eager model does on the same device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from fusionllm.compute.backend import Context, Ran, Ready
from fusionllm.compute.device import choose_device
from fusionllm.compute.interpreter import Program
from fusionllm.compute.memory import resident_peak_bytes
from fusionllm.compute.ops_torch import has_operator
from fusionllm.compute.optim import Optimizer, has_optimizer
from fusionllm.compute.optimizers import OPTIMIZERS
from fusionllm.compute.options import ComputeOptions, OptimConfig
from fusionllm.compute.wire import tensor_from_buffer, tensor_to_bytes
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.ops import OPS

#: What autocast computes in less, on every kind of device, and whose weights it would cast for every microbatch.
_LOWERED = frozenset(
    f"aten.{name}.default" for name in ("linear", "addmm", "matmul", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d")
)


class _Cast(NamedTuple):
    """A weight in the type that products are computed in, as long as the weight has not changed."""

    weight: torch.Tensor
    version: int
    cast: torch.Tensor


class _Kept(NamedTuple):
    leaves: dict[str, torch.Tensor]
    outs: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


class TorchProgram:
    """A graph on a torch device."""

    def __init__(self, graph: OpGraph, options: ComputeOptions, device: str, allow_ops: Collection[str] = ()) -> None:
        self._device = torch.device(device)
        if self._device.type == "cpu" and torch.get_num_threads() != options.num_threads:
            torch.set_num_threads(options.num_threads)
        self._precision = options.precision
        self._lower = getattr(torch, self._precision) if self._precision in ("bfloat16", "float16") else None
        self._run = Program(graph, self._device, allow_ops, _LOWERED if self._lower else ())
        self._weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._casts: dict[str, _Cast] = {}
        self._loss_id = graph.outputs[0] if graph.outputs else None
        self._parameters = {n: p.id for n, p in graph.params.items() if p.trainable}
        self._received = {v.id for v in graph.recv} - set(graph.frozen)
        # autocast may compute a value in less than its declared type; what is sent is always what the graph declares
        specs = graph.specs()
        self._dtypes = {i: getattr(torch, specs[i].dtype) for i in (*graph.outputs, *graph.send)}

    def place(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach().to(self._device, copy=True)

    def forward(
        self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], context: Context, *, keep: bool
    ) -> Ran:
        values = {i: t.to(self._device) for i, t in values.items()}
        if not keep:
            with torch.no_grad(), self._autocast():
                uncast = {key: tensors[i] for key, i in self._run.apart.items()}
                outs, mutated = self._run({**tensors, **uncast, **values}, context)
            return Ran(self._declared(outs), mutated, None)
        parameters = {i: self._leaf(i, tensors[i]) for i in self._parameters.values()}
        casts = {key: self._cast(key, tensors[i], parameters.get(i)) for key, i in self._run.apart.items()}
        leaves = {
            i: t.detach().requires_grad_() for i, t in values.items() if i in self._received and t.is_floating_point()
        }
        with self._autocast():
            outs, mutated = self._run({**tensors, **parameters, **casts, **values, **leaves}, context)
        mutated = {b: t.detach() for b, t in mutated.items()}
        return Ran(self._declared(outs), mutated, _Kept(leaves, outs, parameters))

    def backward(
        self, kept: _Kept, seeds: Mapping[str, torch.Tensor], loss_weight: float, totals: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        roots, grads = [], []
        for name, out in kept.outs.items():
            if not out.requires_grad:
                continue
            gradient = seeds.get(name)
            if name == self._loss_id:
                root = torch.full_like(out, loss_weight)
                gradient = root if gradient is None else gradient + root
            if gradient is not None:
                roots.append(out)
                grads.append(gradient.to(out.device, out.dtype))
        if roots:
            # torch adds to what it finds: the sums so far are never held twice
            for name, id in self._parameters.items():
                kept.parameters[id].grad = totals.get(name)
            torch.autograd.backward(roots, grads)
            for name, id in self._parameters.items():
                if (gradient := kept.parameters[id].grad) is not None:
                    totals[name] = gradient
                    kept.parameters[id].grad = None
        return {i: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for i, leaf in kept.leaves.items()}

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return resident_peak_bytes() if self._device.type == "cpu" else 0

    def _declared(self, outs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {i: t.detach().to(self._dtypes[i]) for i, t in outs.items()}

    def _leaf(self, id: str, weight: torch.Tensor) -> torch.Tensor:
        """Where a parameter's gradient is found; the same for all microbatches where they share its casts."""
        if self._lower is None:
            return weight.detach().requires_grad_()
        if id not in self._weights or self._weights[id][0] is not weight:
            self._weights[id] = weight, weight.detach().requires_grad_()
        return self._weights[id][1]

    def _cast(self, key: str, weight: torch.Tensor, leaf: torch.Tensor | None) -> torch.Tensor:
        """A weight as autocast would cast it for one operator, once a step: microbatches in flight share it.

        An operator has its own, so that gradients of a weight with several users are summed in the weight's type,
        wherever stages are cut.
        """
        held = self._casts.get(key)
        if held is None or held.weight is not weight or held.version != weight._version:
            source = weight if leaf is None else leaf
            cast = source.to(self._lower) if weight.dtype == torch.float32 else source
            held = self._casts[key] = _Cast(weight, weight._version, cast)
        return held.cast

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self._device.type, self._precision)


def autocast(device_type: str, precision: str) -> AbstractContextManager[Any]:
    """In which products are computed in a precision, where that is bfloat16 or float16."""
    if precision in ("bfloat16", "float16"):
        # the cache of cast weights would outlive the weights' update
        return torch.autocast(device_type, dtype=getattr(torch, precision), cache_enabled=False)
    return nullcontext()


class TorchOptimizer:
    """Optimizers of torch, which change the very tensors they were made for."""

    def __init__(self, config: OptimConfig, parameters: Mapping[str, torch.Tensor]) -> None:
        self._own = dict(parameters)
        self._optimizer = Optimizer(config, parameters)
        self.state, self.load = self._optimizer.state, self._optimizer.load

    def square_sum(self, gradients: Mapping[str, torch.Tensor]) -> float:
        return sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradients.values())

    def step(
        self, tensors: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], lr: float, scale: float
    ) -> dict[str, torch.Tensor]:
        for name, own in self._own.items():
            if tensors[name] is not own:  # loaded again
                own.copy_(tensors[name])
                self._optimizer.reload(name)
            own.grad = gradients.get(name)
            if own.grad is not None and scale != 1.0:
                own.grad.mul_(scale)
        self._optimizer.step(lr)
        return self._own


class TorchBackend:
    """torch, 2.4 or newer."""

    def warm_up(self, device: str) -> Ready:
        """Make torch load what it loads late: its optimizers bring in its compiler."""
        chosen = choose_device(device)
        torch.optim.SGD([torch.zeros(1, device=chosen)], lr=1.0).zero_grad()
        return Ready(chosen, frozenset(filter(has_operator, OPS)), frozenset(filter(has_optimizer, OPTIMIZERS)))

    def program(
        self, graph: OpGraph, options: ComputeOptions, device: str, allow_ops: Collection[str] = ()
    ) -> TorchProgram:
        return TorchProgram(graph, options, device, allow_ops)

    def optimizer(self, config: OptimConfig, parameters: Mapping[str, torch.Tensor]) -> TorchOptimizer:
        return TorchOptimizer(config, parameters)

    def from_buffer(self, buffer: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return tensor_from_buffer(buffer, dtype, shape)

    def to_bytes(self, array: torch.Tensor) -> memoryview:
        return tensor_to_bytes(array)
