"""Tensor types: dtypes and shapes with symbolic dimensions, as data.

The ground of the IR: knows no framework and no graph. A shape's dimension is an ``int`` or the text of an integer
expression over named symbols (``"B"``, ``"B*64"``), so that one graph serves every batch size, a last short batch too.
Expressions are read by a whitelist over Python's own parser; nothing is ever evaluated as code.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec

from fusionllm.errors import GraphError

#: Bytes per element of every dtype the IR may name (``"int"``, ``"float"``, ``"boolean"`` are scalars, not tensors).
DTYPES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
SCALARS = ("int", "float", "boolean")
FLOATS = ("float64", "float32", "float16", "bfloat16")

Dim = int | str

_MAX_EXPR_CHARS = 400
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_CALLS: dict[str, Callable[[list[int]], int]] = {
    "Max": max, "Min": min,
    "FloorDiv": lambda a: a[0] // a[1], "CeilDiv": lambda a: -(-a[0] // a[1]), "Mod": lambda a: a[0] % a[1],
    "floor": lambda a: a[0], "ceiling": lambda a: a[0],
}  # fmt: skip


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    if len(text) > _MAX_EXPR_CHARS:
        raise GraphError(f"dimension of {len(text)} characters, the limit is {_MAX_EXPR_CHARS}")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise GraphError(f"dimension {text!r} is not an integer expression") from None


def _walk(node: ast.expr, text: str, symbols: Mapping[str, int] | None, names: set[str]) -> int:
    """Value of an expression (symbols given), or just a check and the set of names (``symbols`` None: value is 1)."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        names.add(node.id)
        if symbols is None:
            return 1
        if node.id not in symbols:
            raise GraphError(f"dimension {text!r} needs symbol {node.id!r}; known: {', '.join(sorted(symbols))}")
        return symbols[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_walk(node.operand, text, symbols, names)
    try:
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = _walk(node.left, text, symbols, names), _walk(node.right, text, symbols, names)
            return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
            if node.args and not node.keywords:
                return _CALLS[node.func.id]([_walk(a, text, symbols, names) for a in node.args])
    except (ZeroDivisionError, IndexError):
        if symbols is None:
            return 1
        raise GraphError(f"dimension {text!r} cannot be evaluated with {dict(symbols)}") from None
    raise GraphError(f"dimension {text!r} holds something other than integers, symbols and + - * // %")


def dim_symbols(dim: Dim) -> set[str]:
    """Names of the symbols a dimension depends on. Raises GraphError when it is not an integer expression."""
    names: set[str] = set()
    if isinstance(dim, str):
        _walk(_parse(dim), dim, None, names)
    return names


def eval_dim(dim: Dim, symbols: Mapping[str, int]) -> int:
    """Value of a dimension for given symbols. Raises GraphError for an unknown symbol or a forbidden expression."""
    return dim if isinstance(dim, int) else _walk(_parse(dim), dim, symbols, set())


def bind_batch(dims: tuple[Dim, ...], shape: tuple[int, ...], symbols: Mapping[str, int]) -> dict[str, int]:
    """Values of the symbolic sizes that make ``dims`` equal ``shape``, where a dimension is a symbol by itself.

    A symbol that never stands alone (``B*64``) is solved for by dividing by the dimension's value at 1; the caller
    evaluates the dimensions with the result and compares. Raises GraphError when a symbol stays unknown.
    """
    found: dict[str, int] = {}
    for dim, size in zip(dims, shape):
        if isinstance(dim, str) and dim in symbols:
            found[dim] = size
    for dim, size in zip(dims, shape):
        missing = dim_symbols(dim) - found.keys()
        if len(missing) == 1 and 0 < size <= 1 << 40:
            name = next(iter(missing))
            unit = eval_dim(dim, {**found, name: 1})
            if unit > 0:
                found[name] = size // unit
    if any(dim_symbols(dim) - found.keys() for dim in dims):
        raise GraphError(f"shape {list(shape)} does not fit {list(dims)}")
    return found


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Dtype and shape of one value. Written as ``["float32", ["B", 64, 384]]``.

    Attributes:
        dtype: a name of ``DTYPES`` for a tensor, or of ``SCALARS`` for a Python number computed in the graph.
        shape: one dimension per axis, outermost first; empty for a 0-d tensor or a scalar.
    """

    dtype: str
    shape: tuple[Dim, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return self.dtype in DTYPES

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def concrete(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in integers."""
        return tuple(eval_dim(d, symbols) for d in self.shape)

    def numel(self, symbols: Mapping[str, int]) -> int:
        return math.prod(self.concrete(symbols))

    def num_bytes(self, symbols: Mapping[str, int]) -> int:
        """Bytes of the dense value; 0 for a scalar, which never leaves a stage as a tensor."""
        return self.numel(symbols) * DTYPES[self.dtype] if self.is_tensor else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) for d in self.shape)}]"
