"""What a run tells about itself: frozen events, one JSON object a line.

An event carries its own times as plain seconds; nothing here reads a clock. Knows no file and no sink. On the path,
aside: run -> **event** -> sinks (metrics.jsonl, TensorBoard, memory) -> loss curve and summary.

``step`` counts completed steps: the first training step gives an event with step 1, and a checkpoint of step
n follows the event of step n.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fusionllm.errors import UserError


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="step"):
    """One training step.

    Attributes:
        step: steps completed, from 1.
        loss: mean training loss over the step's tokens, nats.
        lr: learning rate used.
        grad_norm: global norm of the gradients before clipping; None when it was not computed.
        tokens: tokens (or rows, for data that is not text) in the step.
        seconds: wall time of the step.
        elapsed_s: wall time since training began, without the time before a resume.
        tokens_per_s: tokens / seconds.
        link_bytes: bytes sent over each link in this step, ``"n0->n1"`` -> bytes.
        link_errors: what codecs did to the last messages looked at, ``"n0->n1 activation"`` -> squared error over the
            square; 0 is perfect.
    """

    step: int
    loss: float
    lr: float = 0.0
    grad_norm: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    elapsed_s: float = 0.0
    tokens_per_s: float = 0.0
    link_bytes: dict[str, int] = {}
    link_errors: dict[str, float] = {}


class ValMetrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="val"):
    """One validation.

    Attributes:
        step: steps completed when it was run; 0 for one before training.
        loss: mean loss over the validation tokens, nats; of the model by itself, links dense.
        coded_loss: the same through the links' codecs; None where there are none.
        accuracy: share of the rows or tokens whose class was guessed right; None where the loss is of another kind.
        tokens: tokens looked at.
        seconds: wall time of the validation.
    """

    step: int
    loss: float
    coded_loss: float | None = None
    accuracy: float | None = None
    tokens: int = 0
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite when that is more than a float holds."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="note"):
    """Something worth a line in the record: a text sample, a lost node, a new plan.

    Attributes:
        step: steps completed.
        kind: one word, such as ``sample``, ``node-lost``, ``plan``, ``checkpoint``.
        text: for people.
    """

    step: int
    kind: str
    text: str


Event = StepMetrics | ValMetrics | Note

_FLOATS = ("loss", "coded_loss", "lr", "grad_norm", "seconds", "elapsed_s", "tokens_per_s")


def encode_event(event: Event) -> bytes:
    """One line of JSON, without the line end.

    A loss that is not finite is written as ``"nan"``, ``"inf"`` or ``"-inf"``, since JSON has no such numbers.
    """
    raw: dict[str, Any] = msgspec.to_builtins(event)
    for name in _FLOATS:
        if isinstance(raw.get(name), float) and not math.isfinite(raw[name]):
            raw[name] = str(raw[name])
    return msgspec.json.encode(raw)


def decode_event(line: bytes | str) -> Event:
    """Read one line. Raises UserError when it is not an event."""
    try:
        raw = msgspec.json.decode(line)
        if isinstance(raw, dict):
            for name in _FLOATS:
                if raw.get(name) in ("nan", "inf", "-inf"):
                    raw[name] = float(raw[name])
        return msgspec.convert(raw, Event)  # type: ignore[no-any-return]  # a union, not a class
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"not a line of metrics: {error}") from None
