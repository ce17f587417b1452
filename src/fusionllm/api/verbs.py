"""The verbs `train` and `export`: what a person gives becomes a checked run. Torch is imported when it is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fusionllm.api.config import RunConfig, load_config
from fusionllm.api.options import tables_from_options
from fusionllm.api.run import Progress, Run, TrainResult
from fusionllm.errors import UserError
from fusionllm.store.checkpoint import load_checkpoint
from fusionllm.store.run_dir import RunDir

if TYPE_CHECKING:
    import torch


def train(
    model: torch.nn.Module | str | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    config: RunConfig | str | os.PathLike[str] | None = None,
    overrides: tuple[str, ...] = (),
    base_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> TrainResult:
    """Train a model across node processes or machines.

    Args:
        model: an ``nn.Module`` whose forward returns the loss (or has it as ``.loss``), or a source as in a TOML's
            ``model.source``, or that table. None: as the config says.
        data: a path, an id, the table of the TOML, a ``datasets.Dataset``, a list of texts, or a sequence of dicts
            of arrays. None: as the config says.
        config: a RunConfig or the path of a TOML.
        overrides: ``table.key=value`` texts on top of it.
        base_dir: what relative paths are relative to; the TOML's folder by default.
        progress: called with every event.
        **options: keys of the config by their own name (``steps=20``, ``nodes=2``, ``lr=1e-3``) or whole tables
            (``train={"steps": 20}``).

    Returns:
        TrainResult with the history and the trained model.

    Raises:
        UserError: something given cannot be used. FusionError: the run failed.

    Example:
        >>> result = fusionllm.train("gpt2", "book.txt", steps=100, nodes=2, lr=1e-3)
        >>> result.summary.val_loss
    """
    if not (model is None or isinstance(model, (str, Mapping)) or hasattr(model, "named_parameters")):
        raise UserError(f"model is a {type(model).__name__}; give an nn.Module, a source such as 'gpt2', or a table")
    path = None if config is None or isinstance(config, RunConfig) else Path(config)
    given = {"model": model, "data": data}
    options |= {table: value for table, value in given.items() if isinstance(value, Mapping)}
    data = None if isinstance(data, Mapping) else data
    tables = tables_from_options(options, RunConfig)
    if isinstance(config, RunConfig):
        base = msgspec.to_builtins(config)
        for table, values in tables.items():
            base[table] = {**base.get(table, {}), **values}
        tables = base
    if isinstance(model, str):
        tables.setdefault("model", {})["source"] = model
    if isinstance(data, (str, os.PathLike)):
        tables.setdefault("data", {})["source"] = os.fspath(data)
    resolved = load_config(path, overrides, tables)
    where = Path(base_dir or resolved.run.base_dir or (path.parent if path is not None else Path.cwd())).resolve()
    run = msgspec.structs.replace(resolved.run, base_dir=str(where))
    resolved = msgspec.structs.replace(resolved, run=run)
    module: Any = None if model is None or isinstance(model, (str, Mapping)) else model
    obj = None if data is None or isinstance(data, (str, os.PathLike)) else data
    return Run(resolved, where, module, obj, progress or (lambda event: None)).run()


def export(run: str | Path, folder: str | Path, *, step: int | None = None) -> Path:
    """Write a run's checkpoint as a Hugging Face folder. The run's data is not needed.

    Args:
        run: the run's folder. step: which checkpoint, None for the latest.

    Raises:
        UserError: no such run, a folder that is not empty, a model that is not from Hugging Face.
        CheckpointError: the checkpoint is damaged.
    """
    from fusionllm.api.weights import restore
    from fusionllm.capture.sources import resolve_model
    from fusionllm.capture.weights import export_hf

    path, out = Path(run).resolve(), Path(folder)
    run_dir = RunDir.open(path.parent, path.name)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a new folder")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; name a new folder")
    config = load_config(run_dir.config)
    base_dir = Path(config.run.base_dir)
    checkpoint = load_checkpoint(run_dir.checkpoints, step)
    module = resolve_model(config.model, base_dir=base_dir, seed=config.run.seed).module
    weights = {n: checkpoint.read_weight(n) for n in checkpoint.manifest.weights}
    restore(module, weights)
    tokenizer = base_dir / config.data.tokenizer
    export_hf(module, out, tokenizer if tokenizer.is_file() else None)
    return out
