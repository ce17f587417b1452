"""Operators element by element and reductions, in jax.numpy. Arguments have the names of `ir.ops.OPS`.

Where a function has a corner its derivative is torch's: of ``clamp`` the inside counts to the edge, of ``hardtanh`` it
does not, a norm of nothing has none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Handler = Callable[..., Any]


def _add(self: Any, other: Any, alpha: Any = 1) -> Any:
    return self + (other if alpha == 1 else alpha * other)


def _sub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return self - (other if alpha == 1 else alpha * other)


def _rsub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return _sub(other, self, alpha)


def _div_mode(self: Any, other: Any, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return jnp.true_divide(self, other)
    return jnp.floor_divide(self, other) if rounding_mode == "floor" else jnp.trunc(jnp.true_divide(self, other))


def _pow(self: Any, exponent: Any) -> Any:
    whole = isinstance(exponent, float) and exponent.is_integer() and abs(exponent) < 64
    return jnp.power(self, int(exponent) if whole else exponent)


def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        self = jnp.where(self < min, jnp.asarray(min, self.dtype), self)
    return self if max is None else jnp.where(self > max, jnp.asarray(max, self.dtype), self)


def _hardtanh(self: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    low, high = jnp.asarray(min_val, self.dtype), jnp.asarray(max_val, self.dtype)
    return jnp.where(self <= low, low, jnp.where(self >= high, high, self))


def _elu(self: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    under = jnp.where(self > 0, 0, self)
    return scale * jnp.where(self > 0, self, alpha * jnp.expm1(under * input_scale))


def _gelu(self: Any, approximate: str = "none") -> Any:
    return jax.nn.gelu(self, approximate=approximate == "tanh")


def _softplus(self: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = self * beta
    return jnp.where(scaled > threshold, self, jax.nn.softplus(scaled) / beta)


def _glu(self: Any, dim: int = -1) -> Any:
    first, second = jnp.split(self, 2, dim)
    return first * jax.nn.sigmoid(second)


# ------------------------------------------------------------------------------------------------------ reductions


def axes(dim: Any, rank: int) -> tuple[int, ...]:
    """torch's ``dim`` (None or empty: all) as axes."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(rank))
    return tuple(dim) if isinstance(dim, (list, tuple)) else (dim,)


