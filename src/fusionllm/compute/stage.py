"""One stage: forward, backward as remote automatic differentiation, update. Knows arrays and a backend, not peers.

The backward of a stage starts from the gradients that the consumers of its values sent, and ends with the gradients of
the values it received, which go back to their producers. Reference: the original system, remote automatic
differentiation over an OP-DAG; differs in that any value may go to several stages and gradients are summed there, and
in that a framework is behind `compute.backend`: stages of one run may be of different ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from fusionllm.compute import load_backend
from fusionllm.compute.backend import Array, Context, Optimizer
from fusionllm.compute.options import ComputeOptions, OptimConfig, learning_rate
from fusionllm.errors import GraphError
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.modes import evaluation_graph, training_graph

#: Loss scaling of float16 (Micikevicius et al., arXiv 1710.03740): where it begins, after how many steps without an
#: overflow it doubles, and how far; the numbers are torch.amp.GradScaler's but for the shorter wait.
FIRST_SCALE, GROW_AFTER, MAX_SCALE = 2.0**16, 200, 2.0**24


class _Stash(msgspec.Struct):
    """What a forward leaves for its backward: the framework's record, or what to run the forward again from."""

    kept: Any
    tensors: dict[str, Array] | None = None
    values: Mapping[str, Array] | None = None


