"""`capture` and `export`: a model as a graph, and a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fusionllm.api.config import load_config
from fusionllm.capture.export import Captured, capture_module
from fusionllm.capture.sources import resolve_model
from fusionllm.capture.weights import export_hf, write_back
from fusionllm.compute import tensor_from_buffer
from fusionllm.errors import UserError
from fusionllm.store.checkpoint import load_checkpoint
from fusionllm.store.run_dir import RunDir


def capture(module: torch.nn.Module, example_inputs: dict[str, torch.Tensor], *, mode: Any = "train") -> Captured:
    """Capture a module as an OpGraph with its tensors.

    Args:
        example_inputs: by the names of the module's forward, batch of at least 2.

    Raises:
        CaptureError: names the operator, the source line and the way out.
    """
    return capture_module(module, example_inputs, mode=mode)


def export(run: str | Path, folder: str | Path, *, step: int | None = None) -> Path:
    """Write a run's checkpoint as a Hugging Face folder. The run's data is not needed.

    Args:
        run: the run's folder. step: which checkpoint, None for the latest.

    Raises:
        UserError: no such run, a folder that is not empty, a model that is not from Hugging Face.
        CheckpointError: the checkpoint is damaged.
    """
    path, out = Path(run).resolve(), Path(folder)
    run_dir = RunDir.open(path.parent, path.name)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; name a new folder")
    config = load_config(run_dir.config)
    base_dir = Path(config.run.base_dir)
    checkpoint = load_checkpoint(run_dir.checkpoints, step)
    module = resolve_model(config.model, base_dir=base_dir, seed=config.run.seed).module
    weights = {n: checkpoint.read_weight(n) for n in checkpoint.manifest.weights}
    write_back(module, {n: tensor_from_buffer(b.data, b.dtype, b.shape) for n, b in weights.items()})
    module.eval()
    tokenizer = base_dir / config.data.tokenizer
    export_hf(module, out, tokenizer if tokenizer.is_file() else None)
    return out
