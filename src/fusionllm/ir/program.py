"""StageProgram: what one stage does in a step, as text: ``2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 2UPDATE``.

One definition of a schedule: `schedule.pipeline` writes it, `schedule.timeline` replays it, `protocol.stage` executes
it. Ground floor: knows neither.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

import msgspec

from fusionllm.errors import GraphError

Kind = Literal["RECV_F", "F", "SEND_F", "RECV_B", "B", "SEND_B", "UPDATE"]
KINDS: tuple[str, ...] = get_args(Kind)
_ACTION = re.compile(r"(\d{1,5})(RECV_F|SEND_F|RECV_B|SEND_B|F|B|UPDATE)(\d{1,7})?")


class Action(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step of a program. ``microbatch_index`` is -1 for UPDATE."""

    stage_index: int
    kind: Kind
    microbatch_index: int = -1

    def __str__(self) -> str:
        return f"{self.stage_index}{self.kind}{'' if self.microbatch_index < 0 else self.microbatch_index}"


class StageProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The actions of one stage for one step, in order. RECV waits, SEND does not block, F and B compute."""

    stage_index: int
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return " ".join(str(a) for a in self.actions)


def parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None or (match[2] == "UPDATE") != (match[3] is None):
        raise GraphError(f"{text!r} is not an action; write it like 2F0, 2SEND_F0 or 2UPDATE")
    return Action(int(match[1]), match[2], -1 if match[3] is None else int(match[3]))  # type: ignore[arg-type]


def parse_program(text: str) -> StageProgram:
    """Read a program; every action must be of one stage. Raises GraphError."""
    actions = tuple(parse_action(word) for word in text.split())
    if not actions:
        raise GraphError("an empty stage program")
    if len({a.stage_index for a in actions}) != 1:
        raise GraphError(f"a program of several stages: {text[:80]!r}")
    return StageProgram(actions[0].stage_index, actions)
