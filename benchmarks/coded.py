"""A whole pipeline in one process: the stages of a job, every value and gradient sent through the links' codecs.

Bit for bit what node processes with these codecs compute (tests/e2e/test_codecs.py), without their sockets: for
convergence studies, where only the numbers matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusionllm.api.config import RunConfig, TrainTable
from fusionllm.api.prepare import prepare
from fusionllm.capture.export import Captured
from fusionllm.compress import Reference
from fusionllm.compress.cut import Direction
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.compute.stage import TorchStage
from fusionllm.compute.wire import dtype_name
from fusionllm.errors import UserError
from fusionllm.estimate.flops import anchored_flops
from fusionllm.ir.codec import CodecSpec, fit_codec, parse_codec
from fusionllm.ir.cuts import split_graph
from fusionllm.ir.plan import tied_params
from fusionllm.schedule.partition import partition_graph
from fusionllm.store.dataset import Dataset

Place = tuple[str, int, tuple[int, ...]]


class CodedPipeline:
    """Stages of a captured model on one core, as many as boundaries and one.

    Args:
        boundaries: where `ir.cuts.split_graph` cuts. forward, backward: codecs as text: one for all cuts, or one per
            cut, first cut first, with `` | `` between.
    """

    def __init__(
        self, captured: Captured, optim: OptimConfig, num_steps: int, boundaries: Sequence[int], *, seed: int = 0,
        forward: str = "identity", backward: str = "identity",
    ) -> None:  # fmt: skip
        options = ComputeOptions(seed=seed, tied="microbatch")
        graphs = split_graph(captured.graph, list(boundaries))
        self._loss = captured.graph.outputs[0]
        self._tied = tied_params([graph.params for graph in graphs])
        self.stages = [
            TorchStage(graph, options, optim, num_steps, [n for n, holders in self._tied.items() if k in holders])
            for k, graph in enumerate(graphs)
        ]
        for stage in self.stages:
            for name in stage.graph.held:
                stage.load(name, captured.tensors[name])
        self._specs = {"f": _codecs_of(forward, len(boundaries)), "b": _codecs_of(backward, len(boundaries))}
        self._ways: dict[Place, Direction] = {}
        self._consumers = {
            value: [k for k, s in enumerate(self.stages) if any(v.id == value for v in s.graph.recv)]
            for stage in self.stages for value in stage.graph.send
        }  # fmt: skip
        self.hidden_rms: dict[str, float] = {}

    def train_step(self, step: int, batches: Sequence[Mapping[str, np.ndarray]], *, coded: bool = True) -> float:
        """One optimizer step; returns the mean loss over the rows."""
        sizes = [len(next(iter(batch.values()))) for batch in batches]
        total = 0.0
        for index, batch in enumerate(batches):
            weight = sizes[index] / sum(sizes)
            loss, sent, seen = self._run_forward(step, index, batch, train=True, coded=coded)
            self._run_backward(step, index, weight, sent, seen, coded=coded)
            total += loss * weight
        self._exchange_tied()
        norm = sum(stage.grad_square_sum() for stage in self.stages) ** 0.5
        for stage in self.stages:
            stage.update(step, norm)
        return total

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return {name: tensor for stage in self.stages for name, tensor in stage.state()[0].items()}

    def mean_loss(self, batches: Sequence[Mapping[str, np.ndarray]], *, coded: bool) -> float:
        """Mean loss over the rows, nothing changed but the codecs' state."""
        sizes = [len(next(iter(batch.values()))) for batch in batches]
        losses = [self._run_forward(0, i, b, train=False, coded=coded)[0] for i, b in enumerate(batches)]
        return sum(loss * size for loss, size in zip(losses, sizes)) / sum(sizes)

    def bytes_sent(self) -> tuple[int, int]:
        """(bytes on the wire, bytes of the same messages in float32), both directions, since the start."""
        ways = self._ways.items()
        dense = sum(4 * int(np.prod(shape)) * way.num_messages for (_, _, shape), way in ways)
        return sum(way.num_bytes for _, way in ways), dense

    def _exchange_tied(self) -> None:
        gradients = [stage.tied_gradients() for stage in self.stages]
        parts = {
            name: [gradients[k][name] for k in sorted(holders, reverse=True) if name in gradients[k]]
            for name, holders in self._tied.items()
        }
        for stage in self.stages:
            stage.reduce_tied({name: part for name, part in parts.items() if name in stage.graph.params and part})

    def _run_forward(self, step: int, index: int, batch: Mapping[str, np.ndarray], *, train: bool, coded: bool) -> Any:
        values = {name: torch.from_numpy(array) for name, array in batch.items()}
        sent: dict[str, torch.Tensor] = {}
        seen: dict[tuple[str, int], torch.Tensor] = {}
        loss = 0.0
        for k, stage in enumerate(self.stages):
            inputs = {v.id: values[v.id] for v in stage.graph.inputs}
            received = {v.id: seen[v.id, k] for v in stage.graph.recv}
            outs = stage.forward(step, index, {**inputs, **received}, train=train)
            for value in stage.graph.send:
                sent[value] = outs[value]
                self.hidden_rms[value] = float(outs[value].float().square().mean().sqrt())
                for consumer in self._consumers[value]:
                    seen[value, consumer] = self._send("f", value, consumer, outs[value], coded=coded)
            if self._loss in stage.graph.outputs:
                loss = float(outs[self._loss])
        return loss, sent, seen

    def _run_backward(
        self, step: int, index: int, weight: float, sent: Mapping[str, torch.Tensor],
        seen: Mapping[tuple[str, int], torch.Tensor], *, coded: bool,
    ) -> None:  # fmt: skip
        gradients: dict[str, torch.Tensor] = {}
        for k in reversed(range(len(self.stages))):
            wanted = {value: gradients.pop(value) for value in self.stages[k].graph.send if value in gradients}
            for value, gradient in self.stages[k].backward(step, index, wanted, weight).items():
                back = self._send("b", value, k, gradient, seen[value, k], sent[value], coded=coded)
                gradients[value] = gradients[value] + back if value in gradients else back

    def _send(
        self, kind: str, value: str, consumer: int, x: torch.Tensor, at_sender: torch.Tensor | None = None,
        at_receiver: torch.Tensor | None = None, *, coded: bool,
    ) -> torch.Tensor:  # fmt: skip
        if not coded or not x.is_floating_point():
            return x
        shape = tuple(x.shape)
        place = (f"{kind}:{value}", consumer, shape)
        if place not in self._ways:
            spec = fit_codec(self._specs[kind][consumer - 1], shape, dtype_name(x))
            self._ways[place] = Direction(spec, shape, dtype_name(x))
        return self._ways[place].send(x, Reference(at_sender), Reference(at_receiver))[0]


