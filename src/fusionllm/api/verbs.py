"""The verbs `train` and `export`: what a person gives becomes a checked run. Torch is imported when it is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fusionllm.api.config import RunConfig, RunTable, load_config
from fusionllm.api.options import tables_from_options
from fusionllm.api.run import Progress, Run, TrainResult
from fusionllm.errors import FusionError, UserError
from fusionllm.store.checkpoint import load_checkpoint
from fusionllm.store.run_dir import RunDir
from fusionllm.store.tensorfile import Reading
from fusionllm.store.tokens import EOS_NAMES, tokenizer_json
from fusionllm.store.weights import write_folder
from fusionllm.telemetry.events import Note

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
    if isinstance(config, Mapping):
        raise UserError(
            "config is a table; it is the path of a run's TOML. A model's own config goes with its source: "
            'model={"source": "gpt2", "config": {"n_layer": 2}}'
        )
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
    tell = progress or (lambda event: None)
    for left in range(resolved.cluster.max_restarts, -1, -1):
        attempt = Run(resolved, where, module, obj, tell)
        try:
            return attempt.run()
        except FusionError as error:
            if not (left and attempt.broken):
                raise
            tell(Note(step=0, kind="restart", text=f"{error}; going on from the latest checkpoint"))
            run = msgspec.structs.replace(run, name=attempt.broken, resume=True)
            resolved = msgspec.structs.replace(resolved, run=run)
    raise AssertionError("unreachable: the last attempt returns or raises")


def export(run: str | Path, folder: str | Path, *, step: int | None = None) -> Path:
    """Write a run's checkpoint as a Hugging Face folder. The run's data is not needed.

    Of a run with ``model.lazy`` one tensor is in memory at a time, whatever the model's size, unless parameters are
    frozen: those lie in no checkpoint, and the model is built to have them.

    Args:
        run: the run's folder, or its name where it lies in ``runs``. step: which checkpoint, None for the latest.

    Raises:
        UserError: no such run, a folder that is not empty, a model that is not from Hugging Face.
        CheckpointError: the checkpoint's weights are damaged; of other damage a warning is logged.
    """
    import torch

    from fusionllm.api.weights import restore
    from fusionllm.capture.sources import resolve_model
    from fusionllm.capture.weights import export_config, export_hf, export_tokenizer

    path, out = Path(run), Path(folder)
    if not path.exists() and (RunTable().root / path).is_dir():
        path = RunTable().root / path
    path = path.resolve()
    run_dir = RunDir.open(path.parent, path.name)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a new folder")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; name a new folder")
    config = load_config(run_dir.config)
    base_dir = Path(config.run.base_dir)
    checkpoint = load_checkpoint(run_dir.checkpoints, step, weights_only=True)
    specs = checkpoint.manifest.weights
    weights = Reading(specs, checkpoint.read_weight)
    lazy = config.model.lazy and not config.model.bottleneck.rank
    module = resolve_model(config.model, base_dir=base_dir, seed=config.run.seed, empty=lazy).module
    if lazy and all(n in specs and specs[n].shape == tuple(p.shape) for n, p in module.named_parameters()):
        dtypes = [entry.dtype for entry in specs.values() if "float" in entry.dtype]
        export_config(module, out, getattr(torch, dtypes[0]))
        write_folder(out, specs, weights)
    else:
        if lazy:
            module = resolve_model(config.model, base_dir=base_dir, seed=config.run.seed).module
        export_hf(restore(module, weights), out)
    text = tokenizer_json(config.data.tokenizer, base_dir)
    if text is not None:
        export_tokenizer(text, out, EOS_NAMES[0] if config.data.tokenizer == "bytes+eos" else None)
    return out
