"""Pipeline schedules: in which order a stage computes its microbatches, as a StageProgram.

Pure decision. On the path: Plan -> **StageProgram** (one per stage) -> `protocol.stage` executes it,
`schedule.timeline` replays it. Within a stage forwards run in microbatch order and so do backwards, which makes the
accumulated gradients the same numbers under every schedule. SEND does not wait, RECV waits for all values of that
microbatch from whichever stages produce them, so only the first stage has no RECV_F and only the last no RECV_B.

1F1B after Narayanan et al. 2019 (PipeDream) in its flushing form (Megatron-LM): at most ``num_stages - stage_index``
microbatches in flight. ``1f1b-ahead`` keeps more of them in flight, so that links work while stages compute: twice as
many as 1F1B, or as many as its name says (``1f1b-ahead:7,4,2,1``), which the planner sets by the round trips. The idea
is that of CrossPipe (ATC 2025) and of eager 1F1B.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from fusionllm.errors import PlanError, UserError
from fusionllm.ir.program import Action, StageProgram

Pipeline = Callable[[int, int, int], StageProgram]


def gpipe(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """All forwards, then all backwards: every microbatch is in flight at once."""
    return _program(stage_index, num_stages, num_microbatches, num_microbatches)


def one_f_one_b(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """Warm up with one forward per stage behind, then alternate: at most ``num_stages - stage_index`` in flight."""
    return _program(stage_index, num_stages, num_microbatches, num_stages - stage_index)


def one_f_one_b_ahead(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """1F1B with a microbatch more in flight for every link behind: hides transfers that take up to a stage's time."""
    return _program(stage_index, num_stages, num_microbatches, 2 * (num_stages - stage_index) - 1)


def forward_only(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """Evaluation: every microbatch forward, no update."""
    _check(stage_index, num_stages, num_microbatches)
    actions = [a for m in range(num_microbatches) for a in _forward(stage_index, num_stages, m)]
    return StageProgram(stage_index, tuple(actions))


AHEAD = "1f1b-ahead"
#: Pipeline schedules by the name used in a run's configuration.
PIPELINES: dict[str, Pipeline] = {"gpipe": gpipe, "1f1b": one_f_one_b, AHEAD: one_f_one_b_ahead}
_DEPTHS = re.compile(r"[1-9][0-9]{0,6}(?:,[1-9][0-9]{0,6})*")


def pipeline_name(name: str, depths: Sequence[int] = ()) -> str:
    """``"1f1b-ahead:7,4,2,1"`` for depths that a planner chose, else the name as it is."""
    return f"{AHEAD}:{','.join(map(str, depths))}" if name == AHEAD and depths else name


def find_pipeline(name: str) -> Pipeline:
    """The pipeline schedule of a name, depths included. Raises UserError for one that is not known."""
    base, colon, text = name.partition(":")
    if base not in PIPELINES or (colon and (base != AHEAD or _DEPTHS.fullmatch(text) is None)):
        raise UserError(f"unknown pipeline schedule {name[:80]!r}; known: {', '.join(PIPELINES)}, {AHEAD}:DEPTH,...")
    if not colon:
        return PIPELINES[base]
    depths = [int(word) for word in text.split(",")]
    if any(a < b for a, b in zip(depths, depths[1:])):
        raise UserError(
            f"{name[:80]!r} deadlocks: no stage may keep more microbatches in flight than the one before it"
        )

    def with_depths(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
        if num_stages != len(depths):
            raise PlanError(f"{len(depths)} depths for {num_stages} stages; give one per stage")
        return _program(stage_index, num_stages, num_microbatches, depths[stage_index])

    return with_depths


def build_programs(name: str, num_stages: int, num_microbatches: int) -> list[StageProgram]:
    """The programs of all stages for one step. Raises UserError for an unknown schedule."""
    pipeline = find_pipeline(name)
    return [pipeline(stage_index, num_stages, num_microbatches) for stage_index in range(num_stages)]


def check_microbatches(num_stages: int, num_microbatches: int) -> None:
    """Refuse a configuration whose pipeline can never be full. Raises UserError."""
    if num_microbatches < num_stages:
        raise UserError(
            f"fewer microbatches than stages: {num_microbatches} microbatches for {num_stages} stages leave nodes "
            f"idle all the time; set num_microbatches to {num_stages} or more, or num_stages to {num_microbatches}"
        )


def _check(stage_index: int, num_stages: int, num_microbatches: int) -> None:
    if not 0 <= stage_index < num_stages:
        raise PlanError(f"stage {stage_index} of {num_stages}; expected 0 to {num_stages - 1}")
    if num_microbatches < 1:
        raise PlanError(f"{num_microbatches} microbatches; a step has at least 1")


def _forward(stage_index: int, num_stages: int, microbatch_index: int) -> Iterator[Action]:
    if stage_index > 0:
        yield Action(stage_index, "RECV_F", microbatch_index)
    yield Action(stage_index, "F", microbatch_index)
    if stage_index < num_stages - 1:
        yield Action(stage_index, "SEND_F", microbatch_index)


def _backward(stage_index: int, num_stages: int, microbatch_index: int) -> Iterator[Action]:
    if stage_index < num_stages - 1:
        yield Action(stage_index, "RECV_B", microbatch_index)
    yield Action(stage_index, "B", microbatch_index)
    if stage_index > 0:
        yield Action(stage_index, "SEND_B", microbatch_index)


def _program(stage_index: int, num_stages: int, num_microbatches: int, depth: int) -> StageProgram:
    """Forwards as early as ``depth`` microbatches in flight allow, backwards in between."""
    _check(stage_index, num_stages, num_microbatches)
    actions: list[Action] = []
    for backward_index in range(num_microbatches):
        first = 0 if backward_index == 0 else backward_index + depth - 1
        for forward_index in range(first, min(backward_index + depth, num_microbatches)):
            actions += _forward(stage_index, num_stages, forward_index)
        actions += _backward(stage_index, num_stages, backward_index)
    return StageProgram(stage_index, (*actions, Action(stage_index, "UPDATE")))