def _codecs_of(text: str, num_cuts: int) -> list[CodecSpec]:
    """One codec per cut. Raises UserError for another number of them."""
    specs = [parse_codec(part) for part in text.split(" | ")]
    if len(specs) not in (1, num_cuts):
        raise UserError(f"{len(specs)} codecs for {num_cuts} cuts in {text!r}; give one for all or one per cut")
    return specs * num_cuts if len(specs) == 1 else specs


def open_pipeline(
    config: RunConfig, num_stages: int, forward: str = "identity", backward: str = "identity",
    optim: OptimConfig | None = None,
) -> tuple[CodedPipeline, Dataset]:  # fmt: skip
    """A run's model cut in stages of equal FLOPs, for one core, and its data; ``optim``: default as in a run."""
    torch.set_num_threads(1)
    job, train = prepare(config, Path.cwd()), config.train
    graph = job.captured.graph
    symbols = dict.fromkeys(graph.symbols, train.microbatch_size)
    boundaries = partition_graph(graph, num_stages, "equal-compute", symbols, costs=anchored_flops(graph, symbols))
    pipeline = CodedPipeline(
        job.captured,
        optim or job.optim,
        train.steps,
        boundaries,
        seed=config.run.seed,
        forward=forward,
        backward=backward,
    )
    return pipeline, job.dataset


def train_steps(
    pipeline: CodedPipeline, dataset: Dataset, train: TrainTable, first: int = 0, *, first_coded: int = 0
) -> Iterator[float]:  # fmt: skip
    """Loss of each step of a run from ``first`` on, those before ``first_coded`` dense."""
    sizes = {"global_batch": train.global_batch, "microbatch_size": train.microbatch_size}
    for step in range(first, train.steps):
        yield pipeline.train_step(step, dataset.microbatches(step, **sizes), coded=step >= first_coded)


def losses_in_one_process(config: RunConfig, boundaries: Sequence[int], first_coded: int = 0) -> list[float]:
    """Loss of every step of a run with codecs set by hand, cut at these boundaries, dense before ``first_coded``."""
    job, codecs = prepare(config, Path.cwd()), config.compression
    pipeline = CodedPipeline(
        job.captured, config.optimizer, config.train.steps, boundaries, seed=config.run.seed,
        forward=codecs.forward, backward=codecs.backward,
    )  # fmt: skip
    return list(train_steps(pipeline, job.dataset, config.train, first_coded=first_coded))
