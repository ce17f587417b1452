"""StageProgram: what one stage does in a step, as text: ``2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 2UPDATE``.

One definition of a schedule: `schedule.pipeline` writes it, `schedule.timeline` replays it, `protocol.stage` executes
it. Ground floor: knows neither. Two forms are planned and simulated but not executed yet: a backward parted into
gradients of what was received (B) and of weights (W), and one program for several stages of the same node
(``0F0 ... 4F0``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import msgspec

from fusionllm.errors import GraphError

Kind = Literal["RECV_F", "F", "SEND_F", "RECV_B", "B", "SEND_B", "W", "UPDATE"]
MAX_PROGRAM_CHARS = 16 << 20
KINDS: tuple[str, ...] = get_args(Kind)
_ACTION = re.compile(r"(\d{1,5})(RECV_F|SEND_F|RECV_B|SEND_B|F|B|W|UPDATE)(\d{1,7})?")


class Action(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step of a program. ``microbatch_index`` is -1 for UPDATE."""

    stage_index: int
    kind: Kind
    microbatch_index: int = -1

    def __str__(self) -> str:
        return f"{self.stage_index}{self.kind}{'' if self.microbatch_index < 0 else self.microbatch_index}"


class StageProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The actions of one node for one step, in order. RECV waits, SEND does not block, F, B and W compute.

    ``stage_index`` is the node's only stage, or the first of several. ``overtakes``: while a message is missing, the
    next forward or backward of the other kind goes first if it can, unless more than ``depth`` microbatches would be
    held; forwards keep their order and so do backwards.
    """

    stage_index: int
    actions: tuple[Action, ...]
    overtakes: bool = False

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages it has actions of, ascending."""
        return tuple(sorted({action.stage_index for action in self.actions}))

    @property
    def splits(self) -> bool:
        """Whether gradients of weights are computed by themselves."""
        return any(action.kind == "W" for action in self.actions)

    @property
    def depth(self) -> int:
        """Microbatches between their F and their B, at most, in this order."""
        changes = ((action.kind == "F") - (action.kind == "B") for action in self.actions)
        return max(accumulate(changes), default=0)

    def __str__(self) -> str:
        return " ".join(str(a) for a in self.actions)


def parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None or (match[2] == "UPDATE") != (match[3] is None):
        raise GraphError(f"{text!r} is not an action; write it like 2F0, 2SEND_F0 or 2UPDATE")
    return Action(int(match[1]), match[2], -1 if match[3] is None else int(match[3]))  # type: ignore[arg-type]


def parse_program(text: str) -> StageProgram:
    """Read a program. Raises GraphError."""
    if len(text) > MAX_PROGRAM_CHARS:
        raise GraphError(f"a stage program of {len(text)} characters, the limit is {MAX_PROGRAM_CHARS}")
    actions = tuple(parse_action(word) for word in text.split())
    if not actions:
        raise GraphError("an empty stage program")
    return StageProgram(min(a.stage_index for a in actions), actions)


def verify_program(program: StageProgram, num_stages: int, num_microbatches: int, *, train: bool = True) -> None:
    """Check one program on its own.

    In every stage of it every microbatch has its F once (after its RECV_F, before its SEND_F, where there is such a
    neighbour); in training also its B once (after F and RECV_B, before SEND_B) and, where the program parts them, its W
    once after that; each of them in microbatch order, and one UPDATE per stage is last.

    Raises:
        GraphError: the first broken rule. The node refuses the program.
    """
    stages = program.stages
    if not stages or program.stage_index != stages[0] or not 0 <= stages[0] <= stages[-1] < num_stages:
        raise GraphError(f"program of stage {program.stage_index}, the pipeline has stages 0 to {num_stages - 1}")
    updates = tuple(Action(stage_index, "UPDATE") for stage_index in stages) if train else ()
    work = program.actions[: len(program.actions) - len(updates)]
    if program.actions[len(work) :] != updates:
        raise GraphError(f"the program of stage {program.stage_index} does not end with UPDATE")
    expected = {k: _expected_order(k, num_stages, train, program.splits) for k in stages}
    done = {stage_index: [0] * num_microbatches for stage_index in stages}
    last: dict[tuple[int, str], int] = {}
    for action in work:
        m, wanted, counts = action.microbatch_index, expected[action.stage_index], done[action.stage_index]
        if not 0 <= m < num_microbatches or counts[m] >= len(wanted):
            raise GraphError(
                f"{action} does not belong in stage {action.stage_index} with {num_microbatches} microbatches"
            )
        if action.kind != wanted[counts[m]]:
            raise GraphError(f"{action} out of order; expected {action.stage_index}{wanted[counts[m]]}{m} first")
        if action.kind in ("F", "B", "W"):
            before = last.get((action.stage_index, action.kind), -1)
            if m != before + 1:
                raise GraphError(f"{action} after microbatch {before}; they run in order")
            last[action.stage_index, action.kind] = m
        counts[m] += 1
    for stage_index in stages:
        wanted = expected[stage_index]
        short = [m for m, count in enumerate(done[stage_index]) if count < len(wanted)]
        if short:
            missing = wanted[done[stage_index][short[0]]]
            raise GraphError(f"stage {stage_index} does not finish microbatch {short[0]}: {missing} missing")


def _expected_order(stage_index: int, num_stages: int, train: bool, splits: bool) -> list[str]:
    first, last = stage_index == 0, stage_index == num_stages - 1
    forward = ["RECV_F"] * (not first) + ["F"] + ["SEND_F"] * (not last)
    backward = ["RECV_B"] * (not last) + ["B"] + ["SEND_B"] * (not first) + ["W"] * splits
    return forward + backward if train else forward


def verify_programs(programs: Sequence[StageProgram], num_microbatches: int, *, train: bool = True) -> None:
    """Check all stages' programs together: each on its own, then that they finish, sends never waiting.

    Raises:
        GraphError: a broken rule, or a deadlock with who waits for what.
    """
    num_stages = sum(len(program.stages) for program in programs)
    for index, program in enumerate(programs):
        if program.stage_index != index:
            raise GraphError(f"program {index} of the list is of stage {program.stage_index}")
        verify_program(program, num_stages, num_microbatches, train=train)
    if len({k for program in programs for k in program.stages}) != num_stages:
        raise GraphError("a stage that two programs have")
    at = [0] * len(programs)
    sent: set[tuple[int, str, int]] = set()
    moved = True
    while moved:
        moved = False
        for index, program in enumerate(programs):
            while at[index] < len(program.actions):
                action = program.actions[at[index]]
                if (needed := needed_send(action)) is not None and needed not in sent:
                    break
                sent.add((action.stage_index, action.kind, action.microbatch_index))
                at[index] += 1
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
