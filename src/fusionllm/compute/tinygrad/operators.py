"""What each operator means, in tinygrad. Arguments have the names of `ir.ops.OPS`.

A random operator is given ``draw`` before its arguments: ``draw(x, p)`` is the dropout of its place in the run, None
where nothing is to be dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from tinygrad import Tensor, dtypes

from fusionllm.compute.sizes import SIZES
from fusionllm.ir.ops import OPS

Handler = Callable[..., Any]
Draw = Callable[[Any, float], Any]


def _add(self: Any, other: Any, alpha: Any = 1) -> Any:
    return self + (other if alpha == 1 else other * alpha)


def _sub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return self - (other if alpha == 1 else other * alpha)


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    y = input @ weight.transpose(0, 1)
    return y if bias is None else y + bias


def _addmm(self: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return self * beta + (mat1 @ mat2) * alpha


def _layer_norm(
    input: Any, normalized_shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:  # fmt: skip
    over = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(over, keepdim=True)
    y = centred * ((centred * centred).mean(over, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _attention(
    draw: Draw | None, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = None
    if is_causal:
        seen = Tensor.ones(*scores.shape[-2:], dtype=dtypes.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == dtypes.bool:
        seen = attn_mask if seen is None else seen & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    if seen is None:
        weights = scores.softmax(-1)
    else:  # a row that may look at nothing gives zeros, as torch's
        some = seen.cast(dtypes.int32).max(-1, keepdim=True) > 0
        scores = some.where(seen.where(scores, float("-inf")), 0)
        weights = some.where(scores.softmax(-1), 0)
    if draw is not None and dropout_p > 0:
        weights = draw(weights, dropout_p)
    return weights @ value


def _dropout(draw: Draw | None, x: Any, p: float) -> Any:
    return x if draw is None else draw(x, p)


def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if scale_grad_by_freq:
        raise ValueError("scale_grad_by_freq is not supported")
    rows = weight[indices]
    return rows if padding_idx < 0 else (indices == padding_idx).unsqueeze(-1).where(rows.detach(), rows)


def _cross_entropy(
    self: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    if self.ndim != 2 or target.ndim != 1 or label_smoothing:
        raise ValueError("only logits [N, C] with classes [N] and no label smoothing are supported")
    used = target != ignore_index
    at = used.where(target, 0)
    factor = used.cast(self.dtype) if weight is None else used.where(weight[at], 0)
    loss = -self.log_softmax(1).gather(1, at.unsqueeze(1)).squeeze(1) * factor
    return (loss.sum() / factor.sum(), loss.sum(), loss)[(1, 2, 0).index(reduction)]


def _slice(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return self[(slice(None),) * (dim % self.ndim) + (slice(start, end, step),)]


def _split(self: Any, split_size: int, dim: int = 0) -> list[Any]:
    return [_slice(self, dim, at, at + split_size) for at in range(0, self.shape[dim], split_size)]


def _pad(self: Any, pad: list[int], mode: str = "constant", value: Any = None) -> Any:
    if mode != "constant":
        raise ValueError(f"padding of mode {mode!r} is not supported")
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    return self.pad(((0, 0),) * (self.ndim - len(pairs)) + tuple(pairs), value=value or 0)


def _diff(self: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    parts = [part for part in (prepend, self, append) if part is not None]
    x = parts[0].cat(*parts[1:], dim=dim) if len(parts) > 1 else self
    for _ in range(n):
        x = _slice(x, dim, 1) - _slice(x, dim, 0, -1)
    return x


def _expand(self: Any, size: list[int], implicit: bool = False) -> Any:
    return self.expand(*size)


def _index(self: Any, indices: list[Any]) -> Any:
    if any(i is not None and i.dtype == dtypes.bool for i in indices):
        raise ValueError("an index by a mask is not supported")
    return self[tuple(slice(None) if i is None else i for i in indices)]


def _pow(self: Any, exponent: Any) -> Any:
    if exponent not in (1, 2, 3):
        return self.pow(exponent)
    return self if exponent == 1 else self * self if exponent == 2 else self * self * self


def _by_order(name: str) -> Handler:
    function, order = SIZES[name], OPS[name].args
    return lambda **given: function(*(given[key] for key in order if key in given))


def _binary(overload: str, **functions: Callable[[Any, Any], Any]) -> dict[str, Handler]:
    return {f"aten.{n}.{overload}": (lambda self, other, f=f: f(self, other)) for n, f in functions.items()}


def _unary(**functions: Callable[[Any], Any]) -> dict[str, Handler]:
    return {f"aten.{n}.default": (lambda self, f=f: f(self)) for n, f in functions.items()}


#: Given ``draw`` first.
RANDOM: dict[str, Handler] = {"ir.dropout": _dropout, "aten.scaled_dot_product_attention.default": _attention}
TABLE: dict[str, Handler] = {
    **RANDOM,
    **_unary(
        cos=Tensor.cos, sin=Tensor.sin, neg=operator.neg, rsqrt=Tensor.rsqrt, tanh=Tensor.tanh,
        silu=lambda x: x * x.sigmoid(), square=lambda x: x * x, relu=Tensor.relu,
    ),
    **_binary("Tensor", mul=operator.mul, eq=operator.eq, le=operator.le, __and__=operator.and_),
    **_binary("Scalar", ne=operator.ne),
    **_binary("default", logical_and=lambda a, b: (a != 0) & (b != 0)),
    "aten.add.Tensor": _add, "aten.sub.Tensor": _sub, "aten.pow.Tensor_Scalar": _pow,
    "aten.linear.default": _linear, "aten.addmm.default": _addmm, "aten.layer_norm.default": _layer_norm,
    "aten.cross_entropy_loss.default": _cross_entropy, "aten.embedding.default": _embedding,
    "aten.sum.default": lambda self, dtype=None: self.sum(dtype=dtype),
    "aten.mean.default": lambda self, dtype=None: (self if dtype is None else self.cast(dtype)).mean(),
    "aten.mean.dim": lambda self, dim, keepdim=False, dtype=None: (self if dtype is None else self.cast(dtype)).mean(
        tuple(dim) if dim else None, keepdim=keepdim
    ),
    "aten.argmax.default": lambda self, dim=None, keepdim=False: self.argmax(dim, keepdim=keepdim),
    "aten.cumsum.default": lambda self, dim, dtype=None: (self if dtype is None else self.cast(dtype)).cumsum(dim),
    "aten.cat.default": lambda tensors, dim=0: tensors[0].cat(*tensors[1:], dim=dim),
    "aten.diff.default": _diff, "aten.expand.default": _expand, "aten.index.Tensor": _index, "aten.pad.default": _pad,
    "aten.reshape.default": lambda self, shape: self.reshape(*shape),
    "aten.slice.Tensor": _slice, "aten.split.Tensor": _split,
    "aten.transpose.int": lambda self, dim0, dim1: self.transpose(dim0, dim1),
    "aten.unsqueeze.default": lambda self, dim: self.unsqueeze(dim),
    "aten.arange.default": lambda end, dtype=None: Tensor.arange(end, dtype=dtype or dtypes.int64),
    "aten.arange.start": lambda start, end, dtype=None: Tensor.arange(start, end, dtype=dtype or dtypes.int64),
    "aten.full.default": lambda size, fill_value, dtype=None: Tensor.full(tuple(size), fill_value, dtype=dtype),
    "aten.new_ones.default": lambda self, size, dtype=None: Tensor.ones(*size, dtype=dtype or self.dtype),
    "ir.cast": lambda x, dtype: x.cast(dtype),
    **{name: _by_order(name) for name in SIZES},
}  # fmt: skip
