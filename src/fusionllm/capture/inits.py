"""Reads off a model's constructor how each parameter begins, while the parameters have no memory to hold values.

Watches the operators that run on them: what `torch.nn.init`, ``reset_parameters`` and Hugging Face's ``_init_weights``
do comes down to a few, in place. What a constructor makes in another way is kept where it is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusionllm.capture.empty import without_weights
from fusionllm.errors import CaptureError
from fusionllm.ir.init import Init

#: Elements of a parameter up to which values that its constructor makes itself are kept.
MAX_KEPT = 1 << 16


class Inits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what happens to parameters without memory. ``of(module)`` says how they begin."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: dict[int, list[tuple[str, tuple[float, ...]]] | None] = {}
        self._zero_rows: dict[int, list[int]] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._shapes: dict[int, torch.Size] = {}
        self._unwritten: set[int] = set()  # memory that nothing was written into
        self._alive: list[torch.Tensor] = []  # so that no id of a parameter is given twice

    def registered(self, given: torch.Tensor, empty: torch.Tensor) -> None:
        """A parameter lost its memory: ``given`` is what it was."""
        key = _key(empty)
        self._alive.append(empty)
        self._shapes[key] = empty.shape
        self._steps[key] = None
        if given.numel() <= MAX_KEPT and _key(given) not in self._unwritten:
            self._kept[key] = given.detach().clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if isinstance(out, torch.Tensor) and not out.is_meta:
            (self._unwritten.add if name.startswith("empty") else self._unwritten.discard)(_key(out))
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                target = args[index] if index < len(args) else kwargs.get(argument.name)
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(target, torch.Tensor) and _key(target) in self._steps:
                    self._change(_key(target), name, target, self._numbers(func, args, kwargs))
        return out

    def truncated(self, tensor: torch.Tensor, mean: float, std: float, low: float, high: float) -> None:
        """``trunc_normal_``, of which nothing is to be seen without memory, by the inverse of its distribution."""
        ends = [math.erf((end - mean) / (std * math.sqrt(2.0))) for end in (low, high)]
        self._change(_key(tensor), "uniform_", tensor, ends)
        for name, numbers in (
            ("erfinv_", []), ("mul_", [std * math.sqrt(2.0)]), ("add_", [mean]), ("clamp_", [low, high])
        ):  # fmt: skip
            self._change(_key(tensor), name, tensor, numbers)

    @staticmethod
    def _numbers(func: Any, args: Any, kwargs: Any) -> list[float] | None:
        """The numbers of a call in the order of its schema, with defaults; None when something else is among them."""
        numbers = []
        for index, argument in enumerate(func._schema.arguments[1:], 1):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                if argument.name in ("generator",) or value is None:
                    continue
                return None
            numbers.append(float(value))
        return numbers

    def _change(self, key: int, name: str, target: torch.Tensor, numbers: list[float] | None) -> None:
        if key not in self._steps:
            return
        shape = self._shapes[key]
        if target.numel() != shape.numel():
            is_row = target.is_contiguous() and len(shape) > 1 and target.numel() == shape[1:].numel()
            if is_row and (name == "zero_" or (name == "fill_" and numbers == [0.0])):
                self._zero_rows.setdefault(key, []).append(target.storage_offset() // target.numel())
            else:
                self._lose(key)
            return
        step = _step(name, numbers)
        steps = self._steps[key]
        if step is not None and step[0] in ("constant", "normal", "uniform"):
            self._steps[key] = [step]
            self._zero_rows.pop(key, None)
            self._kept.pop(key, None)
        elif step is not None and steps:
            steps.append(step)
        else:
            self._lose(key)

    def _lose(self, key: int) -> None:
        self._steps[key] = None
        self._kept.pop(key, None)

    def of(self, module: nn.Module) -> tuple[dict[str, Init], dict[str, torch.Tensor]]:
        """(how parameters begin, values of those whose constructor made them), by canonical name.

        Raises:
            CaptureError: a parameter of which neither is known.
        """
        inits: dict[str, Init] = {}
        values: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            key = _key(parameter)
            steps = self._steps.get(key)
            if steps:
                inits[name] = Init(tuple(steps), tuple(self._zero_rows.get(key, ())))
            elif key in self._kept:
                values[name] = self._kept[key]
            else:
                raise CaptureError(
                    f"how parameter {name!r} begins cannot be told from the model's constructor; initialise it with "
                    "torch.nn.init, or build the model whole (model.lazy = false)"
                )
        return inits, values


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _step(name: str, numbers: list[float] | None) -> tuple[str, tuple[float, ...]] | None:
    if name == "zero_":
        return "constant", (0.0,)
    if numbers is None or not all(math.isfinite(number) for number in numbers):
        return None
    kinds = {
        "fill_": ("constant", 1), "normal_": ("normal", 2), "uniform_": ("uniform", 2), "erfinv_": ("erfinv", 0),
        "mul_": ("mul", 1), "clamp_": ("clamp", 2),
    }  # fmt: skip
    if name == "add_" and numbers and numbers[1:] in ([], [1.0]):
        return "add", (numbers[0],)
    if name == "div_" and len(numbers) == 1 and numbers[0]:
        return "mul", (1.0 / numbers[0],)
    kind = kinds.get(name)
    return (kind[0], tuple(numbers)) if kind is not None and len(numbers) == kind[1] else None


@contextmanager
def recorded() -> Iterator[Inits]:
    """Within it, modules are built without weights, and how those begin is recorded."""
    inits, held = Inits(), torch.nn.init._no_grad_trunc_normal_

    def trunc_normal(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        if not tensor.is_meta:
            return held(tensor, mean, std, a, b, generator)
        inits.truncated(tensor, mean, std, a, b)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        with without_weights(inits.registered), inits:
            yield inits
    finally:
        torch.nn.init._no_grad_trunc_normal_ = held