def _sum(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return jnp.sum(self, axes(dim, self.ndim), dtype, keepdims=keepdim)


def _mean(self: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return jnp.mean(self, axes(dim, self.ndim), dtype, keepdims=keepdim)


def _var(self: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(self, axes(dim, self.ndim), ddof=1 if correction is None else correction, keepdims=keepdim)


def safe_sqrt(x: Any) -> Any:
    """The square root, with derivative 0 at 0."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def _std(self: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    return safe_sqrt(_var(self, dim, correction, keepdim))


def _norm(self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x, over = (self if dtype is None else self.astype(dtype)), axes(dim, self.ndim)
    size = jnp.abs(x)
    if ord in (float("inf"), float("-inf")):
        return (jnp.max if ord > 0 else jnp.min)(size, over, keepdims=keepdim)
    if ord == 0:
        return jnp.sum((x != 0).astype(x.dtype), over, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(size, over, keepdims=keepdim)
    if ord == 2:
        return safe_sqrt(jnp.sum(x * x, over, keepdims=keepdim))
    total = jnp.sum(size**ord, over, keepdims=keepdim)
    return jnp.where(total > 0, jnp.where(total > 0, total, 1) ** (1 / ord), 0)


def _norm_p(self: Any, p: Any, dim: Any, keepdim: bool = False) -> Any:
    return _norm(self, 2 if p is None else p, dim, keepdim)


def _amax(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(self, axes(dim, self.ndim), keepdims=keepdim)


def _max_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    at = jnp.argmax(self, dim, keepdims=True)
    value = jnp.take_along_axis(self, at, dim)
    return (value, at) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(at, dim))


def _argmax(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(self, dim, keepdims=keepdim)


def _prod(self: Any, dim: int, keepdim: bool = False, dtype: Any = None) -> Any:
    return jnp.prod(self, dim, dtype, keepdims=keepdim)


def _softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    return jax.nn.softmax(self if dtype is None else self.astype(dtype), dim)


def _log_softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    return jax.nn.log_softmax(self if dtype is None else self.astype(dtype), dim)


def _logsumexp(self: Any, dim: Any, keepdim: bool = False) -> Any:
    return jax.scipy.special.logsumexp(self, axes(dim, self.ndim), keepdims=keepdim)


def _histc(self: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    low, high = (jnp.asarray(v, self.dtype) for v in (min, max))
    if min == max:
        low, high = jnp.min(self), jnp.max(self)
        low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    at = jnp.floor((self - low) * bins / (high - low)).astype(jnp.int64)
    inside = (self >= low) & (self <= high)
    at = jnp.where(inside, jnp.minimum(at, bins - 1), 0)
    return jnp.zeros(bins, self.dtype).at[at.reshape(-1)].add(inside.reshape(-1).astype(self.dtype))


def _unary(**functions: Callable[[Any], Any]) -> dict[str, Handler]:
    return {f"aten.{name}.default": (lambda self, f=f: f(self)) for name, f in functions.items()}


def _binary(overloads: str, **functions: Callable[[Any, Any], Any]) -> dict[str, Handler]:
    return {
        f"aten.{name}.{overload}": (lambda self, other, f=f: f(self, other))
        for name, f in functions.items()
        for overload in overloads.split()
    }


ELEMENTWISE: dict[str, Handler] = {
    **_unary(
        abs=jnp.abs, cos=jnp.cos, sin=jnp.sin, exp=jnp.exp, erf=jax.scipy.special.erf, floor=jnp.floor, log=jnp.log,
        log1p=jnp.log1p, neg=operator.neg, reciprocal=lambda x: 1 / x, relu=jax.nn.relu, round=jnp.round,
        rsqrt=jax.lax.rsqrt, sqrt=jnp.sqrt, sigmoid=jax.nn.sigmoid, sign=jnp.sign, silu=jax.nn.silu, square=jnp.square,
        tanh=jnp.tanh, mish=lambda x: x * jnp.tanh(jax.nn.softplus(x)), t=lambda x: x.T, detach=jax.lax.stop_gradient,
        logical_not=jnp.logical_not, all=jnp.all, any=jnp.any, bitwise_not=jnp.bitwise_not, isinf=jnp.isinf,
        isnan=jnp.isnan,
    ),
    **_binary("Tensor Scalar", eq=operator.eq, ne=operator.ne, ge=operator.ge, gt=operator.gt, le=operator.le,
              lt=operator.lt, mul=operator.mul, div=jnp.true_divide),
    **_binary("Tensor", __and__=operator.and_, bitwise_and=operator.and_, bitwise_or=operator.or_),
    **_binary("default", logical_and=jnp.logical_and, logical_or=jnp.logical_or, maximum=jnp.maximum,
              minimum=jnp.minimum, floor_divide=jnp.floor_divide),
    **_binary("other", max=jnp.maximum, min=jnp.minimum),
    **_binary("Scalar", remainder=jnp.mod, floor_divide=jnp.floor_divide),
    "aten.add.Tensor": _add, "aten.add.Scalar": _add, "aten.sub.Tensor": _sub, "aten.sub.Scalar": _sub,
    "aten.rsub.Scalar": _rsub, "aten.div.Tensor_mode": _div_mode,
    "aten.pow.Tensor_Scalar": _pow, "aten.pow.Tensor_Tensor": _pow, "aten.pow.Scalar": _pow,
    "aten.clamp.default": _clamp, "aten.clamp_min.default": _clamp, "aten.hardtanh.default": _hardtanh,
    "aten.elu.default": _elu, "aten.gelu.default": _gelu, "aten.softplus.default": _softplus, "aten.glu.default": _glu,
    "aten.leaky_relu.default": lambda self, negative_slope=0.01: jnp.where(self > 0, self, self * negative_slope),
    "aten.sum.default": _sum, "aten.sum.dim_IntList": _sum, "aten.mean.default": _mean, "aten.mean.dim": _mean,
    "aten.var.correction": _var, "aten.std.correction": _std, "aten.linalg_vector_norm.default": _norm,
    "aten.norm.ScalarOpt_dim": _norm_p, "aten.amax.default": _amax, "aten.max.dim": _max_dim,
    "aten.argmax.default": _argmax, "aten.prod.dim_int": _prod,
    "aten.any.dim": lambda self, dim, keepdim=False: jnp.any(self, dim, keepdims=keepdim),
    "aten.cumsum.default": lambda self, dim, dtype=None: jnp.cumsum(self, dim, dtype),
    "aten.softmax.int": _softmax, "aten.log_softmax.int": _log_softmax, "aten.logsumexp.default": _logsumexp,
    "aten.histc.default": _histc,
    "aten.where.self": lambda condition, self, other: jnp.where(condition, self, other),
    "aten.masked_fill.Scalar": lambda self, mask, value: jnp.where(mask, jnp.asarray(value, self.dtype), self),
    "aten.masked_fill.Tensor": lambda self, mask, value: jnp.where(mask, value.astype(self.dtype), self),
    "ir.cast": lambda x, dtype: x.astype(dtype),
}  # fmt: skip
for _overload in ("Scalar", "ScalarOther", "ScalarSelf"):
    ELEMENTWISE[f"aten.where.{_overload}"] = ELEMENTWISE["aten.where.self"]
