"""Arithmetic on sizes (``sym.*``): plain numbers on every backend, so one table for all."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

_FUNCTIONS: dict[str, Callable[..., Any]] = {
        "size": lambda x, dim: x.shape[dim], "neg": operator.neg, "float": float, "int": int, "not": operator.not_,
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
        "truediv": operator.truediv, "mod": operator.mod, "eq": operator.eq, "ne": operator.ne, "ge": operator.ge,
        "le": operator.le, "gt": operator.gt, "lt": operator.lt, "max": max, "min": min,
        "and": lambda a, b: a and b,
}  # fmt: skip
SIZES = {f"sym.{name}": function for name, function in _FUNCTIONS.items()}
