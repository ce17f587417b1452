"""Pipeline schedules: in which order a stage computes its microbatches, as a StageProgram.

Pure decision. On the path: Plan -> **StageProgram** (one per stage) -> `protocol.stage` executes it,
`schedule.timeline` replays it. Within a stage forwards run in microbatch order and so do backwards, which makes the
accumulated gradients the same numbers under every schedule. SEND does not wait, RECV waits for all values of that
microbatch from whichever stages produce them, so only the first stage has no RECV_F and only the last no RECV_B.

1F1B after Narayanan et al. 2019 (PipeDream) in its flushing form (Megatron-LM): at most ``num_stages - stage_index``
microbatches in flight. ``1f1b-ahead`` keeps more of them in flight, so that links work while stages compute: twice as
many as 1F1B, or as many as its name says (``1f1b-ahead:7,4,2,1``), which the planner sets by the round trips. The idea
is that of CrossPipe (ATC 2025) and of eager 1F1B. Its stages do not wait for a late message while they have something
else to do (ADR 011).

Two more are planned and simulated but not executed by nodes yet. ``1f1b-interleaved`` (Narayanan et al. 2021) gives
each node two stages, or as many as its name says (``1f1b-interleaved:4``): the pipeline is full sooner, for more
messages. ``zb-h1`` (Qi et al. 2023, Zero Bubble) computes the gradients of weights (W) apart from those that others
wait for (B) and fills gaps with them; no stage keeps more than the first of 1F1B does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import msgspec

from fusionllm.errors import PlanError, UserError, known_names
from fusionllm.ir.program import Action, StageProgram

Pipeline = Callable[[int, int, int], StageProgram]
#: All programs of a step, from the number of stages and of microbatches.
Programs = Callable[[int, int], list[StageProgram]]


def gpipe(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """All forwards, then all backwards: every microbatch is in flight at once."""
    return _program(stage_index, num_stages, num_microbatches, num_microbatches)


def one_f_one_b(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """Warm up with one forward per stage behind, then alternate: at most ``num_stages - stage_index`` in flight."""
    return _program(stage_index, num_stages, num_microbatches, num_stages - stage_index)


def one_f_one_b_ahead(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """1F1B with a microbatch more in flight for every link behind: hides transfers that take up to a stage's time."""
    return _overtaking(stage_index, num_stages, num_microbatches, 2 * (num_stages - stage_index) - 1)


