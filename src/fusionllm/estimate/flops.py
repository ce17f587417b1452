"""What each operator costs: forward FLOPs, bytes it writes, bytes of parameters it reads.

Pure: from operator names and shapes, with no tensor framework and no device. On the path: OpGraph -> **CostTable** ->
`schedule`. One multiply-add counts as two operations. The products (linear, matmul, convolution, attention) are exact;
everything else counts one operation per element it reads or writes, the larger of both, and table look-ups and pure
data movement count none. The backward pass of a product costs twice its forward, so the ratio between stages, which is
all that partitioning needs, is the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fusionllm.errors import GraphError
from fusionllm.ir.cuts import anchored_ops
from fusionllm.ir.graph import UNUSED, Op, OpGraph, arg_refs
from fusionllm.ir.tensor import TensorSpec
from fusionllm.units import format_count, format_num_bytes

#: Operators that only move, name or make data.
MOVES = frozenset(
    """
    arange cat chunk copy detach embedding expand fill flatten full full_like gather index index_select movedim narrow
    new_full new_ones new_zeros ones ones_like pad permute repeat repeat_interleave reshape roll scalar_tensor select
    select_scatter slice slice_scatter split split_with_sizes squeeze stack t transpose tril triu unbind unflatten
    unsqueeze view zeros zeros_like
    """.split()  # noqa: SIM905
)


class OpCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cost of one operator for given symbolic sizes. ``flops`` is of the forward pass."""

    flops: float
    output_bytes: int
    param_bytes: int


class GraphSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Totals of a graph. ``flops`` is of the forward pass of one microbatch; tied parameters count once."""

    num_ops: int
    num_anchored_ops: int
    num_params: int
    param_bytes: int
    flops: float
    output_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_ops} operators, {format_count(self.num_params)} parameters "
            f"({format_num_bytes(self.param_bytes)}), {format_count(self.flops)} FLOPs forward"
        )


def op_flops(op: Op, specs: Mapping[str, TensorSpec], symbols: Mapping[str, int]) -> float:
    """Forward floating-point operations of one operator.

    Args:
        specs: spec of every value, `OpGraph.specs`.
        symbols: value of every symbolic size.

    Raises:
        GraphError: a shape names a symbol that is not given, or an operand has too few dimensions.
    """
    name = base_name(op.name)
    if not op.name.startswith(("aten.", "ir.")) or name in MOVES:
        return 0.0
    if name in _RECURRENT:
        return _recurrent(op, specs, symbols)
    if name in _PRODUCTS:
        formula, operands = _PRODUCTS[name]
        shapes = [_shape(op, arg, specs, symbols) for arg in operands]
        try:
            return float(formula(shapes, op.specs[0].concrete(symbols)))
        except IndexError:
            raise GraphError(f"{op.name} with operands of shapes {shapes}: too few dimensions") from None
    sizes = [specs[ref].numel(symbols) for ref in op.refs() if specs[ref].is_tensor]
    return float(max([*sizes, *(s.numel(symbols) for s in op.specs if s.is_tensor)], default=0))


def base_name(name: str) -> str:
    """``"aten.linear.default"`` -> ``"linear"``; ``"sym.mul"`` -> ``"mul"``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


def _shape(op: Op, arg: str, specs: Mapping[str, TensorSpec], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the value given as an argument, () where none is."""
    ref = op.args.get(arg)
    return specs[ref["r"]].concrete(symbols) if isinstance(ref, dict) and ref.get("r") in specs else ()


_Formula = Callable[[Sequence[tuple[int, ...]], tuple[int, ...]], float]


def _matmul(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> float:
    """Every element of the result is a dot product over the last axis of the first operand."""
    return 2 * math.prod(out) * (shapes[0][-1] if shapes[0] else 1)


def _convolution(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> float:
    """Weight [out, in / groups, *kernel]: one dot product of in / groups * kernel per element of the result."""
    return 2 * math.prod(out) * math.prod(shapes[1][1:])


def _attention(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> float:
    """Query [..., L, E], key [..., S, E], value [..., S, V]: L x S scores, then L x S weights on the values.

    A causal mask halves what is needed, but the usual count, and most kernels on a CPU, do the whole square.
    """
    query, key, value = shapes
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _transposed_convolution(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...]) -> float:
    """Weight [in, out / groups, *kernel]: every element of the input meets out / groups * kernel weights."""
    return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])


_RECURRENT = ("lstm", "gru")


def _recurrent(op: Op, specs: Mapping[str, TensorSpec], symbols: Mapping[str, int]) -> float:
    """Every row at every time meets every matrix of every layer and direction once; the gates count nothing."""
    rows = math.prod(_shape(op, "input", specs, symbols)[:-1])
    matrices = [specs[ref].concrete(symbols) for ref in arg_refs(op.args.get("params")) if ref in specs]
    return 2.0 * rows * sum(math.prod(shape) for shape in matrices if len(shape) == 2)


#: Base name -> formula and the arguments whose shapes it takes.
_PRODUCTS: dict[str, tuple[_Formula, tuple[str, ...]]] = {
    "linear": (_matmul, ("input", "weight")),
    "bmm": (_matmul, ("self",)),
    "mm": (_matmul, ("self",)),
    "matmul": (_matmul, ("self",)),
    "addmm": (_matmul, ("mat1",)),
    "baddbmm": (_matmul, ("batch1",)),
    "convolution": (_convolution, ("input", "weight")),
    "conv1d": (_convolution, ("input", "weight")),
    "conv2d": (_convolution, ("input", "weight")),
    "conv3d": (_convolution, ("input", "weight")),
    "conv_transpose2d": (_transposed_convolution, ("input", "weight")),
    "scaled_dot_product_attention": (_attention, ("query", "key", "value")),
}


def graph_costs(graph: OpGraph, symbols: Mapping[str, int]) -> list[OpCost]:
    """Cost of every operator, in the order of ``graph.ops``. Raises GraphError for a symbol that is not given."""
    specs = graph.specs()
    param_bytes = {p.id: p.spec.num_bytes(symbols) for p in graph.params.values()}
    return [
        OpCost(
            op_flops(op, specs, symbols),
            sum(spec.num_bytes(symbols) for out, spec in zip(op.outs, op.specs) if out != UNUSED),
            sum(param_bytes.get(ref, 0) for ref in set(op.refs())),
        )
        for op in graph.ops
    ]


def anchored_flops(graph: OpGraph, symbols: Mapping[str, int]) -> list[float]:
    """Forward FLOPs of the operators a partition distributes: the ``costs`` of `schedule.partition`."""
    specs = graph.specs()
    return [op_flops(op, specs, symbols) for op in anchored_ops(graph)]


def summary(graph: OpGraph, symbols: Mapping[str, int]) -> GraphSummary:
    """Totals of a graph or of one stage."""
    costs = graph_costs(graph, symbols)
    return GraphSummary(
        num_ops=len(graph.ops),
        num_anchored_ops=len(anchored_ops(graph)),
        num_params=graph.num_params,
        param_bytes=sum(p.spec.num_bytes(symbols) for p in graph.params.values()),
        flops=sum(c.flops for c in costs),
        output_bytes=sum(c.output_bytes for c in costs),
    )
