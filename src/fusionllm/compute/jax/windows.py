"""Convolutions, pooling and resizing, in jax.lax. Images are [N, C, ...] as torch has them, N may be missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fusionllm.compute.jax.elementwise import Handler

_NAMES = {1: ("NCH", "OIH", "NCH"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NCDHW", "OIDHW", "NCDHW")}


def _each(value: Any, rank: int) -> list[int]:
    """One number per spatial dimension, from one for all or one each."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * rank if len(values) == 1 else values


def _conv(rank: int) -> Handler:
    def run(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Any:  # fmt: skip
        x = input if input.ndim == rank + 2 else input[None]
        y = lax.conv_general_dilated(
            x, weight, _each(stride, rank), [(p, p) for p in _each(padding, rank)],
            rhs_dilation=_each(dilation, rank), feature_group_count=groups, dimension_numbers=_NAMES[rank],
        )  # fmt: skip
        y = y if bias is None else y + bias.reshape(1, -1, *(1,) * rank)
        return y if input.ndim == rank + 2 else y[0]

    return run


def _conv_transpose2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
    groups: int = 1, dilation: Any = 1,
) -> Any:  # fmt: skip
    x = input if input.ndim == 4 else input[None]
    strides, pads, more, steps = (_each(v, 2) for v in (stride, padding, output_padding, dilation))
    channels, per_group, *sizes = weight.shape
    # the derivative of a convolution: the kernel turned round, its inputs and outputs swapped within each group
    kernel = weight.reshape(groups, channels // groups, per_group, *sizes).swapaxes(1, 2)
    kernel = kernel.reshape(groups * per_group, channels // groups, *sizes)[:, :, ::-1, ::-1]
    reach = [s * (k - 1) for s, k in zip(steps, sizes)]
    y = lax.conv_general_dilated(
        x, kernel, (1, 1), [(r - p, r - p + m) for r, p, m in zip(reach, pads, more)], lhs_dilation=strides,
        rhs_dilation=steps, feature_group_count=groups, dimension_numbers=_NAMES[2],
    )  # fmt: skip
    y = y if bias is None else y + bias[None, :, None, None]
    return y if input.ndim == 4 else y[0]


def _ends(size: int, kernel: int, stride: int, pad: int, step: int, ceil_mode: bool) -> tuple[int, int]:
    """Padding before and after, such that the windows are those of torch."""
    reach = step * (kernel - 1) + 1
    span = size + 2 * pad - reach
    count = (-(-span // stride) if ceil_mode else span // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + pad:  # the last window would start in the padding
        count -= 1
    return pad, max(0, (count - 1) * stride + reach - size - pad)


def _window(x: Any, kernel: Sequence[int], stride: Sequence[int]) -> dict[str, Any]:
    lead = (1,) * (x.ndim - 2)
    return {"window_dimensions": (*lead, *kernel), "window_strides": (*lead, *stride)}


def _max_pool2d(
    self: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    kernel, pads, steps = _each(kernel_size, 2), _each(padding, 2), _each(dilation, 2)
    strides = _each(stride, 2) if stride else kernel
    if max(steps) > 1:
        raise ValueError("max_pool2d with dilation has no derivative here")
    ends = [_ends(*each, ceil_mode) for each in zip(self.shape[-2:], kernel, strides, pads, steps)]
    padding = [(0, 0)] * (self.ndim - 2) + ends
    return lax.reduce_window(self, -jnp.inf, lax.max, padding=padding, **_window(self, kernel, strides))


def _avg_pool2d(
    self: Any, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    kernel, pads = _each(kernel_size, 2), _each(padding, 2)
    strides = _each(stride, 2) if stride else kernel
    ends = [_ends(*each, 1, ceil_mode) for each in zip(self.shape[-2:], kernel, strides, pads)]
    window = _window(self, kernel, strides)
    lead = [(0, 0)] * (self.ndim - 2)
    total = lax.reduce_window(self, 0.0, lax.add, padding=lead + ends, **window)
    if divisor_override is not None:
        return total / divisor_override
    counted = jnp.ones((1,) * (self.ndim - 2) + self.shape[-2:], self.dtype)
    if count_include_pad:  # but what ceil_mode adds never counts
        counted = jnp.pad(counted, lead + [(p, p) for p in pads], constant_values=1)
        ends = [(0, max(0, high - p)) for (_, high), p in zip(ends, pads)]
    return total / lax.reduce_window(counted, 0.0, lax.add, padding=lead + ends, **window)


def _apply(x: Any, axis: int, matrix: np.ndarray) -> Any:
    """Each line along an axis times a matrix [new size, old size]."""
    return jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ jnp.asarray(matrix.T, x.dtype), -1, axis)


def _means(size: int, count: int) -> np.ndarray:
    """``count`` means over nearly equal parts of ``size``, as torch parts them."""
    matrix = np.zeros((count, size))
    for row in range(count):
        first, end = row * size // count, -(-(row + 1) * size // count)
        matrix[row, first:end] = 1 / (end - first)
    return matrix


def _adaptive(rank: int) -> Handler:
    def run(self: Any, output_size: Any) -> Any:
        counts = _each(output_size, rank)
        if set(counts) == {1}:
            return jnp.mean(self, tuple(range(-rank, 0)), keepdims=True)
        for axis, count in zip(range(-rank, 0), counts):
            if count is not None and count != self.shape[axis]:
                self = _apply(self, axis, _means(self.shape[axis], count))
        return self

    return run


def _sizes(x: Any, output_size: Any, scales: Any) -> list[tuple[int, float]]:
    """(new size, old steps per new step) of height and width."""
    olds = x.shape[-2:]
    if output_size is not None:
        return [(int(new), old / int(new)) for new, old in zip(output_size, olds)]
    return [(math.floor(old * scale), 1 / scale) for old, scale in zip(olds, scales)]


def _nearest(input: Any, output_size: Any = None, scale_factors: Any = None) -> Any:
    for axis, (new, ratio) in zip((-2, -1), _sizes(input, output_size, scale_factors)):
        at = np.minimum(np.floor(np.arange(new) * ratio).astype(np.int64), input.shape[axis] - 1)
        input = jnp.take(input, at, axis)
    return input


def _bilinear(input: Any, output_size: Any, align_corners: bool, scale_factors: Any = None) -> Any:
    for axis, (new, ratio) in zip((-2, -1), _sizes(input, output_size, scale_factors)):
        old = input.shape[axis]
        if align_corners:
            at = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0.0)
        else:
            at = np.maximum((np.arange(new) + 0.5) * ratio - 0.5, 0)
        low = np.minimum(np.floor(at).astype(np.int64), old - 1)
        high = np.minimum(low + 1, old - 1)
        matrix = np.zeros((new, old))
        np.add.at(matrix, (np.arange(new), low), 1 - (at - low))
        np.add.at(matrix, (np.arange(new), high), at - low)
        input = _apply(input, axis, matrix)
    return input


WINDOWS: dict[str, Handler] = {
    **{f"aten.conv{rank}d.default": _conv(rank) for rank in (1, 2, 3)},
    "aten.conv_transpose2d.input": _conv_transpose2d,
    "aten.max_pool2d.default": _max_pool2d, "aten.avg_pool2d.default": _avg_pool2d,
    "aten.adaptive_avg_pool1d.default": _adaptive(1), "aten.adaptive_avg_pool2d.default": _adaptive(2),
    "aten.upsample_nearest2d.vec": _nearest, "aten.upsample_bilinear2d.vec": _bilinear,
}  # fmt: skip
