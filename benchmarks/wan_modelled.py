"""Modelled compute: a stage waits as long as its operators would take on a named GPU, with no weights and no torch.

What it sends has the real size and comes from a recording (`wan_recorded`), so that codecs behave; sockets, sessions,
links, codecs and the planner are the real ones. Losses mean nothing, and every output says that compute was emulated.
Time can be stretched: GPUs and links so many times slower, so that what this machine's own processors do for them,
which a GPU's host would do beside it, does not count. Results are divided by it again.

Processes of the hosts are forked from one (`wan_fork`), by ``run_node``; ``python -m benchmarks.wan_modelled STRETCH
broker|train ...`` is what runs on the owner's host, ``... work MODEL TOKENS STAGES`` prints the operators of a model
cut into equal numbers of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from benchmarks.wan_meter import BACKWARD, FORWARD, Meter
from benchmarks.wan_recorded import DISTINCT, Recorded, load_recorded
from fusionllm.compute import BACKENDS, CALIBRATIONS
from fusionllm.compute.backend import Context, Ran, Ready, array_bytes, checked_view, shaped_array
from fusionllm.compute.optimizers import OPTIMIZERS
from fusionllm.estimate.device import DeviceRates
from fusionllm.estimate.library import DEVICES
from fusionllm.estimate.work import OpWork, graph_work
from fusionllm.ir.cluster import BACKWARD_OVER_FORWARD, NodeProfile, Sample
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.ops import OPS
from fusionllm.protocol.messages import Probed
from fusionllm.sim.devices import find_device
from fusionllm.testbed.scenario import Host
from fusionllm.units import parse_duration_s

ROOT = Path(__file__).parents[1]
#: name -> (architecture, config). GPT-2 XL and Llama 2 13B (arXiv 2307.09288), nothing tied: a tied table's gradient
#: would cross every step. ``gpt2-xl-boundary`` has GPT-2 XL's blocks and boundary and a head that costs nothing.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {}
_XL = {
    "n_layer": 48, "n_head": 25, "n_embd": 1600, "n_positions": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS["gpt2-xl-boundary"] = "gpt2", {**_XL, "vocab_size": 256}
MODELS["gpt2-xl"] = "gpt2", {**_XL, "vocab_size": 50257}
MODELS["llama-13b"] = "llama", {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
#: Backends go by an installed package's name; numpy is what a modelled one needs.
BACKEND = "numpy"
#: Whose memory a host has that is not said to be a GPU: two of them do not hold GPT-2 XL with its optimizer, four do.
_CARD = "RTX 3090"
_KINDS = ("matmul", "attention", "convolution", "memory")


class Modelled(msgspec.Struct, frozen=True, kw_only=True):
    """What a node pretends to be.

    Attributes:
        device: its name. rates: stretched. memory_bytes: for a job. meter: file for the seconds that were modelled.
    """

    device: str
    rates: DeviceRates
    memory_bytes: float
    meter: str = ""


def model_of(host: Host, works: Sequence[Sequence[OpWork]], stretch: float, meter: str = "") -> Modelled:
    """A host of a scenario: a GPU of the library; or what takes ``forward`` for an equal share of the model.

    Args:
        works: operators of the whole model, as stages.
    """
    if host.gpu:
        spec = find_device(host.gpu, DEVICES)
        rates, memory_bytes = spec.rates("float32"), spec.usable_bytes
    else:
        flops = sum(work.flops for stage in works for work in stage if work.kind != "memory")
        forward_s = (parse_duration_s(host.forward) + parse_duration_s(host.backward)) / (1 + BACKWARD_OVER_FORWARD)
        rate = flops / len(works) / forward_s
        rates = DeviceRates(matmul=rate, attention=rate, convolution=rate, bytes_per_s=1e18)
        memory_bytes = find_device(_CARD, DEVICES).usable_bytes
    slow = {kind: getattr(rates, kind) / stretch for kind in (*_KINDS[:3], "bytes_per_s")}
    stretched = DeviceRates(launch_s=rates.launch_s * stretch, **slow)
    return Modelled(device=host.gpu or "modelled", rates=stretched, memory_bytes=memory_bytes, meter=meter)


def stage_s(works: Sequence[OpWork], rates: DeviceRates) -> tuple[float, float]:
    """Seconds of a microbatch, forward and backward."""
    forward_s = sum(rates.forward_s(work) for work in works)
    return forward_s, forward_s * BACKWARD_OVER_FORWARD


class _Here:
    """What this process pretends to be; set before any stage is made."""

    modelled: Modelled
    recorded: Recorded
    speeds: ClassVar[dict[str, Any]] = {}


class ModelledProgram:
    """A stage's graph on a GPU that is not there."""

    def __init__(self, graph: OpGraph, modelled: Modelled, recorded: Recorded) -> None:
        self._graph, self._rates, self._recorded = graph, modelled.rates, recorded
        self._meter = Meter(modelled.meter)
        self._specs = graph.specs()
        self._received = {v.id for v in graph.recv if v.spec.is_float} - set(graph.frozen)
        self._seconds: dict[tuple[tuple[str, int], ...], tuple[float, float]] = {}

    def place(self, array: np.ndarray) -> np.ndarray:
        return hollow(str(array.dtype), array.shape)

    def forward(
        self, tensors: Mapping[str, Any], values: Mapping[str, np.ndarray], context: Context, *, keep: bool
    ) -> Ran:
        started_s = time.perf_counter()
        symbols = self._graph.bind_symbols({name: tuple(array.shape) for name, array in values.items()})
        seconds = self._stage_s(symbols)
        index = context.microbatch_index % DISTINCT
        outs = {i: self._value("activation", i, symbols, index) for i in (*self._graph.outputs, *self._graph.send)}
        wait_until(started_s + seconds[0])
        if keep:
            self._meter.note(FORWARD, seconds[0])
        return Ran(outs, {}, (symbols, index, self._received & set(values), seconds[1]) if keep else None)

    def backward(self, kept: Any, seeds: Any, loss_weight: float, totals: Any) -> dict[str, np.ndarray]:
        started_s = time.perf_counter()
        symbols, index, wanted, backward_s = kept
        gradients = {i: self._value("gradient", i, symbols, index) for i in wanted}
        wait_until(started_s + backward_s)
        self._meter.note(BACKWARD, backward_s)
        return gradients

    def peak_bytes(self) -> int:
        return 0

    def _stage_s(self, symbols: dict[str, int]) -> tuple[float, float]:
        key = tuple(sorted(symbols.items()))
        if key not in self._seconds:
            self._seconds[key] = stage_s(graph_work(self._graph, symbols), self._rates)
        return self._seconds[key]

    def _value(self, kind: str, value: str, symbols: Mapping[str, int], index: int) -> np.ndarray:
        spec = self._specs[value]
        shape = spec.concrete(symbols)
        if spec.is_float and len(shape) > 1:
            return self._recorded.tensor(kind, shape, index).astype(spec.dtype, copy=False)
        return np.zeros(shape, spec.dtype)


