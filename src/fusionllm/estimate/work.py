"""What each operator does in a training step: kind, FLOPs, bytes moved, bytes kept for the backward, bytes of state.

Pure: from operator names and shapes, with no tensor framework and no device. On the path: OpGraph -> **OpWork** ->
seconds by `estimate.device`, memory by `estimate.memory`. Which operands a backward reads follows PyTorch's derivative
formulas in three classes: nothing (sums and movements), the result, or the operands. A value that several operators
keep is kept once and counted where it is kept first.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fusionllm.estimate.flops import MOVES, base_name, op_flops
from fusionllm.ir.cluster import OpKind
from fusionllm.ir.cuts import anchored_ids, anchored_ops
from fusionllm.ir.graph import UNUSED, Op, OpGraph
from fusionllm.ir.tensor import FLOATS, TensorSpec

_KINDS: dict[str, OpKind] = {
    **dict.fromkeys(("linear", "bmm", "mm", "matmul", "addmm", "baddbmm", "lstm", "gru"), "matmul"),
    **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose2d"), "convolution"),
    "scaled_dot_product_attention": "attention",
}
#: Movements that copy; the others are views, which cost nothing.
_COPIES = frozenset(("cat", "copy", "embedding", "gather", "index", "index_select", "pad", "repeat", "roll", "stack"))
_KEEPS_NOTHING = MOVES | {"add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "diff", "cast", "type_as"}
_KEEPS_RESULT = frozenset(("softmax", "log_softmax", "tanh", "sigmoid", "exp", "relu", "sqrt", "rsqrt", "reciprocal"))


class OpWork(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One anchored operator for one microbatch.

    Attributes:
        flops, moved_bytes: forward; operands and results count as moved.
        output_bytes: of its results. saved_bytes: kept from forward to backward.
        params: names of the parameters it reads. param_bytes: those of them that no operator before it reads.
        trained_bytes: the part of ``param_bytes`` that is trained.
    """

    kind: OpKind
    flops: float
    moved_bytes: float
    output_bytes: float
    saved_bytes: float
    params: tuple[str, ...]
    param_bytes: float
    trained_bytes: float


def graph_work(graph: OpGraph, symbols: Mapping[str, int]) -> list[OpWork]:
    """Work of every anchored operator, in order. Raises GraphError for a symbol that is not given."""
    specs = graph.specs()
    anchored = anchored_ids(graph)
    params = {param.id: (name, param) for name, param in graph.params.items()}
    kept: set[str] = set()
    read: set[str] = set()
    works = []
    for op in anchored_ops(graph):
        refs = list(dict.fromkeys(op.refs()))
        fresh = [ref for ref in refs if ref in params and ref not in read]
        read.update(fresh)
        keeps = [value for value in _kept(op, specs) if value in anchored and value not in params and value not in kept]
        kept.update(keeps)
        output_bytes = sum(spec.num_bytes(symbols) for out, spec in zip(op.outs, op.specs) if out != UNUSED)
        name = base_name(op.name)
        moves = name not in MOVES or name in _COPIES
        works.append(
            OpWork(
                kind=_KINDS.get(name, "memory"),
                flops=op_flops(op, specs, symbols),
                moved_bytes=float(output_bytes + sum(specs[r].num_bytes(symbols) for r in refs)) if moves else 0.0,
                output_bytes=float(output_bytes),
                saved_bytes=float(sum(specs[value].num_bytes(symbols) for value in keeps)),
                params=tuple(params[ref][0] for ref in refs if ref in params),
                param_bytes=float(sum(specs[ref].num_bytes(symbols) for ref in fresh)),
                trained_bytes=float(sum(specs[r].num_bytes(symbols) for r in fresh if params[r][1].trainable)),
            )
        )
    return works


def _kept(op: Op, specs: Mapping[str, TensorSpec]) -> list[str]:
    """Values a backward of this operator reads."""
    name = base_name(op.name)
    if name in _KEEPS_NOTHING or op.name.endswith(".Scalar"):
        return []
    if name in _KEEPS_RESULT:
        return [op.outs[0]]
    values = [ref for ref in op.refs() if specs[ref].is_tensor and specs[ref].dtype in FLOATS]
    return [*values, op.outs[0]] if name == "scaled_dot_product_attention" else values
