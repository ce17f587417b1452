"""From a graph to the numbers a planner works with: a Workload, one entry per anchored operator.

Pure decision. On the path: OpGraph -> `estimate` -> **Workload** -> `schedule.planner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import msgspec

from fusionllm.estimate.device import DeviceRates
from fusionllm.estimate.library import known_rates
from fusionllm.estimate.memory import memory_of
from fusionllm.estimate.work import graph_work
from fusionllm.ir.codec import IDENTITY, CodecSpec, expected_num_bytes, fit_codec
from fusionllm.ir.cuts import Cut, anchored_ids, anchored_ops, list_cuts
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.tensor import TensorSpec
from fusionllm.schedule.placement import Feed, Tied, Workload


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step is: rows of a microbatch (and length, where open), microbatches, schedule, precision, optimizer.

    ``tied``: codec of the gradients of tied parameters.
    """

    microbatch_size: int = 1
    max_length: int = 0
    num_microbatches: int = 16
    pipeline: str = "1f1b-ahead"
    precision: str = "bfloat16"
    optimizer: str = "adamw"
    tied: CodecSpec = IDENTITY


def build_workload(graph: OpGraph, options: StepOptions, measured: Mapping[str, DeviceRates] | None = None) -> Workload:
    """A graph in numbers. Raises GraphError; UserError for an optimizer that is not known.

    Activations are counted as captured in float32 and halved in ``bfloat16``; weights, gradients and optimizer stay.

    Args:
        measured: rates by name of device; None: those of the library's devices.
    """
    symbols = graph.sizes(options.microbatch_size, options.max_length)
    works = graph_work(graph, symbols)
    part = 0.5 if options.precision == "bfloat16" else 1.0
    cuts, specs = list_cuts(graph, symbols), graph.specs()
    users: dict[str, list[int]] = {}
    for index, work in enumerate(works):
        for name in work.params:
            users.setdefault(name, []).append(index)
    tied = tuple(
        Tied(ops=(ops[0], ops[-1]), num_bytes=_coded_num_bytes(options.tied, graph.params[name].spec))
        for name, ops in users.items()
        if len(ops) > 1 and graph.params[name].trainable
    )
    rates = known_rates(options.precision) if measured is None else measured
    return Workload(
        cuts=tuple(msgspec.structs.replace(cut, num_bytes=int(cut.num_bytes * part)) for cut in cuts),
        flops=tuple(work.flops for work in works),
        state_bytes=tuple(memory_of([work], options.optimizer).state_bytes for work in works),
        stash_bytes=tuple(work.saved_bytes * part for work in works),
        num_microbatches=options.num_microbatches,
        pipeline=options.pipeline,
        tied=tied,
        device_s={name: tuple(known.forward_s(work) for work in works) for name, known in rates.items()},
        wire_dtype=options.precision,
        op_names=tuple(op.name for op in anchored_ops(graph)),
        feeds=_feeds(graph, symbols),
        widths=tuple(_row_width(specs, cut, symbols) for cut in cuts),
    )


def _coded_num_bytes(codec: CodecSpec, spec: TensorSpec) -> float:
    shape = spec.concrete({})
    return float(expected_num_bytes(fit_codec(codec, shape, spec.dtype), shape, spec.dtype))


def _feeds(graph: OpGraph, symbols: dict[str, int]) -> tuple[Feed, ...]:
    """Inputs and the anchored operators that need them, themselves or through free ones."""
    anchored = anchored_ids(graph)
    behind: dict[str, set[str]] = {value.id: {value.id} for value in graph.inputs}
    users: dict[str, list[int]] = {value.id: [] for value in graph.inputs}
    place = {op.outs: index for index, op in enumerate(anchored_ops(graph))}
    for op in graph.ops:
        needed = {name for ref in op.refs() if ref not in anchored for name in behind.get(ref, ())}
        if op.outs in place:
            for name in needed:
                users[name].append(place[op.outs])
        else:
            behind.update(dict.fromkeys(op.outs, needed))
    return tuple(
        Feed(ops=tuple(users[value.id]), num_bytes=float(value.spec.num_bytes(symbols)))
        for value in graph.inputs
        if users[value.id] and value.spec.is_tensor
    )


def _row_width(specs: Mapping[str, TensorSpec], cut: Cut, symbols: dict[str, int]) -> int:
    """Elements along the last axis of the largest value that crosses."""
    shapes = [specs[value].concrete(symbols) for value in cut.values]
    return max(1, max(shapes, key=prod, default=(1,))[-1]) if any(shapes) else 1