class Stage:
    """A stage, its parameters, its optimizer.

    Args:
        backend: a name of ``compute.BACKENDS``; all arrays that go in and come out are its framework's.
        tied_names: parameters that other stages hold too.
        norm_names: parameters this stage counts in the global norm; None: all.
        device: as the backend names it; the node's choice, not the job's.
        allow_ops: operators beyond the list, as `ir.ops.allowed_ops` gives them; the node's choice too.
    """

    def __init__(
        self,
        backend: str,
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
        self._backend = load_backend(backend)
        self._program = self._backend.program(training_graph(graph), options, device, allow_ops)
        self._evaluation = self._backend.program(evaluation_graph(graph), options, device, allow_ops)
        self._trainable = {n: p.id for n, p in graph.params.items() if p.trainable}
        self._tied = tuple(n for n in tied_names if n in self._trainable)
        self._norm_names = tuple(self._trainable if norm_names is None else norm_names)
        self._tensors: dict[str, Array] = {}
        self._optimizer: Optimizer | None = None
        self._stash: dict[tuple[int, int], _Stash] = {}
        self._gradients: dict[str, Array] = {}
        self._tied_grads: dict[str, list[Array]] = {}
        self._scale = FIRST_SCALE if self.scales_loss else 1.0
        self._good_steps = 0

    # weights

    def load(self, name: str, array: Array) -> None:
        """Take a parameter or buffer. Raises GraphError when it is not of this stage or does not fit."""
        entry = self.graph.held.get(name)
        if entry is None:
            raise GraphError(f"this stage has no tensor {name!r}")
        got = (dtype_name(array), tuple(array.shape))
        if got != (entry.spec.dtype, entry.spec.concrete({})):
            raise GraphError(f"tensor {name!r} is {got[0]}{list(got[1])}, expected {entry.spec}")
        self._tensors[entry.id] = self._program.place(array)

    def missing(self) -> list[str]:
        """Names of tensors not loaded yet."""
        return [name for name, entry in self.graph.held.items() if entry.id not in self._tensors]

    @property
    def optimizer(self) -> Optimizer:
        """Made when first needed, over the trainable parameters in the graph's order."""
        if self._optimizer is None:
            trainable = {n: self._tensors[i] for n, i in self._trainable.items()}
            self._optimizer = self._backend.optimizer(self._optim_config, trainable)
        return self._optimizer

    # one microbatch

    def forward(
        self, step: int, microbatch_index: int, values: Mapping[str, Array], *, train: bool = True
    ) -> dict[str, Array]:
        """Outputs and sent values by id.

        Args:
            values: inputs and received values by id.
            train: False for an evaluation: no dropout, batch norm by its statistics, no buffer changes, nothing kept;
                the metrics are among the outputs.

        Raises:
            GraphError: a value is missing or of the wrong shape, or an operator failed.
        """
        self.graph.bind_symbols({i: tuple(a.shape) for i, a in values.items()})
        context = Context(self.options.seed, step, microbatch_index, train)
        if not train:
            return self._evaluation.forward(self._tensors, values, context, keep=False).outs
        keep = not self.options.recompute
        ran = self._program.forward(self._tensors, values, context, keep=keep)
        if keep:
            stash = _Stash(ran.kept)
        else:
            stash = _Stash(None, {b: self._tensors[b] for b in ran.mutated}, values)
        self._stash[step, microbatch_index] = stash
        self._tensors.update(ran.mutated)
        return ran.outs

    def backward(
        self, step: int, microbatch_index: int, grads: Mapping[str, Array], loss_weight: float
    ) -> dict[str, Array]:
        """Gradients of the received values that need one; parameter gradients are accumulated.

        Args:
            grads: gradients of the sent values, summed over their consumers.
            loss_weight: root gradient of the loss, where this stage makes it.
        """
        stash = self._stash.pop((step, microbatch_index))
        kept = stash.kept
        if stash.values is not None:
            context = Context(self.options.seed, step, microbatch_index, True)
            tensors = {**self._tensors, **(stash.tensors or {})}
            kept = self._program.forward(tensors, stash.values, context, keep=True).kept
        out = self._program.backward(kept, grads, loss_weight * self._scale, self._gradients)
        if self.options.tied == "microbatch":  # each microbatch's is kept apart, to be summed as one process would
            for name in self._tied:
                self._tied_grads.setdefault(name, []).append(self._gradient(name))
                self._gradients.pop(name, None)
        return out

    def _gradient(self, name: str) -> Array:
        """A parameter's gradient so far, zeros where there is none."""
        gradient = self._gradients.get(name)
        if gradient is None:
            spec = self.graph.params[name].spec
            gradient = self._backend.from_buffer(bytearray(spec.num_bytes({})), spec.dtype, spec.concrete({}))
        return gradient

    def tied_gradients(self) -> dict[str, Array]:
        """Per tied parameter: its gradients here, shape [1 or number of microbatches, *parameter's]."""
        if self.options.tied == "microbatch":
            return {name: self._stack(name, gradients) for name, gradients in self._tied_grads.items()}
        return {name: self._gradient(name)[None] for name in self._tied}

    def _stack(self, name: str, gradients: Sequence[Array]) -> Array:
        spec = self.graph.params[name].spec
        joined = bytearray().join(self._backend.to_bytes(g) for g in gradients)
        return self._backend.from_buffer(joined, spec.dtype, (len(gradients), *spec.concrete({})))

    def reduce_tied(self, contributions: Mapping[str, Sequence[Array]]) -> None:
        """Set each tied gradient to the sum over holders, microbatch by microbatch, in the order given."""
        for name, parts in contributions.items():
            if name not in self._tied:
                continue
            placed = [self._program.place(part) for part in parts]
            sums = [sum((part[index] for part in placed[1:]), placed[0][index]) for index in range(len(placed[0]))]
            self._gradients[name] = sum(sums[1:], sums[0])
        self._tied_grads.clear()

    # a step

    def grad_square_sum(self) -> float:
        """Sum of squares of the gradients this stage counts, in float64."""
        counted = {n: self._gradients[n] for n in self._norm_names if n in self._gradients}
        return self.optimizer.square_sum(counted) / self._scale**2

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may overflow, and a step be left out for it."""
        return self.options.precision == "float16"

    def update(self, step: int, total_norm: float) -> float:
        """Clip by the global norm, update, drop the gradients. Returns the learning rate used. ``step`` from 0.

        A norm that is not finite, of a job in float16, leaves the step out and halves the scale of the loss. All stages
        hear of the same norms, so they hold the same scale.
        """
        lr = learning_rate(self._optim_config, step, self._num_steps)
        if self.scales_loss and not math.isfinite(total_norm):
            self.drop_gradients()
            self._scale, self._good_steps = max(1.0, self._scale / 2), 0
            return lr
        limit = self._optim_config.clip_norm
        # as torch.nn.utils.clip_grad_norm_
        scale = (min(1.0, limit / (total_norm + 1e-6)) if limit > 0 else 1.0) / self._scale
        tensors = {n: self._tensors[i] for n, i in self._trainable.items()}
        gradients, self._gradients = self._gradients, {}
        updated = self.optimizer.step(tensors, gradients, lr, scale)
        self._tensors.update({self._trainable[n]: a for n, a in updated.items()})
        self._good_steps += 1
        if self.scales_loss and self._good_steps % GROW_AFTER == 0:
            self._scale = min(2 * self._scale, MAX_SCALE)
        return lr

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that is not going to happen, and the forwards without a backward."""
        self._tied_grads.clear()
        self._stash.clear()
        self._gradients.clear()

    # state

    def peak_bytes(self) -> int:
        """Memory needed at most so far: of the device, or of this process on a CPU; 0 if nobody says."""
        return self._program.peak_bytes()

    def state(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """(parameters and buffers by name, optimizer tensors by ``KIND/PARAMETER``)."""
        return {n: self._tensors[e.id] for n, e in self.graph.held.items()}, self.optimizer.state()

    def load_optimizer(self, tensors: Mapping[str, Array]) -> None:
        """Take optimizer tensors as `state` gave them; those of other stages' parameters are left out."""
        self.optimizer.load({k: t for k, t in tensors.items() if k.partition("/")[2] in self._trainable})


def dtype_name(array: Array) -> str:
    """An array's dtype as the IR names it, e.g. ``"float32"``; torch's, numpy's and jax's are written alike."""
    return str(array.dtype).removeprefix("torch.")


#: A stage of the reference backend, which other ways to compute are compared with.
TorchStage = partial(Stage, "torch")
