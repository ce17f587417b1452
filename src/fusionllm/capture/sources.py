"""Where models come from: an architecture by name, a Hugging Face folder or config, or a Python function.

Executes the owner's own model code, on the owner's machine only. Knows nothing of graphs.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from fusionllm.capture import bottleneck
from fusionllm.capture.inits import recorded
from fusionllm.capture.options import ARCHITECTURES, CONTEXTS, BottleneckConfig, ModelConfig, check_source
from fusionllm.errors import UserError, near_hint
from fusionllm.ir.init import Init


@dataclass
class Source:
    """A model ready to capture.

    Attributes:
        example_inputs: inputs by name with at least 2 rows, when the source gave some.
        max_seq_len, vocab_size: of a language model, None where there is no such thing.
        pretrained: its weights were read from a folder.
        random: it was made from a config, with random weights.
        inits, values, folder: of a model without weights: how its parameters begin, the values of those that its
            constructor made, or the folder with its weights.
        notice: a sentence for whoever creates the job about what was changed in the model; empty for nothing.
    """

    module: torch.nn.Module
    example_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    max_seq_len: int | None = None
    vocab_size: int | None = None
    inits: dict[str, Init] = field(default_factory=dict)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    folder: Path | None = None
    notice: str = ""
    pretrained: bool = False
    random: bool = False

    @property
    def from_scratch(self) -> bool:
        """Whether it is known to begin at random; a module or function of the user's may bring any weights."""
        return self.random and self.folder is None