class NoOptimizer:
    """Nothing is updated."""

    def square_sum(self, gradients: Any) -> float:
        return 0.0

    def step(self, tensors: Any, gradients: Any, lr: float, scale: float) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, tensors: Any) -> None:
        pass


class ModelledBackend:
    """What `compute.backend.Backend` asks for, modelled."""

    def warm_up(self, device: str) -> Ready:
        return Ready(_Here.modelled.device, frozenset(OPS), frozenset(OPTIMIZERS))

    def program(self, graph: OpGraph, options: Any, device: str, allow_ops: Collection[str] = ()) -> ModelledProgram:
        return ModelledProgram(graph, _Here.modelled, _Here.recorded)

    def optimizer(self, config: Any, parameters: Any) -> NoOptimizer:
        return NoOptimizer()

    def from_buffer(self, buffer: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        if isinstance(buffer, np.ndarray):  # hollow
            return buffer
        return shaped_array(checked_view(buffer, dtype, shape), np.dtype(dtype), shape)

    def to_bytes(self, array: np.ndarray) -> memoryview:
        return array_bytes(array)


def hollow(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of zeros without memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def wait_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.perf_counter()))


def calibrate(device: str, precision: str = "float32") -> NodeProfile:
    """Samples from which `estimate.device.fit_rates` gets the modelled rates back."""
    modelled = _Here.modelled
    samples = []
    for kind in _KINDS:
        rate = modelled.rates.bytes_per_s if kind == "memory" else getattr(modelled.rates, kind)
        for seconds in (1e-3, 1.0):
            done = seconds * rate
            samples.append(Sample(
                kind=kind, flops=0.0 if kind == "memory" else done, moved_bytes=done if kind == "memory" else 0.0,
                seconds=seconds + modelled.rates.launch_s,
            ))  # fmt: skip
    return NodeProfile(
        device=modelled.device, memory_bytes=modelled.memory_bytes, samples=tuple(samples), codecs=_Here.speeds
    )


