"""StageProgram: what one stage does in a step, as text: ``2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 2UPDATE``.

One definition of a schedule: `schedule.pipeline` writes it, `schedule.timeline` replays it, `protocol.stage` executes
it. Ground floor: knows neither.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from fusionllm.errors import GraphError

Kind = Literal["RECV_F", "F", "SEND_F", "RECV_B", "B", "SEND_B", "UPDATE"]
MAX_PROGRAM_CHARS = 16 << 20
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
    if len(text) > MAX_PROGRAM_CHARS:
        raise GraphError(f"a stage program of {len(text)} characters, the limit is {MAX_PROGRAM_CHARS}")
    actions = tuple(parse_action(word) for word in text.split())
    if not actions:
        raise GraphError("an empty stage program")
    if len({a.stage_index for a in actions}) != 1:
        raise GraphError(f"a program of several stages: {text[:80]!r}")
    return StageProgram(actions[0].stage_index, actions)


def verify_program(program: StageProgram, num_stages: int, num_microbatches: int, *, train: bool = True) -> None:
    """Check one stage's program on its own.

    Every microbatch has its F once (after its RECV_F, before its SEND_F, where there is such a neighbour); in training
    also its B once (after F and RECV_B, before SEND_B), F and B in microbatch order, and UPDATE is last.

    Raises:
        GraphError: the first broken rule. The node refuses the program.
    """
    stage_index = program.stage_index
    if not 0 <= stage_index < num_stages:
        raise GraphError(f"program of stage {stage_index}, the pipeline has stages 0 to {num_stages - 1}")
    expected = _expected_order(stage_index, num_stages, train)
    actions = program.actions[:-1] if train else program.actions
    if train and (not program.actions or program.actions[-1] != Action(stage_index, "UPDATE")):
        raise GraphError(f"the program of stage {stage_index} does not end with UPDATE")
    done = [0] * num_microbatches
    last = {"F": -1, "B": -1}
    for action in actions:
        m = action.microbatch_index
        if action.stage_index != stage_index or not 0 <= m < num_microbatches or done[m] >= len(expected):
            raise GraphError(f"{action} does not belong in stage {stage_index} with {num_microbatches} microbatches")
        if action.kind != expected[done[m]]:
            raise GraphError(f"{action} out of order; expected {stage_index}{expected[done[m]]}{m} first")
        if action.kind in last:
            if m != last[action.kind] + 1:
                raise GraphError(f"{action} after microbatch {last[action.kind]}; they run in order")
            last[action.kind] = m
        done[m] += 1
    short = [m for m, count in enumerate(done) if count < len(expected)]
    if short:
        raise GraphError(
            f"stage {stage_index} does not finish microbatch {short[0]}: {expected[done[short[0]]]} missing"
        )


def _expected_order(stage_index: int, num_stages: int, train: bool) -> list[str]:
    first, last = stage_index == 0, stage_index == num_stages - 1
    forward = ["RECV_F"] * (not first) + ["F"] + ["SEND_F"] * (not last)
    backward = ["RECV_B"] * (not last) + ["B"] + ["SEND_B"] * (not first)
    return forward + backward if train else forward


def verify_programs(programs: Sequence[StageProgram], num_microbatches: int, *, train: bool = True) -> None:
    """Check all stages' programs together: each on its own, then that they finish, sends never waiting.

    Raises:
        GraphError: a broken rule, or a deadlock with who waits for what.
    """
    for stage_index, program in enumerate(programs):
        if program.stage_index != stage_index:
            raise GraphError(f"program {stage_index} of the list is of stage {program.stage_index}")
        verify_program(program, len(programs), num_microbatches, train=train)
    at = [0] * len(programs)
    sent: set[tuple[int, str, int]] = set()
    moved = True
    while moved:
        moved = False
        for stage_index, program in enumerate(programs):
            while at[stage_index] < len(program.actions):
                action = program.actions[at[stage_index]]
                if (needed := needed_send(action)) is not None and needed not in sent:
                    break
                sent.add((stage_index, action.kind, action.microbatch_index))
                at[stage_index] += 1
                moved = True
    waits = [str(p.actions[i]) for p, i in zip(programs, at) if i < len(p.actions)]
    if waits:
        raise GraphError(f"the programs deadlock; waiting: {' '.join(waits)}")


def needed_send(action: Action) -> tuple[int, str, int] | None:
    """The (stage_index, kind, microbatch_index) a RECV waits for from its neighbour in the chain; None for others."""
    if action.kind == "RECV_F":
        return action.stage_index - 1, "SEND_F", action.microbatch_index
    if action.kind == "RECV_B":
        return action.stage_index + 1, "SEND_B", action.microbatch_index
    return None
