"""Which model, as data. Needs no tensor framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from fusionllm.errors import UserError, near_hint

#: Architectures by name, shaped by ``ModelConfig.config``.
ARCHITECTURES = ("gpt2", "llama")
_FORMS = "gpt2, llama, a Hugging Face folder, a config.json, or python:MODULE:FUNCTION"
#: Names of a config's key for the longest sequence.
CONTEXTS = ("max_position_embeddings", "n_positions")


class BottleneckConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank cuts that are part of the model: chosen when a job is created, since they change what is trained.

    Attributes:
        rank: channels that cross a cut; 0: none, the model as it is. A fourth to a sixteenth of the width is usual.
        cuts: how many, evenly between the layers; the number of stages less one.
        kind: ``learned``: trained matrices down to the rank and up again. ``fixed``: all layers write into one fixed
            subspace over frozen embeddings, and the result is an ordinary model; for training from scratch.
        embed: (learned) the stage after a cut adds an embedding of the tokens of its own.
        anneal: (learned) forwards of training, over which the way past the cuts opens until they do nothing; the whole
            stream crosses meanwhile. 0: they stay, and an exported model carries them with it.
    """

    rank: int = 0
    cuts: int = 1
    kind: Literal["learned", "fixed"] = "learned"
    embed: bool = True
    anneal: int = 0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model.

    Attributes:
        source: ``gpt2`` or ``llama`` (an architecture, shaped by ``config``), a local Hugging Face folder or
            config.json, or ``python:MODULE:FUNCTION`` (FUNCTION returns the module, or (module, example inputs)).
        config: overrides of the Hugging Face config, e.g. ``{n_layer = 6}``.
        init: ``random`` from the run's seed, ``pretrained`` from the folder's weights, ``auto``: pretrained if there.
        bottleneck: low-rank cuts to train the model with; none by default.
        lazy: never hold the model here: it is captured without weights, and each stage's come from the folder, or from
            the seed and their names.
        mirrors: with ``lazy``, addresses where the folder's files lie too, for nodes that may read there.
        allow_ops: operators of `torch.library` that the model may use, as ``mylib.scan.default``; its nodes allow them
            too. imports: Python modules that register those, for the nodes of this machine.
    """

    source: str = "gpt2"
    config: dict[str, Any] = {}
    init: Literal["auto", "random", "pretrained"] = "auto"
    bottleneck: BottleneckConfig = BottleneckConfig()
    lazy: bool = False
    mirrors: tuple[str, ...] = ()
    allow_ops: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


def check_source(config: ModelConfig, base_dir: Path) -> None:
    """Whether there is such a model, as far as a look at the disk tells. Raises UserError."""
    name, path = config.source, base_dir / config.source
    is_config = path.suffix == ".json" and path.is_file()
    if name.startswith("python:"):
        if len(name.split(":")) != 3 or not all(name.split(":")):
            raise UserError(f"model.source is {name!r}; write it like python:MODULE:FUNCTION")
    elif name not in ARCHITECTURES and not (path / "config.json").is_file() and not is_config:
        near = near_hint(name, ARCHITECTURES)
        raise UserError(
            f"model.source is {name!r}{near}; there is no such folder or file under {base_dir}; use {_FORMS}"
        )
    brings_weights = name.startswith("python:") and not config.lazy
    if config.init == "pretrained" and not brings_weights and not any(path.glob("*.safetensors")):
        raise UserError(f"model.init is 'pretrained', and {path} has no .safetensors file")


def check_context(seq_len: int, context: int | None) -> None:
    """Raises UserError for sequences longer than a model takes."""
    if context is not None and seq_len > context:
        raise UserError(
            f"data.seq_len is {seq_len}, the model's context is {context} tokens; "
            f"set data.seq_len to at most {context} or give the model a longer context"
        )


def written_context(config: ModelConfig, base_dir: Path) -> int | None:
    """The longest sequence that the model's config says it takes, without building it; None where none is written."""
    path = base_dir / config.source
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() and file.suffix == ".json" else {}
    except ValueError:
        return None  # whoever builds the model says what is wrong with it
    whole = {**(raw if isinstance(raw, dict) else {}), **config.config}
    return next((whole[key] for key in CONTEXTS if isinstance(whole.get(key), int)), None)
