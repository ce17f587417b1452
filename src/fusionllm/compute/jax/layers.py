"""Products, attention, normalisation, losses and recurrent layers, in jax.numpy. Windows are in `windows`.

A random operator is given ``draw`` before its arguments: ``draw(x, p, stream)`` is the dropout of its place in the run,
None where nothing is to be dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fusionllm.compute.jax.elementwise import Handler

Draw = Callable[..., Any]


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    y = input @ weight.T
    return y if bias is None else y + bias


def _add_product(c: Any, product: Any, beta: Any, alpha: Any) -> Any:
    return (c if beta == 1 else beta * c) + (product if alpha == 1 else alpha * product)


def _addmm(self: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _add_product(self, mat1 @ mat2, beta, alpha)


def _baddbmm(self: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _add_product(self, batch1 @ batch2, beta, alpha)


def _attention(
    draw: Draw | None, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = jnp.repeat(key, groups, -3), jnp.repeat(value, groups, -3)
    scores = query @ jnp.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    hidden = None
    if is_causal:
        hidden = jnp.triu(jnp.ones(scores.shape[-2:], jnp.bool_), 1)
    if attn_mask is not None and attn_mask.dtype == jnp.bool_:
        hidden = ~attn_mask if hidden is None else hidden | ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
        # a row that may look at nothing gives zeros, as torch's
        scores = jnp.where(jnp.all(hidden, -1, keepdims=True), 0, scores)
    weights = jax.nn.softmax(scores, -1)
    if hidden is not None:
        weights = jnp.where(jnp.all(hidden, -1, keepdims=True), 0, weights)
    if draw is not None and dropout_p > 0:
        weights = draw(weights, dropout_p, 0)
    return weights @ value


def _dropout(draw: Draw | None, x: Any, p: float) -> Any:
    return x if draw is None else draw(x, p, 0)


# -------------------------------------------------------------------------------------------------- normalisation


def _spread(values: Any, rank: int) -> Any:
    """Per-channel values against [N, C, ...]."""
    return values.reshape(1, -1, *(1,) * (rank - 2))


def _scale_shift(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _standard(x: Any, over: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    """(x with mean 0 and variance 1 over some axes, its mean, 1 / its deviation)."""
    mean = jnp.mean(x, over, keepdims=True)
    centred = x - mean
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, over, keepdims=True) + eps)
    return centred * rstd, mean, rstd


def _layer_norm(
    input: Any, normalized_shape: list[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:  # fmt: skip
    return _scale_shift(_standard(input, tuple(range(-len(normalized_shape), 0)), eps)[0], weight, bias)


def _rms_norm(input: Any, normalized_shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
    over = tuple(range(-len(normalized_shape), 0))
    eps = float(jnp.finfo(input.dtype).eps) if eps is None else eps
    y = input * jax.lax.rsqrt(jnp.mean(input * input, over, keepdims=True) + eps)
    return y if weight is None else y * weight


def _grouped(x: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    y, mean, rstd = _standard(x.reshape(x.shape[0], num_groups, -1), (2,), eps)
    w, b = (v if v is None else _spread(v, x.ndim) for v in (weight, bias))
    return _scale_shift(y.reshape(x.shape), w, b), mean[..., 0], rstd[..., 0]


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    return _grouped(input, num_groups, weight, bias, eps)[0]


def _native_group_norm(
    input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    return _grouped(input, group, weight, bias, eps)


def _batch_norm_fixed(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    mean, var = (_spread(v, input.ndim) for v in (running_mean, running_var))
    w, b = (v if v is None else _spread(v, input.ndim) for v in (weight, bias))
    return _scale_shift((input - mean) * jax.lax.rsqrt(var + eps), w, b), None, None


def _batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
    eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    if not training:
        y, *_ = _batch_norm_fixed(input, weight, bias, running_mean, running_var, momentum, eps)
        return y, None, None, running_mean, running_var
    over = (0, *range(2, input.ndim))
    y, mean, rstd = _standard(input, over, eps)
    w, b = (v if v is None else _spread(v, input.ndim) for v in (weight, bias))
    count = input.size // input.shape[1]
    # what is kept for later has no derivative
    var = jax.lax.stop_gradient(jnp.var(input, over)) * (count / max(1, count - 1))
    new_mean = running_mean * (1 - momentum) + momentum * jax.lax.stop_gradient(mean.reshape(-1))
    return _scale_shift(y, w, b), mean, rstd, new_mean, running_var * (1 - momentum) + momentum * var


# --------------------------------------------------------------------------------------------------------- losses


def _reduced(loss: Any, reduction: int) -> Any:
    return (lambda x: x, jnp.mean, jnp.sum)[reduction](loss)


def _nll(scores: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100) -> Any:
    return _weighted(scores, target, weight, reduction, ignore_index, 0.0)


def _weighted(
    logs: Any, target: Any, weight: Any, reduction: int, ignore_index: int, label_smoothing: float
) -> Any:  # fmt: skip
    """Weighted negative log likelihood; classes are dimension 1, of one row dimension 0."""
    axis = min(1, logs.ndim - 1)
    used = target != ignore_index
    at = jnp.where(used, target, 0)
    factor = used.astype(logs.dtype) if weight is None else jnp.where(used, weight[at], 0)
    loss = -jnp.squeeze(jnp.take_along_axis(logs, jnp.expand_dims(at, axis), axis), axis) * factor
    if label_smoothing:
        each = logs if weight is None else logs * weight.reshape(-1, *(1,) * (logs.ndim - 1 - axis))
        smooth = jnp.where(used, -jnp.sum(each, axis), 0) / logs.shape[axis]
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    return jnp.sum(loss) / jnp.sum(factor) if reduction == 1 else _reduced(loss, reduction)


def _cross_entropy(
    self: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    axis = min(1, self.ndim - 1)
    logs = jax.nn.log_softmax(self, axis)
    if not jnp.issubdtype(target.dtype, jnp.floating):
        return _weighted(logs, target, weight, reduction, ignore_index, label_smoothing)
    target = target * (1 - label_smoothing) + label_smoothing / self.shape[axis]
    each = logs if weight is None else logs * weight.reshape(-1, *(1,) * (self.ndim - 1 - axis))
    loss = -jnp.sum(each * target, axis)
    return jnp.sum(loss) / max(1, loss.size) if reduction == 1 else _reduced(loss, reduction)


def _binary_cross_entropy(
    self: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Any:
    log_weight = 1 if pos_weight is None else 1 + (pos_weight - 1) * target
    loss = (1 - target) * self + log_weight * jax.nn.softplus(-self)
    return _reduced(loss if weight is None else loss * weight, reduction)


def _smooth_l1(self: Any, target: Any, reduction: int = 1, beta: float = 1.0) -> Any:
    far = jnp.abs(self - target)
    if beta == 0:
        return _reduced(far, reduction)
    return _reduced(jnp.where(far < beta, 0.5 * far * far / beta, far - 0.5 * beta), reduction)


# ------------------------------------------------------------------------------------------------------ recurrent


def _lstm_cell(weights: list[Any], state: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
    w, u, *biases = weights
    hidden, cell = state
    gates = x @ w.T + hidden @ u.T + sum(biases)
    i, f, g, o = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def _gru_cell(weights: list[Any], state: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
    w, u, *biases = weights
    (hidden,) = state
    given, held = x @ w.T, hidden @ u.T
    if biases:
        given, held = given + biases[0], held + biases[1]
    (r, z, n), (s, y, m) = jnp.split(given, 3, -1), jnp.split(held, 3, -1)
    keep = jax.nn.sigmoid(z + y)
    return ((1 - keep) * jnp.tanh(n + jax.nn.sigmoid(r + s) * m) + keep * hidden,)


def _recurrent(cell: Callable[..., tuple[Any, ...]]) -> Handler:
    """A recurrent layer of ``num_layers``, both ways perhaps, with dropout between layers."""

    def run(
        draw: Draw | None, input: Any, hx: Any, params: list[Any], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        size, ways = (4 if has_biases else 2), (2 if bidirectional else 1)
        if len(params) != size * ways * num_layers:
            raise ValueError("recurrent layers with projections are not supported")
        x = jnp.swapaxes(input, 0, 1) if batch_first else input
        ends: list[tuple[Any, ...]] = []
        for layer in range(num_layers):
            if layer and dropout > 0 and train and draw is not None:
                # the mask is of the tensor as the layer has it, batch first or not
                x = (
                    jnp.swapaxes(draw(jnp.swapaxes(x, 0, 1), dropout, layer), 0, 1)
                    if batch_first
                    else draw(x, dropout, layer)
                )
            seen = []
            for way in range(ways):
                index = layer * ways + way
                weights = params[index * size : (index + 1) * size]

                def step(state: tuple[Any, ...], row: Any, w: list[Any] = weights) -> tuple[tuple[Any, ...], Any]:
                    new = cell(w, state, row)
                    return new, new[0]

                last, rows = jax.lax.scan(step, tuple(s[index] for s in states), x, reverse=bool(way))
                seen.append(rows)
                ends.append(last)
            x = jnp.concatenate(seen, -1)
        out = jnp.swapaxes(x, 0, 1) if batch_first else x
        return (out, *(jnp.stack(parts) for parts in zip(*ends)))

    return run


#: Given ``draw`` first.
RANDOM: dict[str, Handler] = {
    "ir.dropout": _dropout,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.lstm.input": _recurrent(_lstm_cell),
    "aten.gru.input": _recurrent(_gru_cell),
}
LAYERS: dict[str, Handler] = {
    "aten.matmul.default": lambda self, other: self @ other,
    "aten.bmm.default": lambda self, mat2: self @ mat2,
    "aten.outer.default": lambda self, vec2: self[:, None] * vec2,
    "aten.linear.default": _linear, "aten.addmm.default": _addmm, "aten.baddbmm.default": _baddbmm,
    "aten.layer_norm.default": _layer_norm, "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm, "aten.native_group_norm.default": _native_group_norm,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_fixed,
    "aten.nll_loss_nd.default": lambda self, target, weight=None, reduction=1, ignore_index=-100: _nll(
        self, target, weight, reduction, ignore_index
    ),
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.binary_cross_entropy_with_logits.default": _binary_cross_entropy,
    "aten.smooth_l1_loss.default": _smooth_l1,
    "aten.mse_loss.default": lambda self, target, reduction=1: _reduced((self - target) ** 2, reduction),
    "aten.l1_loss.default": lambda self, target, reduction=1: _reduced(jnp.abs(self - target), reduction),
}  # fmt: skip
