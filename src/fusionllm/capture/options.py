"""Which model, as data. Needs no tensor framework."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

#: Architectures by name, shaped by ``ModelConfig.config``.
ARCHITECTURES = ("gpt2", "llama")


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