def forward_only(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """Evaluation: every microbatch forward, no update."""
    _check(stage_index, num_stages, num_microbatches)
    actions = [a for m in range(num_microbatches) for a in _forward(stage_index, num_stages, m)]
    return StageProgram(stage_index, tuple(actions))


def zero_bubble_h1(stage_index: int, num_stages: int, num_microbatches: int) -> StageProgram:
    """ZB-H1: 1F1B with each W as many microbatches late as there are stages before, which fills the end of the step.

    So a stage keeps ``num_stages - stage_index`` microbatches between F and B and ``stage_index`` between B and W.
    """
    _check(stage_index, num_stages, num_microbatches)
    actions: list[Action] = []
    weights = 0
    for action in _program(stage_index, num_stages, num_microbatches, num_stages - stage_index).actions[:-1]:
        done = action.kind == ("SEND_B" if stage_index > 0 else "B")
        actions.append(action)
        if done and action.microbatch_index >= stage_index:
            actions.append(Action(stage_index, "W", weights))
            weights += 1
    actions += [Action(stage_index, "W", m) for m in range(weights, num_microbatches)]
    return StageProgram(stage_index, (*actions, Action(stage_index, "UPDATE")))


def one_f_one_b_interleaved(num_stages: int, num_microbatches: int, chunks: int) -> list[StageProgram]:
    """Node ``p`` of P has stages p, p + P, p + 2P ...; microbatches go through them in groups of about P.

    Raises:
        PlanError: stages that the nodes cannot share evenly.
    """
    _check(0, num_stages, num_microbatches)
    num_nodes, rest = divmod(num_stages, chunks)
    if rest or num_nodes < 2:
        raise PlanError(
            f"{num_stages} stages, {chunks} per node, at least 2 nodes; give a multiple, {2 * chunks} or more"
        )
    # even groups of P to 2P - 1: a last one smaller than P would deadlock
    rounds = max(1, num_microbatches // num_nodes)
    edges = [k * num_microbatches // rounds for k in range(rounds + 1)]
    groups = [range(a, b) for a, b in zip(edges, edges[1:])]
    programs = []
    for node in range(num_nodes):
        stages = range(node, num_stages, num_nodes)
        forwards = [(stage, m) for group in groups for stage in stages for m in group]
        backwards = [(stage, m) for group in groups for stage in reversed(stages) for m in group]
        warm_up = min(len(forwards), 2 * (num_nodes - 1 - node) + (chunks - 1) * max(map(len, groups)))
        actions = [a for stage, m in forwards[:warm_up] for a in _forward(stage, num_stages, m)]
        for index, (stage, m) in enumerate(backwards):
            if warm_up + index < len(forwards):
                ahead, microbatch = forwards[warm_up + index]
                actions += _forward(ahead, num_stages, microbatch)
            actions += _backward(stage, num_stages, m)
        actions += [Action(stage, "UPDATE") for stage in stages]
        programs.append(StageProgram(node, tuple(actions)))
    return programs


AHEAD = "1f1b-ahead"
INTERLEAVED = "1f1b-interleaved"
ZERO_BUBBLE = "zb-h1"
#: Stages per node at most: each is one more message per microbatch.
MAX_CHUNKS = 64
#: Pipeline schedules by the name used in a run's configuration.
PIPELINES: dict[str, Pipeline] = {"gpipe": gpipe, "1f1b": one_f_one_b, AHEAD: one_f_one_b_ahead}
#: Those that `fusionllm plan` and `simulate` know besides; interleaved ones are made for all nodes at once.
SIMULATED: dict[str, Pipeline | None] = {INTERLEAVED: None, ZERO_BUBBLE: zero_bubble_h1}
_DEPTHS = re.compile(r"[1-9][0-9]{0,6}(?:,[1-9][0-9]{0,6})*")


def pipeline_name(name: str, depths: Sequence[int] = ()) -> str:
    """``"1f1b-ahead:7,4,2,1"`` for depths that a planner chose, else the name as it is."""
    return f"{AHEAD}:{','.join(map(str, depths))}" if name == AHEAD and depths else name


def find_pipeline(name: str) -> Pipeline:
    """The pipeline schedule of a name that nodes execute, depths included. Raises UserError for any other."""
    base, colon, text = name.partition(":")
    if base in SIMULATED:
        raise UserError(
            f"pipeline schedule {name[:80]!r} can be planned and simulated, but nodes do not execute it yet; "
            f"use one of {', '.join(PIPELINES)}"
        )
    if base not in PIPELINES:
        raise UserError(f"unknown pipeline schedule {name[:80]!r}; {known_names(base, PIPELINES)}")
    if colon and (base != AHEAD or _DEPTHS.fullmatch(text) is None):
        raise UserError(f"{name[:80]!r}: only {AHEAD} takes depths, from 1 up, written like {AHEAD}:7,5,3,1")
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
        return _overtaking(stage_index, num_stages, num_microbatches, depths[stage_index])

    return with_depths


def stages_per_node(name: str) -> int:
    """How many stages each node has under a pipeline schedule. Raises UserError for one that is not known."""
    base, colon, text = name.partition(":")
    if base != INTERLEAVED:
        return 1
    if colon and not (text.isdecimal() and 2 <= int(text) <= MAX_CHUNKS):
        raise UserError(f"{name[:80]!r}: write the stages per node as {INTERLEAVED}:2, from 2 to {MAX_CHUNKS}")
    return int(text) if colon else 2


def check_pipeline(name: str) -> None:
    """Whether a name can be planned. Raises UserError for one that is not known."""
    base, _, text = name.partition(":")
    if base not in (*PIPELINES, *SIMULATED):
        raise UserError(f"unknown pipeline schedule {name[:80]!r}; {known_names(base, (*PIPELINES, *SIMULATED))}")
    if base not in SIMULATED:
        find_pipeline(name)
    elif stages_per_node(name) == 1 and text:
        raise UserError(f"{name[:80]!r}: {base} takes no number")


def build_programs(name: str, num_stages: int, num_microbatches: int) -> list[StageProgram]:
    """The programs of all nodes for one step, one per stage unless nodes have several.

    Raises:
        UserError: an unknown schedule. PlanError: counts that the schedule cannot have.
    """
    check_pipeline(name)
    base = name.partition(":")[0]
    if base == INTERLEAVED:
        return one_f_one_b_interleaved(num_stages, num_microbatches, stages_per_node(name))
    pipeline = SIMULATED.get(base) or find_pipeline(name)
    return [pipeline(stage_index, num_stages, num_microbatches) for stage_index in range(num_stages)]


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


def _overtaking(stage_index: int, num_stages: int, num_microbatches: int, depth: int) -> StageProgram:
    return msgspec.structs.replace(_program(stage_index, num_stages, num_microbatches, depth), overtakes=True)


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