def resolve_model(
    config: ModelConfig, *, base_dir: Path, seed: int, module: torch.nn.Module | None = None, empty: bool = False
) -> Source:
    """Build the model, in train mode, on the CPU; random weights are a function of ``seed``.

    Args:
        module: a module given by the caller, taken as it is.
        empty: build it without weights (`capture.empty`), whatever its size.

    Raises:
        UserError: names what was not found or does not fit, and the known forms.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if module is not None:
            source = _given(module)
        elif empty:
            source = _build_empty(config, base_dir)
        else:
            source = _build(config, base_dir)
        if config.bottleneck.rank and not empty:
            folder = base_dir / config.source if module is None and source.pretrained else None
            _add_bottlenecks(source, config.bottleneck, folder)
    source.module.train()
    return source


def _add_bottlenecks(source: Source, config: BottleneckConfig, folder: Path | None) -> None:
    """Cuts of the config, with the weights that a folder has for them."""
    bottleneck.add_bottlenecks(source.module, config, pretrained=source.pretrained)
    if folder is not None:
        bottleneck.load_saved(source.module, folder)
    source.notice = bottleneck.notice(config)


def _given(module: torch.nn.Module) -> Source:
    hf_config = getattr(module, "config", None)
    return _with_limits(Source(module), hf_config)


def _with_limits(source: Source, hf_config: Any) -> Source:
    for name in CONTEXTS:
        if isinstance(getattr(hf_config, name, None), int):
            source.max_seq_len = getattr(hf_config, name)
            break
    if isinstance(getattr(hf_config, "vocab_size", None), int):
        source.vocab_size = hf_config.vocab_size
    return source


def _build(config: ModelConfig, base_dir: Path) -> Source:
    name = config.source
    check_source(config, base_dir)
    if name.startswith("python:"):
        return _from_python(name, base_dir)
    if name in ARCHITECTURES:
        return _from_config(_architecture(name, config.config))
    path = base_dir / name
    if path.is_dir():
        return _from_folder(path, config)
    return _from_config(_read_config(path, config.config))


def _build_empty(config: ModelConfig, base_dir: Path) -> Source:
    """The model without weights, and where they come from."""
    folder = base_dir / config.source
    has_weights = folder.is_dir() and any(folder.glob("*.safetensors"))
    check_source(config, base_dir)
    with recorded() as inits:
        source = _build(msgspec.structs.replace(config, init="random"), base_dir)
        if config.bottleneck.rank:
            _add_bottlenecks(source, config.bottleneck, None)
    if has_weights and config.init != "random":
        source.folder = folder
    else:
        source.inits, source.values = inits.of(source.module)
    return source


def _from_config(hf_config: Any) -> Source:
    from transformers import AutoModelForCausalLM

    hf_config.use_cache = False
    try:
        factory: Any = AutoModelForCausalLM
        module = factory.from_config(hf_config, dtype=torch.float32)
    except Exception as error:  # the library raises whatever its arithmetic on a bad config comes to
        reason = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        raise UserError(f"Hugging Face cannot build this model ({reason}); look at model.config") from None
    return _with_limits(Source(module, random=True), hf_config)


def _architecture(name: str, overrides: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return _overridden(AutoConfig.for_model(name), name, {}, overrides)


def _overridden(hf_config: Any, name: str, raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """The config made of ``raw`` and ``overrides``; ``hf_config`` shows which keys there are."""
    known = {**hf_config.to_dict(), **getattr(hf_config, "attribute_map", {})}
    for key in overrides:
        if key not in known:
            raise UserError(f"unknown key model.config.{key} = {overrides[key]!r} for {name}{near_hint(key, known)}")
    vocab_size = overrides.get("vocab_size")
    ids: dict[str, None] = {}
    if isinstance(vocab_size, int):  # the architecture's default ids may lie outside a smaller vocabulary
        for key in ("bos_token_id", "eos_token_id"):
            default = getattr(hf_config, key, None)
            if isinstance(default, int) and default >= vocab_size:
                ids[key] = None
    try:
        return type(hf_config)(**{**raw, **ids, **overrides})
    except Exception as error:
        raise UserError(f"model.config does not fit {name}: {error}") from None


def _read_config(path: Path, overrides: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        bottleneck.read_saved(raw)
        kind = raw.pop("model_type")
        return _overridden(AutoConfig.for_model(kind, **raw), kind, raw, overrides)
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise UserError(f"{path} is not a Hugging Face config (it needs a known model_type): {error}") from None


def _from_folder(path: Path, config: ModelConfig) -> Source:
    from transformers import AutoModelForCausalLM

    has_weights = any(path.glob("*.safetensors"))
    hf_config = _read_config(path / "config.json", config.config)
    if config.init == "random" or not has_weights:
        return _from_config(hf_config)
    hf_config.use_cache = False
    try:
        module = AutoModelForCausalLM.from_pretrained(
            path, config=hf_config, dtype=torch.float32, local_files_only=True
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"Hugging Face cannot load {path}: {error}") from None
    source = _with_limits(Source(module, pretrained=True), hf_config)
    saved = bottleneck.read_saved(json.loads((path / "config.json").read_text(encoding="utf-8")))
    if saved is not None and not config.bottleneck.rank:
        raise UserError(
            f"{path} was trained with low-rank cuts that stayed; set model.bottleneck.rank = {saved['rank']}, "
            f"cuts = {len(saved['after'])}, embed = {str(saved['embed']).lower()} (and anneal, to be rid of them)"
        )
    return source


def _from_python(name: str, base_dir: Path) -> Source:
    parts = name.split(":")
    with _importable(base_dir):
        try:
            module = importlib.import_module(parts[1])
        except ModuleNotFoundError as error:
            raise UserError(
                f"model.source {name!r}: {error}; it is looked for in {base_dir} and among what is installed"
            ) from None
        function = getattr(module, parts[2], None)
        if not callable(function):
            raise UserError(f"model.source {name!r}: module {parts[1]} has no function {parts[2]!r}")
        try:
            made = function()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"model.source {name!r}: {parts[2]} raised {type(error).__name__}: {error} "
                f"({where.filename}, line {where.lineno})"
            ) from None
    example: dict[str, torch.Tensor] = {}
    if isinstance(made, tuple) and len(made) == 2:
        made, example = made
    if not isinstance(made, torch.nn.Module):
        raise UserError(f"model.source {name!r}: {parts[2]} returned {type(made).__name__}, not an nn.Module")
    source = _given(made)
    source.example_inputs = dict(example)
    return source


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
