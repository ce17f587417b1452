"""What a few libraries must be asked for, so that export sees plain operators: switched on for the capture, then back.

Each entry names the model family, what stands in the way, and why the change computes the same. On the path before
torch.export; the user's module is left as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def portable(module: torch.nn.Module) -> Iterator[None]:
    """Within it, the module can be exported; outside nothing has changed."""
    with ExitStack() as stack:
        for enter in (_no_cache, _batched_experts, _plain_gelu, _no_mask_guessing, _named_loss):
            stack.enter_context(enter(module))
        yield


@contextmanager
def _no_cache(module: torch.nn.Module) -> Iterator[None]:
    """Hugging Face decoders return keys and values for generation, which a loss does not need."""
    config = getattr(module, "config", None)
    before = getattr(config, "use_cache", None)
    if not before:
        yield
        return
    config.use_cache = False  # type: ignore[union-attr]  # it has one
    try:
        yield
    finally:
        config.use_cache = before  # type: ignore[union-attr]


@contextmanager
def _batched_experts(module: torch.nn.Module) -> Iterator[None]:
    """Mixtures of experts: the default looks at how many tokens each expert got; ``batched_mm`` has fixed shapes.

    Same sums over the same experts. It gathers each token's expert weights, which takes memory.
    """
    changed: list[tuple[Any, Any]] = []
    for child in module.modules():
        child_any: Any = child
        if hasattr(type(child), "set_experts_implementation") and child_any._can_set_experts_implementation():
            changed.append((child_any, child_any.get_experts_implementation()))
            child_any.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        for child_any, before in reversed(changed):
            child_any.set_experts_implementation(before)


@contextmanager
def _plain_gelu(module: torch.nn.Module) -> Iterator[None]:
    """BLOOM writes the backward of its tanh GELU by hand; the derivative of its own forward formula is the same."""
    changed = [child for child in module.modules() if type(child).__name__ == "BloomGelu"]
    for child in changed:
        child.forward = sys.modules[type(child).__module__].bloom_gelu_forward
    try:
        yield
    finally:
        for child in changed:
            del child.forward


@contextmanager
def _no_mask_guessing(module: torch.nn.Module) -> Iterator[None]:
    """`torch.nn.Transformer` looks whether a mask's values are causal, to pick a kernel; the mask alone says it all."""
    from torch.nn.modules import transformer

    name = "_detect_is_causal_mask"
    before: Any = getattr(transformer, name, None)
    if before is None:
        yield
        return
    setattr(transformer, name, lambda mask, is_causal=None, size=None: bool(is_causal))
    try:
        yield
    finally:
        setattr(transformer, name, before)


@contextmanager
def _named_loss(module: torch.nn.Module) -> Iterator[None]:
    """transformers finds a loss by the class's name; where that names none (GPT2LMHeadModel), it warns and takes it."""
    changed: list[Any] = [child for child in module.modules() if getattr(child, "loss_type", "") is None]
    for child in changed:
        child.loss_type = "ForCausalLM"
    try:
        yield
    finally:
        for child in changed:
            child.loss_type = None
