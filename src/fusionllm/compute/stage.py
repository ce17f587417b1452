"""One stage on torch: forward, backward as remote automatic differentiation, update. Knows tensors, not peers.

The backward of a stage starts from the gradients that the consumers of its values sent, and ends with the gradients of
the values it received, which go back to their producers. Reference: the original system, remote automatic
differentiation over an OP-DAG; differs in that any value may go to several stages and gradients are summed there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch

from fusionllm.compute.device import choose_device
from fusionllm.compute.interpreter import Program
from fusionllm.compute.ops_torch import Context
from fusionllm.compute.optim import Optimizer
from fusionllm.compute.options import ComputeOptions, OptimConfig, learning_rate
from fusionllm.compute.wire import dtype_name
from fusionllm.errors import GraphError
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.modes import evaluation_graph, training_graph


class _Stash(msgspec.Struct):
    """What a forward leaves for its backward."""

    leaves: dict[str, torch.Tensor]
    outs: dict[str, torch.Tensor] | None
    values: dict[str, torch.Tensor] | None = None


class TorchStage:
    """A stage, its parameters, its optimizer.

    Args:
        tied_names: parameters that other stages hold too.
        norm_names: parameters this stage counts in the global norm; None: all.
        device: as `compute.device` names it; the node's choice, not the job's.
        allow_ops: operators beyond the list, as `ir.ops.allowed_ops` gives them; the node's choice too.
    """

    def __init__(
        self,
        graph: OpGraph,
        options: ComputeOptions,
        optim: OptimConfig,
        num_steps: int,
        tied_names: Sequence[str] = (),
        norm_names: Sequence[str] | None = None,
        device: str = "cpu",
        allow_ops: Collection[str] = (),
    ) -> None:
        self.graph, self.options = graph, options
        self._optim_config, self._num_steps = optim, num_steps
        self._device = torch.device(device)
        if self._device.type == "cpu" and torch.get_num_threads() != options.num_threads:
            torch.set_num_threads(options.num_threads)
        self._program = Program(training_graph(graph), self._device, allow_ops)
        self._evaluation = Program(evaluation_graph(graph), self._device, allow_ops)
        self._tied = tuple(n for n in tied_names if graph.params[n].trainable)
        self._norm_names = tuple(graph.params if norm_names is None else norm_names)
        self._tensors: dict[str, torch.Tensor] = {}
        self._optimizer: Optimizer | None = None
        self._stash: dict[tuple[int, int], _Stash] = {}
        self._tied_grads: dict[str, list[torch.Tensor]] = {}
        # autocast may compute a value in less than its declared type; what is sent is always what the graph declares
        specs = graph.specs()
        self._dtypes = {i: getattr(torch, specs[i].dtype) for i in (*graph.outputs, *graph.send)}
        self._loss_id = graph.outputs[0] if graph.outputs else None

    @staticmethod
    def warm_up(device: str) -> str:
        """Make torch load what it loads late: its optimizers bring in its compiler. Returns the device chosen."""
        chosen = choose_device(device)
        torch.optim.SGD([torch.zeros(1, device=chosen)], lr=1.0).zero_grad()
        return chosen

    # weights

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take a parameter or buffer. Raises GraphError when it is not of this stage or does not fit."""
        entry = self.graph.held.get(name)
        if entry is None:
            raise GraphError(f"this stage has no tensor {name!r}")
        got = (dtype_name(tensor), tuple(tensor.shape))
        if got != (entry.spec.dtype, entry.spec.concrete({})):
            raise GraphError(f"tensor {name!r} is {got[0]}{list(got[1])}, expected {entry.spec}")
        if entry.id in self._tensors:  # in place: the optimizer holds this very tensor
            with torch.no_grad():
                self._tensors[entry.id].copy_(tensor)
            if self._optimizer is not None:
                self._optimizer.reload(name)
            return
        own = tensor.detach().to(self._device, copy=True)
        if name in self.graph.params:
            own.requires_grad_(self.graph.params[name].trainable)
        self._tensors[entry.id] = own

    def missing(self) -> list[str]:
        """Names of tensors not loaded yet."""
        return [name for name, entry in self.graph.held.items() if entry.id not in self._tensors]

    @property
    def optimizer(self) -> Optimizer:
        """Made when first needed, over the trainable parameters in the graph's order."""
        if self._optimizer is None:
            trainable = {n: self._tensors[p.id] for n, p in self.graph.params.items() if p.trainable}
            self._optimizer = Optimizer(self._optim_config, trainable)
        return self._optimizer

    # one microbatch

    def forward(
        self, step: int, microbatch_index: int, values: Mapping[str, torch.Tensor], *, train: bool = True
    ) -> dict[str, torch.Tensor]:
        """Outputs and sent values by id, detached.

        Args:
            values: inputs and received values by id.
            train: False for an evaluation: no dropout, batch norm by its statistics, no buffer changes, nothing kept;
                the metrics are among the outputs.

        Raises:
            GraphError: a value is missing or of the wrong shape, or an operator failed.
        """
        shapes = {i: tuple(t.shape) for i, t in values.items()}
        self.graph.bind_symbols(shapes)
        values = {i: t.to(self._device) for i, t in values.items()}
        context = Context(self.options.seed, step, microbatch_index, train)
        if not train:
            with torch.no_grad(), self._autocast():
                outs, _ = self._evaluation({**self._tensors, **values}, context)
            return {i: t.detach().to(self._dtypes[i]) for i, t in outs.items()}
        key = (step, microbatch_index)
        if self.options.recompute:
            with torch.no_grad(), self._autocast():
                outs, mutated = self._program({**self._tensors, **values}, context)
            before = {b: self._tensors[b] for b in mutated}
            self._stash[key] = _Stash({}, None, {**before, **values})
        else:
            leaves = self._leaves(values)
            with self._autocast():
                outs, mutated = self._program({**self._tensors, **values, **leaves}, context)
            self._stash[key] = _Stash(leaves, outs)
        self._tensors.update({b: t.detach() for b, t in mutated.items()})
        return {i: t.detach().to(self._dtypes[i]) for i, t in outs.items()}

    def backward(
        self, step: int, microbatch_index: int, grads: Mapping[str, torch.Tensor], loss_weight: float
    ) -> dict[str, torch.Tensor]:
        """Gradients of the received values that need one; parameter gradients are accumulated.

        Args:
            grads: gradients of the sent values, summed over their consumers.
            loss_weight: root gradient of the loss, where this stage makes it.
        """
        stash = self._stash.pop((step, microbatch_index))
        if stash.outs is None:
            stash = self._recompute(stash, Context(self.options.seed, step, microbatch_index, True))
        assert stash.outs is not None
        roots, seeds = [], []
        for name, out in stash.outs.items():
            if not out.requires_grad:
                continue
            gradient = grads.get(name)
            if name == self._loss_id:
                root = torch.full_like(out, loss_weight)
                gradient = root if gradient is None else gradient + root
            if gradient is not None:
                roots.append(out)
                seeds.append(gradient.to(out.device, out.dtype))
        held = self._hold_tied()
        if roots:
            torch.autograd.backward(roots, seeds)
        self._release_tied(held)
        return {i: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for i, leaf in stash.leaves.items()}

    def _leaves(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        received = {v.id for v in self.graph.recv} - set(self.graph.frozen)
        return {i: t.detach().requires_grad_() for i, t in values.items() if i in received and t.is_floating_point()}

    def _recompute(self, stash: _Stash, context: Context) -> _Stash:
        assert stash.values is not None
        leaves = self._leaves(stash.values)
        with self._autocast():
            outs, _ = self._program({**self._tensors, **stash.values, **leaves}, context)
        return _Stash(leaves, outs)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.options.precision == "bfloat16":
            # the cache of cast weights would outlive the weights' update
            return torch.autocast(self._device.type, dtype=torch.bfloat16, cache_enabled=False)
        return nullcontext()

    # tied gradients: in "microbatch" mode each microbatch's is kept apart, to be summed as one process would

    def _hold_tied(self) -> dict[str, torch.Tensor | None]:
        if self.options.tied != "microbatch":
            return {}
        held: dict[str, torch.Tensor | None] = {}
        for name in self._tied:
            parameter = self._tensors[self.graph.params[name].id]
            held[name], parameter.grad = parameter.grad, None
        return held

    def _release_tied(self, held: Mapping[str, torch.Tensor | None]) -> None:
        for name in held:
            parameter = self._tensors[self.graph.params[name].id]
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            self._tied_grads.setdefault(name, []).append(gradient)
            parameter.grad = None

    def tied_gradients(self) -> dict[str, torch.Tensor]:
        """Per tied parameter: its gradients here, shape [1 or number of microbatches, *parameter's]."""
        if self.options.tied == "microbatch":
            return {n: torch.stack(grads) for n, grads in self._tied_grads.items()}
        out = {}
        for name in self._tied:
            parameter = self._tensors[self.graph.params[name].id]
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            out[name] = gradient.detach()[None]
        return out

    def reduce_tied(self, contributions: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Set each tied gradient to the sum over holders, microbatch by microbatch, in the order given."""
        for name, parts in contributions.items():
            if name not in self._tied:
                continue
            total: torch.Tensor | None = None
            for microbatch_index in range(len(parts[0])):
                one = parts[0][microbatch_index].to(self._device)
                for part in parts[1:]:
                    one = one + part[microbatch_index].to(self._device)
                total = one if total is None else total + one
            assert total is not None
            self._tensors[self.graph.params[name].id].grad = total.clone()
        self._tied_grads.clear()

    # a step

    def grad_square_sum(self) -> float:
        """Sum of squares of the gradients this stage counts, in float64."""
        total = 0.0
        for name in self._norm_names:
            gradient = self._tensors[self.graph.params[name].id].grad
            if gradient is not None:
                total += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        return total

    def update(self, step: int, total_norm: float) -> float:
        """Clip by the global norm, update, drop the gradients. Returns the learning rate used. ``step`` from 0."""
        limit = self._optim_config.clip_norm
        if limit > 0:
            # as torch.nn.utils.clip_grad_norm_
            scale = min(1.0, limit / (total_norm + 1e-6))
            for name in self.graph.params:
                gradient = self._tensors[self.graph.params[name].id].grad
                if gradient is not None:
                    gradient.mul_(scale)
        lr = learning_rate(self._optim_config, step, self._num_steps)
        self.optimizer.step(lr)
        return lr

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that is not going to happen, and the forwards without a backward."""
        self._tied_grads.clear()
        self._stash.clear()
        for parameter in self.graph.params.values():
            self._tensors[parameter.id].grad = None

    # state

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(parameters and buffers by name, optimizer tensors by ``KIND/PARAMETER``)."""
        return {n: self._tensors[e.id].detach() for n, e in self.graph.held.items()}, self.optimizer.state()

    def load_optimizer(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take optimizer tensors as `state` gave them; those of other stages' parameters are left out."""
        own = {n for n, p in self.graph.params.items() if p.trainable}
        self.optimizer.load({k: t for k, t in tensors.items() if k.partition("/")[2] in own})
