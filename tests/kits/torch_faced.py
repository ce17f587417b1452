"""A stage of any backend that takes and gives torch tensors, so that one kit can ask all of them the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusionllm.compute import load_backend
from fusionllm.compute.stage import Stage, dtype_name


class TorchFaced:
    """As `Stage`; every array that goes in or comes out travels as bytes, as between two nodes."""

    def __init__(self, backend: str, *args: Any, **kwargs: Any) -> None:
        self._own, self._torch = load_backend(backend), load_backend("torch")
        self._stage = Stage(backend, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stage, name)
        return (lambda *a, **k: self._out(method(*map(self._in, a), **k))) if callable(method) else method

    def _in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            data = bytearray(self._torch.to_bytes(value))
            return self._own.from_buffer(data, dtype_name(value), tuple(value.shape))
        if isinstance(value, Mapping):
            return {key: self._in(v) for key, v in value.items()}
        return [self._in(v) for v in value] if isinstance(value, list) else value

    def _out(self, value: Any) -> Any:
        if hasattr(value, "shape"):
            data = bytearray(self._own.to_bytes(value))
            return self._torch.from_buffer(data, dtype_name(value), tuple(value.shape))
        if isinstance(value, dict):
            return {key: self._out(v) for key, v in value.items()}
        return tuple(self._out(v) for v in value) if isinstance(value, tuple) else value
