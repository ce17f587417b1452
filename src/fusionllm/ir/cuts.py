"""Where a graph can be cut, what crosses the cut, and the stages that result.

A value is *free* when no parameter, mutated buffer or random number stands behind it (masks, position ids, shifted
labels): free operators are copied into every stage that needs them and never cross a link. The rest is *anchored*:
each anchored operator belongs to exactly one stage. A partition is a list of boundaries into the sequence of anchored
operators. With free operators copied, the residual stream is a one-tensor cut of GPT-2, Llama, BERT, ViT, ResNet.

Ground floor: pure, knows graphs only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fusionllm.errors import PlanError
from fusionllm.ir.graph import UNUSED, Op, OpGraph, Value


class Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The boundary before anchored operator ``boundary``: the values alive there and their dense bytes."""

    boundary: int
    values: tuple[str, ...]
    num_bytes: int


def anchored_ids(graph: OpGraph) -> set[str]:
    """Ids of all values behind which stands a parameter, a mutated buffer or randomness."""
    return _classify(graph)[0]


def anchored_ops(graph: OpGraph) -> list[Op]:
    """The operators a partition distributes, in execution order."""
    return _classify(graph)[1]


def trained_ids(graph: OpGraph) -> set[str]:
    """Ids of the floating-point values that a gradient flows through: a trained parameter stands behind them.

    In a stage, what it receives counts too, unless listed as frozen; so producer and consumer of a value agree.
    """
    ids = {p.id for p in graph.params.values() if p.trainable}
    ids |= {v.id for v in graph.recv if v.spec.is_float} - set(graph.frozen)
    for op in graph.ops:
        if op.name != "aten.detach.default" and any(ref in ids for ref in op.refs()):
            ids.update(out for out, spec in zip(op.outs, op.specs) if spec.is_float and out != UNUSED)
    return ids


def _classify(graph: OpGraph) -> tuple[set[str], list[Op]]:
    """Anchored values and operators. What computes the loss or a buffer's next value has one owner in any case."""
    roots = {*graph.mutations.values(), *graph.outputs[:1]}
    ids = {p.id for p in graph.params.values()} | set(graph.mutations) | {v.id for v in graph.recv}
    ops = []
    for op in graph.ops:
        if op.rng is not None or any(ref in ids for ref in op.refs()) or any(out in roots for out in op.outs):
            ids.update(out for out in op.outs if out != UNUSED)
            ops.append(op)
    return ids, ops


def list_cuts(graph: OpGraph, symbols: Mapping[str, int]) -> list[Cut]:
    """Every cut between two consecutive anchored operators, with what crosses it.

    A cut between operators that read a mutated buffer and the one that computes its next value is left out: the
    buffer is the state of one stage. So is one behind the loss: its stage makes the metrics too.

    Args:
        symbols: concrete sizes, e.g. the microbatch size, to count bytes with.
    """
    ops = anchored_ops(graph)
    whole = _state_ranges(graph, ops)
    specs = graph.specs()
    last_use = {ref: index for index, op in enumerate(ops) for ref in op.refs()}
    live: set[str] = set()
    cuts = []
    loss = next((i for i, op in enumerate(ops) if graph.outputs[:1] and graph.outputs[0] in op.outs), len(ops) - 1)
    for index, op in enumerate(ops[:loss]):
        live.update(out for out in op.outs if out != UNUSED)
        live = {v for v in live if last_use.get(v, -1) > index}
        values = tuple(sorted(live))
        if not any(first <= index < last for first, last in whole.values()):
            cuts.append(Cut(index + 1, values, sum(specs[v].num_bytes(symbols) for v in values)))
    return cuts


