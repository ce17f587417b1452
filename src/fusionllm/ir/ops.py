"""The allow-list: every operator a graph may name, with the names of its arguments.

What is not in `OPS` is refused at capture and at load, so a graph from outside can execute nothing else. Argument
names are ours and frozen: they equal ATen's at the time of opset 1, and a later rename there changes nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from fusionllm.errors import GraphError, UserError, near_names

OPSET = 1


class OpSchema(NamedTuple):
    """Arguments in order; the first ``num_required`` must be given. ``rng``: draws random numbers (when p > 0)."""

    args: tuple[str, ...]
    num_required: int
    rng: bool = False
    opset: int = 1


_SCALAR_OPS = (
    "add",
    "sub",
    "mul",
    "floordiv",
    "truediv",
    "mod",
    "eq",
    "ne",
    "ge",
    "le",
    "gt",
    "lt",
    "max",
    "min",
    "and",
)

#: Operator name -> schema. Order is alphabetical within a namespace.
OPS: dict[str, OpSchema] = {
    "aten.__and__.Tensor": OpSchema(("self", "other"), 2),
    "aten._native_batch_norm_legit_functional.default": OpSchema(("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"), 8),
    "aten._native_batch_norm_legit_no_training.default": OpSchema(("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps"), 7),
    "aten.abs.default": OpSchema(("self",), 1),
    "aten.adaptive_avg_pool1d.default": OpSchema(("self", "output_size"), 2),
    "aten.adaptive_avg_pool2d.default": OpSchema(("self", "output_size"), 2),
    "aten.add.Scalar": OpSchema(("self", "other", "alpha"), 2),
    "aten.add.Tensor": OpSchema(("self", "other", "alpha"), 2),
    "aten.addmm.default": OpSchema(("self", "mat1", "mat2", "beta", "alpha"), 3),
    "aten.all.default": OpSchema(("self",), 1),
    "aten.amax.default": OpSchema(("self", "dim", "keepdim"), 1),
    "aten.any.default": OpSchema(("self",), 1),
    "aten.any.dim": OpSchema(("self", "dim", "keepdim"), 2),
    "aten.arange.default": OpSchema(("end", "dtype"), 1),
    "aten.arange.start": OpSchema(("start", "end", "dtype"), 2),
    "aten.arange.start_step": OpSchema(("start", "end", "step", "dtype"), 2),
    "aten.argmax.default": OpSchema(("self", "dim", "keepdim"), 1),
    "aten.argsort.default": OpSchema(("self", "dim", "descending"), 1),
    "aten.avg_pool2d.default": OpSchema(("self", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"), 2),
    "aten.baddbmm.default": OpSchema(("self", "batch1", "batch2", "beta", "alpha"), 3),
    "aten.binary_cross_entropy_with_logits.default": OpSchema(("self", "target", "weight", "pos_weight", "reduction"), 2),
    "aten.bitwise_and.Tensor": OpSchema(("self", "other"), 2),
    "aten.bitwise_not.default": OpSchema(("self",), 1),
    "aten.bitwise_or.Tensor": OpSchema(("self", "other"), 2),
    "aten.bmm.default": OpSchema(("self", "mat2"), 2),
    "aten.cat.default": OpSchema(("tensors", "dim"), 1),
    "aten.chunk.default": OpSchema(("self", "chunks", "dim"), 2),
    "aten.clamp.default": OpSchema(("self", "min", "max"), 1),
    "aten.clamp_min.default": OpSchema(("self", "min"), 2),
    "aten.conv1d.default": OpSchema(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), 2),
    "aten.conv2d.default": OpSchema(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), 2),
    "aten.conv3d.default": OpSchema(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), 2),
    "aten.conv_transpose2d.input": OpSchema(("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"), 2),
    "aten.copy.default": OpSchema(("self", "src"), 2),
    "aten.cos.default": OpSchema(("self",), 1),
    "aten.cross_entropy_loss.default": OpSchema(("self", "target", "weight", "reduction", "ignore_index", "label_smoothing"), 2),
    "aten.cumsum.default": OpSchema(("self", "dim", "dtype"), 2),
    "aten.detach.default": OpSchema(("self",), 1),
    "aten.diff.default": OpSchema(("self", "n", "dim", "prepend", "append"), 1),
    "aten.div.Scalar": OpSchema(("self", "other"), 2),
    "aten.div.Tensor": OpSchema(("self", "other"), 2),
    "aten.div.Tensor_mode": OpSchema(("self", "other", "rounding_mode"), 3),
    "aten.elu.default": OpSchema(("self", "alpha", "scale", "input_scale"), 1),
    "aten.embedding.default": OpSchema(("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"), 2),
    "aten.eq.Scalar": OpSchema(("self", "other"), 2),
    "aten.eq.Tensor": OpSchema(("self", "other"), 2),
    "aten.erf.default": OpSchema(("self",), 1),
    "aten.exp.default": OpSchema(("self",), 1),
    "aten.expand.default": OpSchema(("self", "size", "implicit"), 2),
    "aten.fill.Scalar": OpSchema(("self", "value"), 2),
    "aten.fill.Tensor": OpSchema(("self", "value"), 2),
    "aten.flatten.using_ints": OpSchema(("self", "start_dim", "end_dim"), 1),
    "aten.floor.default": OpSchema(("self",), 1),
    "aten.floor_divide.Scalar": OpSchema(("self", "other"), 2),
    "aten.floor_divide.default": OpSchema(("self", "other"), 2),
    "aten.full.default": OpSchema(("size", "fill_value", "dtype"), 2),
    "aten.full_like.default": OpSchema(("self", "fill_value", "dtype"), 2),
    "aten.gather.default": OpSchema(("self", "dim", "index", "sparse_grad"), 3),
    "aten.ge.Scalar": OpSchema(("self", "other"), 2),
    "aten.ge.Tensor": OpSchema(("self", "other"), 2),
    "aten.gelu.default": OpSchema(("self", "approximate"), 1),
    "aten.glu.default": OpSchema(("self", "dim"), 1),
    "aten.gru.input": OpSchema(("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first"), 9, rng=True),
    "aten.group_norm.default": OpSchema(("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"), 2),
    "aten.gt.Scalar": OpSchema(("self", "other"), 2),
    "aten.gt.Tensor": OpSchema(("self", "other"), 2),
    "aten.hardtanh.default": OpSchema(("self", "min_val", "max_val"), 1),
    "aten.histc.default": OpSchema(("self", "bins", "min", "max"), 1),
    "aten.index.Tensor": OpSchema(("self", "indices"), 2),
    "aten.index_add.default": OpSchema(("self", "dim", "index", "source", "alpha"), 4),
    "aten.index_put.default": OpSchema(("self", "indices", "values", "accumulate"), 3),
    "aten.index_select.default": OpSchema(("self", "dim", "index"), 3),
    "aten.isinf.default": OpSchema(("self",), 1),
    "aten.isnan.default": OpSchema(("self",), 1),
    "aten.l1_loss.default": OpSchema(("self", "target", "reduction"), 2),
    "aten.layer_norm.default": OpSchema(("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"), 2),
    "aten.le.Scalar": OpSchema(("self", "other"), 2),
    "aten.le.Tensor": OpSchema(("self", "other"), 2),
    "aten.leaky_relu.default": OpSchema(("self", "negative_slope"), 1),
    "aten.linalg_vector_norm.default": OpSchema(("self", "ord", "dim", "keepdim", "dtype"), 1),
    "aten.linear.default": OpSchema(("input", "weight", "bias"), 2),
    "aten.log.default": OpSchema(("self",), 1),
    "aten.log1p.default": OpSchema(("self",), 1),
    "aten.log_softmax.int": OpSchema(("self", "dim", "dtype"), 2),
    "aten.logical_and.default": OpSchema(("self", "other"), 2),
    "aten.logical_not.default": OpSchema(("self",), 1),
    "aten.logical_or.default": OpSchema(("self", "other"), 2),
    "aten.logsumexp.default": OpSchema(("self", "dim", "keepdim"), 2),
    "aten.lstm.input": OpSchema(("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first"), 9, rng=True),
    "aten.lt.Scalar": OpSchema(("self", "other"), 2),
    "aten.lt.Tensor": OpSchema(("self", "other"), 2),
    "aten.masked_fill.Scalar": OpSchema(("self", "mask", "value"), 3),
    "aten.masked_fill.Tensor": OpSchema(("self", "mask", "value"), 3),
    "aten.matmul.default": OpSchema(("self", "other"), 2),
    "aten.max.dim": OpSchema(("self", "dim", "keepdim"), 2),
    "aten.max.other": OpSchema(("self", "other"), 2),
    "aten.max_pool2d.default": OpSchema(("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode"), 2),
    "aten.maximum.default": OpSchema(("self", "other"), 2),
    "aten.mean.default": OpSchema(("self", "dtype"), 1),
    "aten.mean.dim": OpSchema(("self", "dim", "keepdim", "dtype"), 2),
    "aten.min.other": OpSchema(("self", "other"), 2),
    "aten.minimum.default": OpSchema(("self", "other"), 2),
    "aten.mish.default": OpSchema(("self",), 1),
    "aten.movedim.int": OpSchema(("self", "source", "destination"), 3),
    "aten.mse_loss.default": OpSchema(("self", "target", "reduction"), 2),
    "aten.mul.Scalar": OpSchema(("self", "other"), 2),
    "aten.mul.Tensor": OpSchema(("self", "other"), 2),
    "aten.narrow.default": OpSchema(("self", "dim", "start", "length"), 4),
    "aten.native_group_norm.default": OpSchema(("input", "weight", "bias", "N", "C", "HxW", "group", "eps"), 8),
    "aten.ne.Scalar": OpSchema(("self", "other"), 2),
    "aten.ne.Tensor": OpSchema(("self", "other"), 2),
    "aten.neg.default": OpSchema(("self",), 1),
    "aten.new_full.default": OpSchema(("self", "size", "fill_value", "dtype"), 3),
    "aten.new_ones.default": OpSchema(("self", "size", "dtype"), 2),
    "aten.new_zeros.default": OpSchema(("self", "size", "dtype"), 2),
    "aten.nll_loss_nd.default": OpSchema(("self", "target", "weight", "reduction", "ignore_index"), 2),
    "aten.norm.ScalarOpt_dim": OpSchema(("self", "p", "dim", "keepdim"), 3),
    "aten.ones.default": OpSchema(("size", "dtype"), 1),
    "aten.ones_like.default": OpSchema(("self", "dtype"), 1),
    "aten.outer.default": OpSchema(("self", "vec2"), 2),
    "aten.pad.default": OpSchema(("self", "pad", "mode", "value"), 2),
    "aten.permute.default": OpSchema(("self", "dims"), 2),
    "aten.pow.Scalar": OpSchema(("self", "exponent"), 2),
    "aten.pow.Tensor_Scalar": OpSchema(("self", "exponent"), 2),
    "aten.pow.Tensor_Tensor": OpSchema(("self", "exponent"), 2),
    "aten.prod.dim_int": OpSchema(("self", "dim", "keepdim", "dtype"), 2),
    "aten.reciprocal.default": OpSchema(("self",), 1),
    "aten.relu.default": OpSchema(("self",), 1),
    "aten.remainder.Scalar": OpSchema(("self", "other"), 2),
    "aten.repeat.default": OpSchema(("self", "repeats"), 2),
    "aten.repeat_interleave.self_int": OpSchema(("self", "repeats", "dim", "output_size"), 2),
    "aten.reshape.default": OpSchema(("self", "shape"), 2),
    "aten.rms_norm.default": OpSchema(("input", "normalized_shape", "weight", "eps"), 2),
    "aten.roll.default": OpSchema(("self", "shifts", "dims"), 2),
    "aten.round.default": OpSchema(("self",), 1),
    "aten.rsqrt.default": OpSchema(("self",), 1),
    "aten.rsub.Scalar": OpSchema(("self", "other", "alpha"), 2),
    "aten.scalar_tensor.default": OpSchema(("s", "dtype"), 1),
    "aten.scaled_dot_product_attention.default": OpSchema(("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"), 3, rng=True),
    "aten.scatter.src": OpSchema(("self", "dim", "index", "src"), 4),
    "aten.scatter.value": OpSchema(("self", "dim", "index", "value"), 4),
    "aten.scatter_add.default": OpSchema(("self", "dim", "index", "src"), 4),
    "aten.select.int": OpSchema(("self", "dim", "index"), 3),
    "aten.select_scatter.default": OpSchema(("self", "src", "dim", "index"), 4),
    "aten.sigmoid.default": OpSchema(("self",), 1),
    "aten.sign.default": OpSchema(("self",), 1),
    "aten.silu.default": OpSchema(("self",), 1),
    "aten.sin.default": OpSchema(("self",), 1),
    "aten.slice.Tensor": OpSchema(("self", "dim", "start", "end", "step"), 1),
    "aten.slice_scatter.default": OpSchema(("self", "src", "dim", "start", "end", "step"), 2),
    "aten.smooth_l1_loss.default": OpSchema(("self", "target", "reduction", "beta"), 2),
    "aten.softmax.int": OpSchema(("self", "dim", "dtype"), 2),
    "aten.softplus.default": OpSchema(("self", "beta", "threshold"), 1),
    "aten.sort.default": OpSchema(("self", "dim", "descending"), 1),
    "aten.split.Tensor": OpSchema(("self", "split_size", "dim"), 2),
    "aten.split_with_sizes.default": OpSchema(("self", "split_sizes", "dim"), 2),
    "aten.sqrt.default": OpSchema(("self",), 1),
    "aten.square.default": OpSchema(("self",), 1),
    "aten.squeeze.dim": OpSchema(("self", "dim"), 2),
    "aten.stack.default": OpSchema(("tensors", "dim"), 1),
    "aten.std.correction": OpSchema(("self", "dim", "correction", "keepdim"), 1),
    "aten.sub.Scalar": OpSchema(("self", "other", "alpha"), 2),
    "aten.sub.Tensor": OpSchema(("self", "other", "alpha"), 2),
    "aten.sum.default": OpSchema(("self", "dtype"), 1),
    "aten.sum.dim_IntList": OpSchema(("self", "dim", "keepdim", "dtype"), 2),
    "aten.t.default": OpSchema(("self",), 1),
    "aten.tanh.default": OpSchema(("self",), 1),
    "aten.topk.default": OpSchema(("self", "k", "dim", "largest", "sorted"), 2),
    "aten.transpose.int": OpSchema(("self", "dim0", "dim1"), 3),
    "aten.tril.default": OpSchema(("self", "diagonal"), 1),
    "aten.triu.default": OpSchema(("self", "diagonal"), 1),
    "aten.type_as.default": OpSchema(("self", "other"), 2),
    "aten.unbind.int": OpSchema(("self", "dim"), 1),
    "aten.unflatten.int": OpSchema(("self", "dim", "sizes"), 3),
    "aten.unsqueeze.default": OpSchema(("self", "dim"), 2),
    "aten.upsample_bilinear2d.vec": OpSchema(("input", "output_size", "align_corners", "scale_factors"), 4),
    "aten.upsample_nearest2d.vec": OpSchema(("input", "output_size", "scale_factors"), 3),
    "aten.var.correction": OpSchema(("self", "dim", "correction", "keepdim"), 1),
    "aten.where.Scalar": OpSchema(("condition", "self", "other"), 3),
    "aten.where.ScalarOther": OpSchema(("condition", "self", "other"), 3),
    "aten.where.ScalarSelf": OpSchema(("condition", "self", "other"), 3),
    "aten.where.self": OpSchema(("condition", "self", "other"), 3),
    "aten.zeros.default": OpSchema(("size", "dtype"), 1),
    "aten.zeros_like.default": OpSchema(("self", "dtype"), 1),
    # ours: a dtype change, and dropout with an rng index
    "ir.cast": OpSchema(("x", "dtype"), 2),
    "ir.dropout": OpSchema(("x", "p"), 2, rng=True),
    # arithmetic on sizes
    "sym.size": OpSchema(("x", "dim"), 2),
    "sym.neg": OpSchema(("a",), 1),
    "sym.float": OpSchema(("a",), 1),
    "sym.int": OpSchema(("a",), 1),
    "sym.not": OpSchema(("a",), 1),
    **{f"sym.{name}": OpSchema(("a", "b"), 2) for name in _SCALAR_OPS},
}  # fmt: skip


_LIBRARY_OP = re.compile(r"(?!(?:aten|prim|prims|ir|sym)\.)[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*")


def allowed_ops(names: Iterable[str]) -> frozenset[str]:
    """Operators that a person allows beyond `OPS`: of their own torch library, by full name, ``mylib.scan.default``.

    Whoever executes such an operator runs its code, so each owner and each node lists what it trusts; nothing in a
    graph can grant it. Raises UserError for what is not the name of a library's operator.
    """
    for name in names:
        if not _LIBRARY_OP.fullmatch(name):
            raise UserError(
                f"{name[:80]!r} cannot be allowed; name an operator of a library of yours as NAMESPACE.NAME.OVERLOAD, "
                "e.g. mylib.scan.default (torch's own are in the list of ir/ops.py or not at all)"
            )
    return frozenset(names)


def schema(name: str) -> OpSchema:
    """The schema of an operator. Raises GraphError for one that is not in the list."""
    found = OPS.get(name)
    if found is None:
        near = near_names(name, OPS, 3)
        hint = f" (near: {', '.join(near)})" if near else ""
        raise GraphError(f"operator {name!r} is not in the allow-list{hint}; docs/operators.md shows how to add one")
    return found
