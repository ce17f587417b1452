"""Trained tensors back into the user's module, and the module into a Hugging Face folder."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from fusionllm.capture.bottleneck import is_open, plan_of, save_with_bottlenecks, without_bottlenecks
from fusionllm.errors import CheckpointError, UserError


def write_back(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors by name into the module's parameters and buffers; a tied one is given once, a frozen one may lack.

    Raises:
        CheckpointError: a trained parameter is missing, or one has another shape.
    """
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    written: set[int] = set()
    with torch.no_grad():
        for name, tensor in tensors.items():
            target = own.get(name)
            if target is None or target.shape != tensor.shape:
                shape = "no such tensor" if target is None else f"shape {list(target.shape)}"
                raise CheckpointError(f"tensor {name!r} of shape {list(tensor.shape)} does not fit the model ({shape})")
            target.copy_(tensor)
            written.add(id(target))
    missing = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in written]
    if missing:
        raise CheckpointError(f"{len(missing)} parameters got no value, e.g. {missing[0]}")


@contextmanager
def _for_use(module: Any) -> Iterator[None]:
    """With the cache that generation lives on, which training did without."""
    both: list[Any] = [module.config, getattr(module, "generation_config", None)]
    configs = [config for config in both if hasattr(config, "use_cache")]
    before = [c.use_cache for c in configs]
    for config in configs:
        config.use_cache = True
    try:
        yield
    finally:
        for config, value in zip(configs, before):
            config.use_cache = value


def check_hf(module: torch.nn.Module) -> None:
    """Raises UserError for a module that is not a Hugging Face model."""
    if getattr(module, "save_pretrained", None) is None:
        raise UserError(
            f"{type(module).__name__} is not a Hugging Face model, so no such folder can be written; its tensors lie "
            "by name in the run's checkpoints/*/ as safetensors, and fusionllm.train(...).model is the trained module"
        )


def export_hf(module: torch.nn.Module, folder: Path) -> None:
    """Write a Hugging Face folder; low-rank cuts that are still at work bring their own modelling file.

    Raises UserError for a module that is not a Hugging Face model.
    """
    check_hf(module)
    plan = plan_of(module)
    if plan is not None and plan["kind"] == "learned" and not is_open(module):
        save_with_bottlenecks(module, folder)
    else:
        plain: Any = without_bottlenecks(module)
        with _for_use(plain):
            plain.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # as the files beside it; its writer keeps it to itself


def export_config(module: torch.nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """What a Hugging Face folder has beside its weights. The module needs none, and is left as it was.

    Raises UserError for a module that is not a Hugging Face model.
    """
    check_hf(module)
    model: Any = module
    with _for_use(model):
        made = copy.deepcopy(model.config)
        made.architectures, made.dtype = [type(model).__name__], dtype
        made.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


def export_tokenizer(text: bytes, folder: Path, eos: str | None) -> None:
    """Write a tokenizer's JSON as a Hugging Face folder has it."""
    (folder / "tokenizer.json").write_bytes(text)
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast
    with suppress(Exception):  # of an unusual one: then its JSON stands alone
        made(tokenizer_file=str(folder / "tokenizer.json"), eos_token=eos).save_pretrained(folder)
