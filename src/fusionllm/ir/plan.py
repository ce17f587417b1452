"""Plan: which node runs which part of the graph, under which pipeline schedule. A noun with one text form.

Ground floor: `schedule` makes it, broker and node read it, people read its text. On the path: CostTable -> **Plan** ->
StagePrograms. The text parses back, so that a plan can be saved, compared and edited by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fusionllm.errors import GraphError
from fusionllm.ir.graph import Param
from fusionllm.units import format_num_bytes

MAX_STAGES = 100_000


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage.

    Attributes:
        node: name of the node that runs it.
        first_op, end_op: its anchored operators, as a half-open range into `ir.cuts.anchored_ops` of the whole graph.
        num_ops: operators it executes, free ones that are copied into it included.
        flops: floating-point operations of one microbatch, forward.
        param_bytes: bytes of its parameters, tied ones included.
    """

    stage_index: int
    node: str
    first_op: int
    end_op: int
    num_ops: int
    flops: float
    param_bytes: int


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stages in path order and what they share.

    Attributes:
        pipeline: name of the pipeline schedule, e.g. ``"1f1b"``.
        replicas: pipelines side by side, each with all stages; 1 for now.
        tied: parameter name -> indices of the stages that hold it, two or more, ascending.
    """

    pipeline: str
    num_microbatches: int
    stages: tuple[StagePlan, ...]
    tied: dict[str, tuple[int, ...]] = {}
    replicas: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def boundaries(self) -> list[int]:
        """What `ir.cuts.split_graph` takes."""
        return [stage.first_op for stage in self.stages[1:]]


def tied_params(params_by_stage: Sequence[Mapping[str, Param]]) -> dict[str, tuple[int, ...]]:
    """Trained parameters held by two or more stages, with the indices of these stages.

    A frozen one has no gradient to exchange: each stage just holds it.
    """
    holders: dict[str, list[int]] = {}
    for stage_index, params in enumerate(params_by_stage):
        for name, param in params.items():
            if param.trainable:
                holders.setdefault(name, []).append(stage_index)
    return {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}


def verify_plan(plan: Plan) -> None:
    """Check a plan: stages numbered from 0, ranges gapless and not empty, tied stages exist. Raises GraphError."""
    if not 1 <= len(plan.stages) <= MAX_STAGES:
        raise GraphError(f"a plan of {len(plan.stages)} stages; expected 1 to {MAX_STAGES}")
    if not plan.pipeline or any(c.isspace() for c in plan.pipeline):
        raise GraphError(f"{plan.pipeline[:80]!r} is not the name of a pipeline schedule")
    if plan.num_microbatches < 1:
        raise GraphError(f"a plan of {plan.num_microbatches} microbatches; a step has at least 1")
    if plan.replicas != 1:
        raise GraphError(f"a plan of {plan.replicas} replicas; only 1 can run yet")
    end = 0
    for index, stage in enumerate(plan.stages):
        if stage.stage_index != index:
            raise GraphError(f"stage {stage.stage_index} stands at place {index} of the plan")
        if stage.first_op != end or stage.end_op <= stage.first_op:
            raise GraphError(f"stage {index} has operators {stage.first_op} to {stage.end_op}, expected from {end} on")
        if stage.num_ops < 0 or not 0 <= stage.flops < float("inf") or stage.param_bytes < 0 or not stage.node:
            raise GraphError(f"stage {index} has no node, or a count below zero")
        end = stage.end_op
    for name, stages in plan.tied.items():
        if (
            len(stages) < 2
            or list(stages) != sorted(set(stages))
            or not 0 <= stages[0] <= stages[-1] < len(plan.stages)
        ):
            raise GraphError(
                f"tied parameter {name[:80]!r} lists stages {list(stages)[:8]}; expected two or more of the plan"
            )


def plan_to_text(plan: Plan) -> str:
    """The plan, one line a stage. Lines of ``#`` are for people and ignored when read back."""
    lines = [f"plan {plan.pipeline} microbatches {plan.num_microbatches} replicas {plan.replicas}"]
    for s in plan.stages:
        lines.append(
            f"stage {s.stage_index} on {_quote(s.node)} ops {s.first_op} {s.end_op} executes {s.num_ops} "
            f"flops {s.flops!r} param_bytes {s.param_bytes}"
        )
        lines.append(f"#   {s.flops / 1e9:.3g} GFLOP a microbatch, {format_num_bytes(s.param_bytes)} of parameters")
    lines += [f"tied {_quote(name)} {' '.join(map(str, stages))}" for name, stages in plan.tied.items()]
    return "\n".join(lines) + "\n"


def parse_plan(text: str) -> Plan:
    """Read a plan back and verify it. Raises GraphError with the line that is wrong."""
    head: tuple[str, int, int] | None = None
    stages: list[StagePlan] = []
    tied: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            keyword, rest = line.split(" ", 1)
            if keyword == "plan" and head is None:
                pipeline, _, count, *more = rest.split(" ")
                if more and (len(more) != 2 or more[0] != "replicas"):
                    raise ValueError("expected: plan 1f1b microbatches 8 replicas 1")
                head = pipeline, int(count), int(more[1]) if more else 1
            elif keyword == "stage":
                stages.append(_parse_stage(rest))
            elif keyword == "tied":
                name, tail = _take_quoted(rest)
                tied[name] = tuple(int(word) for word in tail.split())
            else:
                raise ValueError("expected plan (once), stage or tied")
        except (ValueError, msgspec.DecodeError) as error:
            raise GraphError(f"line {number} of the plan, {line[:80]!r}: {error}") from None
    if head is None:
        raise GraphError("not a plan: no line like 'plan 1f1b microbatches 8'")
    plan = Plan(pipeline=head[0], num_microbatches=head[1], replicas=head[2], stages=tuple(stages), tied=tied)
    verify_plan(plan)
    return plan


def _parse_stage(rest: str) -> StagePlan:
    index, on, rest = rest.split(" ", 2)
    node, tail = _take_quoted(rest)
    words = tail.split(" ")
    if on != "on" or words[0::3][:1] != ["ops"] or len(words) != 9:
        raise ValueError('expected: stage 0 on "node" ops 0 9 executes 9 flops 1.0 param_bytes 4')
    first, end, _, num_ops, _, flops, _, num_bytes = words[1:]
    return StagePlan(
        stage_index=int(index), node=node, first_op=int(first), end_op=int(end), num_ops=int(num_ops),
        flops=float(flops), param_bytes=int(num_bytes),
    )  # fmt: skip


def _quote(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _take_quoted(text: str) -> tuple[str, str]:
    """A JSON string at the start of the text, and the rest after one space."""
    if not text.startswith('"'):
        raise ValueError("expected a quoted name")
    end = 1
    while end < len(text) and text[end] != '"':
        end += 2 if text[end] == "\\" else 1
    return msgspec.json.decode(text[: end + 1], type=str), text[end + 2 :]
