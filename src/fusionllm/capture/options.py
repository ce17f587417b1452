"""Which model, as data. Needs no tensor framework."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

#: Architectures by name, shaped by ``ModelConfig.config``.
ARCHITECTURES = ("gpt2", "llama")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model.

    Attributes:
        source: ``gpt2`` or ``llama`` (an architecture, shaped by ``config``), a local Hugging Face folder or
            config.json, or ``python:MODULE:FUNCTION`` (FUNCTION returns the module, or (module, example inputs)).
        config: overrides of the Hugging Face config, e.g. ``{n_layer = 6}``.
        init: ``random`` from the run's seed, ``pretrained`` from the folder's weights, ``auto``: pretrained if there.
    """

    source: str = "gpt2"
    config: dict[str, Any] = {}
    init: Literal["auto", "random", "pretrained"] = "auto"
