"""FusionLLM: train any PyTorch model across scattered, unequal machines joined by slow links.

The path data takes: ``nn.Module`` -capture-> OpGraph -estimate-> CostTable -schedule-> Plan -schedule-> StageProgram
-protocol-> Command/Event -compute-> Tensor -compress-> Payload -protocol-> Frame -transport-> bytes.

The verbs (``fusionllm.train``, ``fusionllm.export``) live in ``fusionllm.api`` and load on first use, so that importing
the package, and running a broker or a node, costs no tensor framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "export", "train"]

_VERBS = ("export", "train")


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module("fusionllm.api"), name)
    raise AttributeError(f"module 'fusionllm' has no attribute {name!r}")
