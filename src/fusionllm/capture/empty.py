"""Models without their weights: parameters that have a shape and no memory, so that any size can be captured anywhere.

Buffers keep their values: they are small, and a model computes some of them (rotary frequencies) when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def is_empty(module: nn.Module) -> bool:
    """Whether some parameter of the module has no values."""
    return any(parameter.is_meta for parameter in module.parameters())


@contextmanager
def without_weights(
    on_register: Callable[[torch.Tensor, torch.Tensor], None] = lambda given, empty: None,
) -> Iterator[None]:
    """Modules built within it have parameters on the device ``meta``; tied ones stay one tensor.

    ``on_register`` is told of each, with what it was. A parameter's memory is asked for and given back untouched, one
    at a time, before anything is written into it.
    """
    held = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        held(self, name, param)
        if param is not None and not param.is_meta:
            kind: Any = type(param)
            empty = kind(param.detach().to("meta"), requires_grad=param.requires_grad)
            on_register(param, empty)
            self._parameters[name] = empty

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = held  # type: ignore[method-assign]


@contextmanager
def all_on_meta(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Within it, a module without weights has no values at all, since one graph cannot mix devices.

    Yields:
        The real buffers by name.
    """
    real: dict[str, torch.Tensor] = dict(module.named_buffers())
    places = [(child, name) for child in module.modules() for name, b in child._buffers.items() if b is not None]
    before = [child._buffers[name] for child, name in places]
    moved: dict[int, torch.Tensor] = {}
    for (child, name), buffer in zip(places, before):
        assert buffer is not None
        child._buffers[name] = moved.setdefault(id(buffer), buffer.to("meta"))
    try:
        yield real
    finally:
        for (child, name), buffer in zip(places, before):
            child._buffers[name] = buffer


def on_meta(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs by the same names, as shapes only."""
    return {name: tensor.to("meta") for name, tensor in inputs.items()}