def prepare(options: dict[str, Any]) -> None:
    """In the process that nodes are forked from: what they share. ``options``: activation, codecs."""
    _Here.recorded = load_recorded(Path(options["activation"]))
    import fusionllm.cli.main
    import fusionllm.node.agent
    import fusionllm.node.loop
    import fusionllm.node.worker

    if options["codecs"]:  # they compute with torch; without them it is never imported
        import torch

        from fusionllm.compress import measure_speed
        from fusionllm.schedule.ratios import LADDER

        torch.set_num_threads(1)
        _Here.speeds = {str(spec): measure_speed(spec, repeats=3) for spec in LADDER[1:]}
    assert fusionllm.cli.main and fusionllm.node.loop


def run_node(words: list[str]) -> None:
    """`fusionllm join ...` as what ``words[0]``, the JSON of a `Modelled`, says."""
    from fusionllm.cli.main import main
    from fusionllm.node import agent, worker
    from fusionllm.store.tensorfile import Blob

    _Here.modelled = msgspec.json.decode(words[0], type=Modelled)

    def no_weights(offer: Any, graph: OpGraph, own: Any) -> Any:
        for tensor in offer.tensors:
            spec = graph.held[tensor.name].spec
            yield tensor.name, Blob(spec.dtype, spec.concrete({}), hollow(spec.dtype, spec.concrete({})))

    BACKENDS[BACKEND] = "benchmarks.wan_modelled:ModelledBackend"
    CALIBRATIONS[BACKEND] = "benchmarks.wan_modelled:calibrate"
    agent.measure_device = lambda backend, device, precision: calibrate(device)
    worker.find_weights = no_weights
    main([*words[1:], "--backend", BACKEND])


def run_here(stretch: float, words: list[str]) -> None:
    """`fusionllm broker ...` or `fusionllm train ...` on the owner's host.

    A run's weights are nowhere, so none are kept or evaluated. Nodes are probed with the delays of the scenario, which
    the stretched ones would make too long, and only some of each site.
    """
    from fusionllm.api.run import Run
    from fusionllm.api.trainer import State, Trainer
    from fusionllm.broker import survey
    from fusionllm.cli.main import main

    Trainer.evaluate = lambda self, step, tell: None  # type: ignore[method-assign]
    Run._checkpoint = lambda self, job, trainer, run_dir, step: State({}, {})  # type: ignore[method-assign]
    survey.MAX_PROBED = 8
    handle = survey.Survey.handle

    def stretched(self: survey.Survey, name: str, message: Any) -> None:
        if isinstance(message, Probed):
            profile = msgspec.structs.replace(message.profile, rtt_s=message.profile.rtt_s * stretch)
            message = msgspec.structs.replace(message, profile=profile)
        handle(self, name, message)

    survey.Survey.handle = stretched  # type: ignore[method-assign]
    main(words)


def print_work(model: str, tokens: int, num_stages: int) -> None:
    """The operators of a model as JSON, cut into equal numbers of them."""
    import torch

    from fusionllm.capture.export import capture_module
    from fusionllm.capture.options import ModelConfig
    from fusionllm.capture.sources import resolve_model
    from fusionllm.ir.cuts import split_graph
    from fusionllm.schedule.partition import partition_graph

    name, config = MODELS[model]
    source = resolve_model(ModelConfig(source=name, config=config), base_dir=ROOT, seed=0, empty=True)
    ids = torch.zeros(2, tokens, dtype=torch.int64)
    graph = capture_module(source.module, {"input_ids": ids, "labels": ids}).graph
    symbols = dict.fromkeys(graph.symbols, 1)
    stages = split_graph(graph, partition_graph(graph, num_stages, "equal-number", symbols))
    sys.stdout.buffer.write(msgspec.json.encode([graph_work(stage, symbols) for stage in stages]))


@lru_cache
def equal_works(model: str, tokens: int, num_stages: int) -> list[list[OpWork]]:
    """The operators of a model for one microbatch, cut into equal numbers of them; by a process of its own."""
    words = [sys.executable, "-m", "benchmarks.wan_modelled", "work", model, str(tokens), str(num_stages)]
    done = subprocess.run(words, stdout=subprocess.PIPE, cwd=ROOT, check=True)
    return msgspec.json.decode(done.stdout, type=list[list[OpWork]])


if __name__ == "__main__":
    if sys.argv[1] == "work":
        print_work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        run_here(float(sys.argv[1]), sys.argv[2:])
