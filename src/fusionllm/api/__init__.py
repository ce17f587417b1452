"""The verbs a person uses from Python: `train`, `capture`, `export`. Everything here may import all rooms below.

A verb is imported on first use: what only reads a configuration needs no tensor framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fusionllm.api.config import RunConfig, load_config

_HOMES = {
    "TrainResult": ("fusionllm.api.verbs", "TrainResult"),
    "train": ("fusionllm.api.verbs", "train"),
    "capture": ("fusionllm.capture.export", "capture_module"),
    "export": ("fusionllm.api.verbs", "export"),
}

__all__ = ["RunConfig", "TrainResult", "capture", "export", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fusionllm.api' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