def _state_ranges(graph: OpGraph, ops: Sequence[Op]) -> dict[str, tuple[int, int]]:
    """Per mutated buffer that several anchored operators touch: the first and last of them, one stage's together."""
    touched: dict[str, list[int]] = {buffer: [] for buffer in graph.mutations}
    makes = {value: buffer for buffer, value in graph.mutations.items()}
    for index, op in enumerate(ops):
        for buffer in {makes[out] for out in op.outs if out in makes} | (touched.keys() & set(op.refs())):
            touched[buffer].append(index)
    return {buffer: (at[0], at[-1]) for buffer, at in touched.items() if len(at) > 1}


def split_graph(graph: OpGraph, boundaries: Sequence[int]) -> list[OpGraph]:
    """Split a graph into ``len(boundaries) + 1`` stages.

    Args:
        boundaries: increasing indices into `anchored_ops`; stage k owns the operators from boundary k-1 up to k.

    Returns:
        One OpGraph per stage, in path order. Free operators are copied where needed, a parameter used by several
        stages (tied) is listed by each of them, ``recv`` and ``send`` name what crosses, ``frozen`` what of it needs
        no gradient.

    Raises:
        PlanError: a stage would be empty, or a mutated buffer would be shared by two stages.
    """
    anchored, ops = _classify(graph)
    for buffer, (first, last) in _state_ranges(graph, ops).items():
        for boundary in boundaries:
            if first < boundary <= last:
                raise PlanError(f"boundary {boundary} parts operators {first} and {last}, which share {buffer}")
    edges = [0, *boundaries, len(ops)]
    if any(a >= b for a, b in zip(edges, edges[1:])):
        raise PlanError(f"boundaries {list(boundaries)} leave a stage of {len(ops)} operators empty; use fewer stages")
    stages = [_stage(graph, ops[a:b], anchored) for a, b in zip(edges, edges[1:])]
    received = {v.id for stage in stages for v in stage.recv}
    trained = trained_ids(graph)
    return [
        msgspec.structs.replace(
            s,
            send=tuple(sorted(o for op in own for o in op.outs if o in received)),
            frozen=tuple(v.id for v in s.recv if v.spec.is_float and v.id not in trained),
        )
        for s, own in zip(stages, (ops[a:b] for a, b in zip(edges, edges[1:])))
    ]


def _stage(graph: OpGraph, own: Sequence[Op], anchored: set[str]) -> OpGraph:
    """The stage that owns these anchored operators, ``send`` still empty."""
    specs = graph.specs()
    producer = {out: index for index, op in enumerate(graph.ops) for out in op.outs if out != UNUSED}
    owned_outs = {out for op in own for out in op.outs}
    wanted = {producer[next(o for o in op.outs if o != UNUSED)] for op in own}
    outside = (
        {v.id for v in graph.inputs} | {p.id for p in graph.params.values()} | {b.id for b in graph.buffers.values()}
    )
    # a stage ends with the outputs it owns; a free output (no parameter behind it) belongs to the stage of the loss
    outputs = [o for o in graph.outputs if o in owned_outs]
    if outputs and outputs[0] == graph.outputs[0]:
        outputs = [o for o in graph.outputs if o in owned_outs or o not in anchored]
    mutations = {b: v for b, v in graph.mutations.items() if v in owned_outs}
    seen: set[str] = set()
    received: set[str] = set()
    stack = [ref for op in own for ref in op.refs()] + outputs
    while stack:
        ref = stack.pop()
        if ref in seen or ref in owned_outs:
            continue
        seen.add(ref)
        if ref in outside:
            continue
        if ref in anchored:
            received.add(ref)
        else:
            wanted.add(producer[ref])
            stack.extend(graph.ops[producer[ref]].refs())
    return msgspec.structs.replace(
        graph,
        inputs=tuple(v for v in graph.inputs if v.id in seen),
        params={n: p for n, p in graph.params.items() if p.id in seen},
        buffers={n: b for n, b in graph.buffers.items() if b.id in seen or b.id in mutations},
        ops=tuple(graph.ops[i] for i in sorted(wanted)),
        outputs=tuple(outputs),
        mutations=mutations,
        recv=tuple(Value(v, specs[v]) for v in sorted(received)),
        send=(),
        frozen=(),
    )
