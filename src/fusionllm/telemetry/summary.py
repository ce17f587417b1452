"""``summary.json``: a run in one object, for tables and for comparing runs.

A pure function of the events, and the versions of what ran. On the path, aside: events -> **summary**.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from statistics import median
from typing import Any

import msgspec

from fusionllm.telemetry.events import Event, StepMetrics, ValMetrics

#: Packages whose versions decide a run's numbers.
PACKAGES = ("fusionllm", "torch", "numpy", "transformers", "tokenizers", "jax", "msgspec", "uvloop")


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run in numbers. A loss that is not finite is written as null.

    Attributes:
        steps: steps completed.
        first_train_loss: of the first step; None without one.
        last_train_loss: of the last step.
        val_loss: of the last validation; None without one.
        val_coded_loss: the same through the links' codecs; None where there are none.
        val_perplexity: exp(val_loss).
        val_accuracy: share of rows or tokens whose class was guessed right; None where the loss is of another kind.
        best_val_loss: lowest of all validations.
        tokens: trained on, over all steps.
        train_s: wall time of all training steps.
        val_s: wall time of all validations.
        wall_s: wall time of the whole run, all its parts, as the caller measured it.
        part_s: of it since the run was last resumed; as ``wall_s`` where it never was.
        tokens_per_s: tokens / train_s.
        median_step_s: of a training step.
        link_bytes: link -> bytes sent over it in the whole run.
        link_errors: link and kind -> squared error of its codec, over the square, when last looked at.
        versions: package -> version, and ``python``.
        extra: JSON values of the caller's.
    """

    steps: int
    first_train_loss: float | None
    last_train_loss: float | None
    val_loss: float | None
    val_coded_loss: float | None
    val_perplexity: float | None
    val_accuracy: float | None
    best_val_loss: float | None
    tokens: int
    train_s: float
    val_s: float
    wall_s: float
    part_s: float
    tokens_per_s: float
    median_step_s: float
    link_bytes: dict[str, int]
    link_errors: dict[str, float]
    versions: dict[str, str]
    extra: dict[str, Any] = {}


def build_summary(
    events: Iterable[Event],
    *,
    wall_s: float,
    part_s: float | None = None,
    versions: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
) -> Summary:
    """Sum up the events of a run, those before a resume included.

    Args:
        events: in order.
        wall_s: wall time, those before a resume included. part_s: since the last resume; None: there was none.
        versions: None for those of this process.
        extra: JSON values to add.
    """
    found = list(events)
    steps = [event for event in found if isinstance(event, StepMetrics)]
    validations = [event for event in found if isinstance(event, ValMetrics)]
    link_bytes: Counter[str] = Counter()
    for event in steps:
        link_bytes.update(event.link_bytes)
    tokens, train_s = sum(event.tokens for event in steps), sum(event.seconds for event in steps)
    return Summary(
        steps=steps[-1].step if steps else 0,
        first_train_loss=steps[0].loss if steps else None,
        last_train_loss=steps[-1].loss if steps else None,
        val_loss=validations[-1].loss if validations else None,
        val_coded_loss=validations[-1].coded_loss if validations else None,
        val_perplexity=validations[-1].perplexity if validations else None,
        val_accuracy=validations[-1].accuracy if validations else None,
        best_val_loss=min((event.loss for event in validations), default=None),
        tokens=tokens,
        train_s=train_s,
        val_s=sum(event.seconds for event in validations),
        wall_s=wall_s,
        part_s=wall_s if part_s is None else part_s,
        tokens_per_s=tokens / train_s if train_s > 0 else 0.0,
        median_step_s=median(event.seconds for event in steps) if steps else 0.0,
        link_bytes=dict(sorted(link_bytes.items())),
        link_errors=steps[-1].link_errors if steps else {},
        versions=installed_versions() if versions is None else versions,
        extra=extra or {},
    )


def encode_summary(summary: Summary) -> bytes:
    """The bytes of summary.json: indented, with a line end."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


def installed_versions() -> dict[str, str]:
    """Versions of Python and of those of ``PACKAGES`` that are installed; imports none of them."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
