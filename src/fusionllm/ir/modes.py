"""One graph, three uses: what training runs, what an evaluation runs, and what an evaluation counts.

The owner captures a model once, in train mode. An evaluation runs the same operators without dropout, with batch norm
by its running statistics, and changes no buffer; stage by stage, so that a partition serves both. A classifier's graph
gets two more outputs, how many rows or tokens it got right and how many it was asked, which training leaves out.

Ground floor: pure, knows graphs only.
"""

from __future__ import annotations

import msgspec

from fusionllm.ir.graph import UNUSED, Op, OpGraph
from fusionllm.ir.tensor import TensorSpec

#: The outputs after the loss in a graph of `with_metrics`.
METRICS = ("correct", "counted")
_BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
_BY_STATISTICS = "aten._native_batch_norm_legit_no_training.default"
_CROSS_ENTROPIES = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")


def remove_dead(graph: OpGraph) -> OpGraph:
    """Without operators whose results nobody needs."""
    live = {*graph.outputs, *graph.send, *graph.mutations.values()}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if any(out in live for out in op.outs):
            outs = tuple(out if out in live else UNUSED for out in op.outs)
            kept.append(msgspec.structs.replace(op, outs=outs))
            live.update(op.refs())
    buffers = {n: b for n, b in graph.buffers.items() if b.id in live or b.id in graph.mutations or b.persistent}
    inputs = tuple(v for v in graph.inputs if v.id in live)
    return msgspec.structs.replace(graph, ops=tuple(reversed(kept)), buffers=buffers, inputs=inputs)


def training_graph(graph: OpGraph) -> OpGraph:
    """A graph or stage without what only the metrics need."""
    return remove_dead(msgspec.structs.replace(graph, outputs=graph.outputs[:1]))


def evaluation_graph(graph: OpGraph) -> OpGraph:
    """A graph or stage, captured in train mode, with batch norm as in eval mode: nothing is changed by running it.

    Its dropout stays; the backend, which draws for it, is told that this is no training.
    """
    read = {*graph.outputs, *graph.send, *(ref for op in graph.ops for ref in op.refs())}
    ops = tuple(_evaluated(op) if read.isdisjoint(op.outs[3:]) else op for op in graph.ops)
    return remove_dead(msgspec.structs.replace(graph, mode="eval", ops=ops, mutations={}))


def _evaluated(op: Op) -> Op:
    if op.name == _BATCH_NORM and op.args.get("running_mean") is not None:
        args = {k: v for k, v in op.args.items() if k != "training"}
        return msgspec.structs.replace(op, name=_BY_STATISTICS, args=args, outs=op.outs[:3], specs=op.specs[:3])
    return op


def with_metrics(graph: OpGraph) -> OpGraph:
    """The graph with the outputs ``METRICS`` after its loss, read off its one cross entropy over classes.

    Returns:
        The graph as it is when it has another loss, several, or targets that are not numbers of classes.
    """
    found = [op for op in graph.ops if op.name in _CROSS_ENTROPIES]
    specs = graph.specs()
    refs = [found[0].args.get(key) for key in ("self", "target")] if len(found) == 1 else []
    if len(refs) != 2 or not all(isinstance(ref, dict) and ref.get("r") in specs for ref in refs):
        return graph
    scores, target = (ref["r"] for ref in refs)  # type: ignore[index]
    if specs[target].dtype != "int64":
        return graph
    shape, taken = specs[target].shape, set(specs)

    def name(word: str) -> str:
        while word in taken:
            word += "_"
        taken.add(word)
        return word

    def call(op: str, word: str, dtype: str, shape: tuple[int | str, ...], **args: object) -> str:
        made = name(f"metric_{word}")
        ops.append(Op(name=op, args=args, outs=(made,), specs=(TensorSpec(dtype, shape),)))
        return made

    ops: list[Op] = []
    ignored = found[0].args.get("ignore_index", -100)
    axis = 1 if len(specs[scores].shape) > 1 else 0
    guess = call("aten.argmax.default", "guess", "int64", shape, self={"r": scores}, dim=axis)
    right = call("aten.eq.Tensor", "right", "bool", shape, self={"r": guess}, other={"r": target})
    asked = call("aten.ne.Scalar", "asked", "bool", shape, self={"r": target}, other=ignored)
    both = call("aten.logical_and.default", "both", "bool", shape, self={"r": right}, other={"r": asked})
    counts = [
        call("aten.sum.default", word, "int64", (), self={"r": value}) for word, value in zip(METRICS, (both, asked))
    ]
    return msgspec.structs.replace(graph, ops=(*graph.ops, *ops), outputs=(*graph.outputs[:1], *counts))
