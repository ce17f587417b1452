"""Operators that move numbers: shapes, slices, gather and scatter, and tensors out of nothing, in jax.numpy."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fusionllm.compute.jax.elementwise import Handler


def _along(dim: int, *where: Any) -> tuple[Any, ...]:
    """An index into dimension ``dim``, at least 0, of what all the others are whole."""
    return (*(slice(None),) * dim, *where)


def _slice(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return self[_along(dim % self.ndim, slice(start, end, step))]


def _expand(self: Any, size: list[int], implicit: bool = False) -> Any:
    added = len(size) - self.ndim
    return jnp.broadcast_to(self, [self.shape[i - added] if s == -1 else s for i, s in enumerate(size)])


def _split(self: Any, split_size: int, dim: int = 0) -> list[Any]:
    return [_slice(self, dim, at, at + split_size) for at in range(0, max(1, self.shape[dim]), max(1, split_size))]


def _split_sizes(self: Any, split_sizes: list[int], dim: int = 0) -> list[Any]:
    ends = [sum(split_sizes[: i + 1]) for i in range(len(split_sizes))]
    return [_slice(self, dim, end - size, end) for size, end in zip(split_sizes, ends)]


def _flatten(self: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if self.ndim == 0:
        return self.reshape(1)
    first, last = start_dim % self.ndim, end_dim % self.ndim
    middle = math.prod(self.shape[first : last + 1])
    return self.reshape(*self.shape[:first], middle, *self.shape[last + 1 :])


def _unflatten(self: Any, dim: int, sizes: list[int]) -> Any:
    dim %= self.ndim
    known = math.prod(s for s in sizes if s != -1)
    sizes = [self.shape[dim] // known if s == -1 else s for s in sizes]
    return self.reshape(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])


def _repeat_interleave(self: Any, repeats: int, dim: int | None = None, output_size: int | None = None) -> Any:
    return jnp.repeat(self.reshape(-1) if dim is None else self, repeats, 0 if dim is None else dim)


def _roll(self: Any, shifts: Any, dims: Any = ()) -> Any:
    if not dims:
        return jnp.roll(self.reshape(-1), shifts[0] if isinstance(shifts, list) else shifts).reshape(self.shape)
    return jnp.roll(self, shifts, dims)


def _pad(self: Any, pad: list[int], mode: str = "constant", value: Any = None) -> Any:
    widths = [(0, 0, 0)] * self.ndim
    for index in range(len(pad) // 2):
        widths[-1 - index] = (pad[2 * index], pad[2 * index + 1], 0)
    if mode == "constant":
        return jax.lax.pad(self, jnp.asarray(value or 0, self.dtype), widths)
    name = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode]
    return jnp.pad(self, [(low, high) for low, high, _ in widths], mode=name)


def _slice_scatter(self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return self.at[_along(dim % self.ndim, slice(start, end, step))].set(src)


def _indices(indices: list[Any]) -> tuple[Any, ...]:
    if any(i is not None and i.dtype == jnp.bool_ for i in indices):
        raise ValueError("an index by a mask has as many results as the mask has ones, which a compiler cannot know")
    return tuple(slice(None) if i is None else i for i in indices)


def _index_put(self: Any, indices: list[Any], values: Any, accumulate: bool = False) -> Any:
    place = self.at[_indices(indices)]
    return place.add(values) if accumulate else place.set(values)


def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if scale_grad_by_freq:
        raise ValueError("scale_grad_by_freq is not supported")
    # an index past the table would silently be its last row
    rows = weight.at[indices].get(mode="fill", fill_value=jnp.nan)
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


def _gather(self: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    dim %= max(1, self.ndim)
    whole = tuple(slice(None) if d == dim else slice(size) for d, size in enumerate(index.shape))
    return jnp.take_along_axis(self[whole], index, dim)


def _places(index: Any, dim: int) -> tuple[Any, ...]:
    """Where each element of ``index`` points: its own place but for ``dim``."""
    own = jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij", sparse=True)
    return tuple(index if d == dim % index.ndim else place for d, place in enumerate(own))


def _scatter(self: Any, dim: int, index: Any, src: Any) -> Any:
    return self.at[_places(index, dim)].set(src[tuple(map(slice, index.shape))])


def _scatter_value(self: Any, dim: int, index: Any, value: Any) -> Any:
    return self.at[_places(index, dim)].set(value)


def _scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    return self.at[_places(index, dim)].add(src[tuple(map(slice, index.shape))])


def _index_add(self: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    return self.at[_along(dim % self.ndim, index)].add(source if alpha == 1 else alpha * source)


def _sort(self: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    at = jnp.argsort(self, dim, descending=descending)
    return jnp.take_along_axis(self, at, dim), at


def _topk(self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Any, Any]:
    values, at = _sort(self, dim, largest)
    return _slice(values, dim, 0, k), _slice(at, dim, 0, k)


def _diff(self: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    return jnp.diff(self, n, dim, prepend, append)


def _start(start: Any, end: Any, step: Any = 1, dtype: Any = None) -> Any:
    return jnp.arange(start, end, step, dtype=dtype)


def _full(size: list[int], fill_value: Any, dtype: Any = None) -> Any:
    return jnp.full(size, fill_value, dtype)


def _full_like(self: Any, fill_value: Any, dtype: Any = None) -> Any:
    return jnp.full(self.shape, fill_value, dtype or self.dtype)


def _new_full(self: Any, size: list[int], fill_value: Any, dtype: Any = None) -> Any:
    return jnp.full(size, fill_value, dtype or self.dtype)


def _filled(value: int) -> tuple[Handler, Handler, Handler]:
    return (
        lambda size, dtype=None: jnp.full(size, value, dtype or jnp.float32),
        lambda self, dtype=None: _full_like(self, value, dtype),
        lambda self, size, dtype=None: _new_full(self, size, value, dtype),
    )


def _broadcast_of(self: Any, value: Any) -> Any:
    return jnp.broadcast_to(jnp.asarray(value, self.dtype), self.shape)


MOVES: dict[str, Handler] = {
    "aten.cat.default": lambda tensors, dim=0: jnp.concatenate(tensors, dim),
    "aten.stack.default": lambda tensors, dim=0: jnp.stack(tensors, dim),
    "aten.chunk.default": lambda self, chunks, dim=0: _split(self, -(-self.shape[dim] // chunks), dim),
    "aten.split.Tensor": _split, "aten.split_with_sizes.default": _split_sizes,
    "aten.unbind.int": lambda self, dim=0: [self[_along(dim % self.ndim, i)] for i in range(self.shape[dim])],
    "aten.reshape.default": lambda self, shape: self.reshape(shape),
    "aten.flatten.using_ints": _flatten, "aten.unflatten.int": _unflatten,
    "aten.permute.default": lambda self, dims: self.transpose(dims),
    "aten.transpose.int": lambda self, dim0, dim1: jnp.swapaxes(self, dim0, dim1),
    "aten.movedim.int": lambda self, source, destination: jnp.moveaxis(self, source, destination),
    "aten.unsqueeze.default": lambda self, dim: jnp.expand_dims(self, dim),
    "aten.squeeze.dim": lambda self, dim: jnp.squeeze(self, dim) if self.shape[dim] == 1 else self,
    "aten.expand.default": _expand,
    "aten.repeat.default": lambda self, repeats: jnp.tile(self, repeats),
    "aten.repeat_interleave.self_int": _repeat_interleave, "aten.roll.default": _roll,
    "aten.narrow.default": lambda self, dim, start, length: _slice(self, dim, start, start + length),
    "aten.slice.Tensor": _slice,
    "aten.select.int": lambda self, dim, index: self[_along(dim % self.ndim, index)],
    "aten.pad.default": _pad, "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": lambda self, src, dim, index: self.at[_along(dim % self.ndim, index)].set(src),
    "aten.copy.default": lambda self, src: jnp.broadcast_to(src.astype(self.dtype), self.shape),
    "aten.tril.default": lambda self, diagonal=0: jnp.tril(self, diagonal),
    "aten.triu.default": lambda self, diagonal=0: jnp.triu(self, diagonal),
    "aten.type_as.default": lambda self, other: self.astype(other.dtype),
    "aten.embedding.default": _embedding, "aten.gather.default": _gather,
    "aten.index.Tensor": lambda self, indices: self[_indices(indices)],
    "aten.index_select.default": lambda self, dim, index: self[_along(dim % self.ndim, index)],
    "aten.index_add.default": _index_add, "aten.index_put.default": _index_put, "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter_value, "aten.scatter_add.default": _scatter_add,
    "aten.sort.default": _sort, "aten.topk.default": _topk, "aten.diff.default": _diff,
    "aten.argsort.default": lambda self, dim=-1, descending=False: jnp.argsort(self, dim, descending=descending),
    "aten.arange.default": lambda end, dtype=None: jnp.arange(end, dtype=dtype),
    "aten.arange.start": _start, "aten.arange.start_step": _start,
    "aten.full.default": _full, "aten.full_like.default": _full_like, "aten.new_full.default": _new_full,
    "aten.scalar_tensor.default": lambda s, dtype=None: jnp.asarray(s, dtype or jnp.float32),
    "aten.fill.Scalar": _broadcast_of, "aten.fill.Tensor": _broadcast_of,
}  # fmt: skip
for _name, _value in (("zeros", 0), ("ones", 1)):
    _sized, _like, _new = _filled(_value)
    MOVES |= {
        f"aten.{_name}.default": _sized, f"aten.{_name}_like.default": _like, f"aten.new_{_name}.default": _new,
    }  # fmt: skip
