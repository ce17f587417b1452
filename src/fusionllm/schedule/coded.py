"""Coded: codecs on the links of a placement, what they change, and nodes, cuts and codecs chosen together.

Pure decision. On the path: Workload + Cluster + rule of `schedule.ratios` -> **Coded** -> Plan. The planner knows bytes
and no codecs, so it plans once for what crosses at each size of the ladder; every placement found is then given codecs
link by link and replayed with them, bytes and the time of coding both. Coding keeps the device of its stage busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from fusionllm.errors import PlanError
from fusionllm.ir.codec import (
    IDENTITY,
    CodecSpec,
    CodecSpeed,
    dense_num_bytes,
    expected_num_bytes,
    fit_codec,
)
from fusionllm.ir.cuts import Cut
from fusionllm.ir.tensor import DTYPES
from fusionllm.schedule.limits import check_allowed, feed_seconds
from fusionllm.schedule.pipeline import AHEAD, build_programs, pipeline_name
from fusionllm.schedule.placement import (
    Cluster,
    NodeModel,
    Placement,
    Workload,
    build_models,
    check_memory,
    find_fences,
    link_rates,
)
from fusionllm.schedule.planner import ONE_FENCE, plan_placement
from fusionllm.schedule.ratios import EXTRA_STEPS, GRADIENT, LADDER, LinkLoad, choose_codecs, deadline
from fusionllm.schedule.timeline import LinkModel, StageModel, Timeline, replay

#: Seconds of a codec on a node per element, or None where they do not count.
Coding = Callable[[CodecSpec, NodeModel], CodecSpeed | None]
#: Placements of each size of what crosses that are given codecs.
KEPT_PER_SIZE = 3
#: A plan this much cheaper is worth a lossier codec.
WORTH = 0.01
#: Microbatches on stages that moving single links may replay in all: about a second.
MAX_MOVED = 50_000
#: Parts of the busiest stage's time tried as the deadline: where memory bounds what is in flight, a link that keeps
#: just up is still waited for.
DEADLINES = (1.0, 0.5, 0.25, 0.1)
#: Of a step: less is not worth another depth.
_SHORTER = 1e-3
#: A link keeps its codec while the rule would choose it, or one on either side of it, at rates off by this part.
BAND = 0.25


class Coded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A placement and the codecs of its links, forward and backward, with the seconds of a step as replayed."""

    placement: Placement
    codecs: tuple[tuple[CodecSpec, CodecSpec], ...]
    step_s: float

    @property
    def cost_s(self) -> float:
        """Seconds of a step times the steps that the codecs make more of them."""
        return self.step_s * (1 + sum(EXTRA_STEPS.get(spec, 0.0) for pair in self.codecs for spec in pair))

    def loss(self, ladder: Sequence[CodecSpec]) -> tuple[int, int]:
        """How far down the ladder the lossiest link is (a codec not on it: below), and all rungs together."""
        rungs = [ladder.index(spec) if spec in ladder else len(ladder) for pair in self.codecs for spec in pair]
        return max(rungs, default=0), sum(rungs)


def link_loads(workload: Workload, cluster: Cluster, placement: Placement) -> list[tuple[LinkLoad, LinkLoad]]:
    """What crosses each link, forward and backward, as rows of the width that the workload gives for the cut."""
    at = {cut.boundary: k for k, cut in enumerate(workload.cuts)}
    rate, size = link_rates(cluster), DTYPES[workload.wire_dtype]
    found = []
    for a, b, boundary in zip(placement.nodes, placement.nodes[1:], placement.boundaries):
        k = at[boundary]
        numel = max(1, workload.cuts[k].num_bytes // size)
        width = min(numel, workload.widths[k] if workload.widths else numel)
        shape = (max(1, numel // width), width)
        found.append(
            (
                LinkLoad(shape=shape, dtype=workload.wire_dtype, bandwidth_bytes_per_s=float(rate[a, b])),
                LinkLoad(shape=shape, dtype=workload.wire_dtype, bandwidth_bytes_per_s=float(rate[b, a])),
            )
        )
    return found


def give_codecs(
    rule: str,
    workload: Workload,
    cluster: Cluster,
    placement: Placement,
    ratio: float = 1.0,
    *,
    ladder: Sequence[CodecSpec] = LADDER,
    slow_only: bool = False,
) -> tuple[tuple[CodecSpec, CodecSpec], ...]:
    """Codecs by a rule of `schedule.ratios`; for ``deadline`` the ratio is a part of the busiest stage's time.

    With ``slow_only`` links inside a fence stay dense.
    """
    pairs = link_loads(workload, cluster, placement)
    fence = {i: k for k, members in enumerate(find_fences(cluster)) for i in members}
    hops = enumerate(zip(placement.nodes, placement.nodes[1:]))
    coded = [k for k, (a, b) in hops if not slow_only or fence[a] != fence[b]]
    loads = [load for k in coded for load in pairs[k]]
    if any(load.bandwidth_bytes_per_s <= 0 for pair in pairs for load in pair):
        raise PlanError("a link with a rate that is not above zero; leave its nodes out or measure again")
    if rule == "deadline":
        stages, _ = build_models(workload, cluster, placement)
        deadline_s = ratio * max(stage.forward_s + stage.backward_s for stage in stages)
        chosen = deadline(loads, deadline_s, ladder)
    else:
        chosen = choose_codecs(rule, loads, ratio)
    found = list(_dense(placement))
    for k, out, back in zip(coded, chosen[::2], chosen[1::2]):
        found[k] = (out, back)
    return tuple(found)


def replay_coded(
    workload: Workload,
    cluster: Cluster,
    placement: Placement,
    codecs: Sequence[tuple[CodecSpec, CodecSpec]],
    coding: Coding | None = None,
) -> Timeline:
    """One step with these codecs on the links. Raises PlanError when a link is missing or memory is short."""
    name = pipeline_name(workload.pipeline, placement.depths)
    programs = build_programs(name, len(placement.nodes), workload.num_microbatches)
    check_allowed(workload, cluster, placement)
    check_memory(workload, cluster, placement, programs)
    stages, links = build_models(workload, cluster, placement)
    loads = link_loads(workload, cluster, placement)
    for k, (pair, (out, back)) in enumerate(zip(loads, codecs)):
        sender, receiver = (cluster.nodes[placement.nodes[k + i]] for i in (0, 1))
        links[k] = _coded_link(links[k], pair, out, back)
        for spec, load, stage_index, forward in ((out, pair[0], k, True), (back, pair[1], k + 1, False)):
            ends = (sender, receiver) if forward else (receiver, sender)
            encode_s, decode_s = _coding_seconds(spec, load, ends, coding)
            other = k + 1 if forward else k
            stages[stage_index] = _longer(stages[stage_index], encode_s, forward)
            stages[other] = _longer(stages[other], decode_s, forward)
    return replay(programs, stages, links, overtaking=True).with_feed(feed_seconds(workload, cluster, placement))


def _coded_link(link: LinkModel, loads: tuple[LinkLoad, LinkLoad], out: CodecSpec, back: CodecSpec) -> LinkModel:
    def wire(load: LinkLoad, spec: CodecSpec, dense: float) -> float:
        if spec == IDENTITY:
            return dense
        return dense * expected_num_bytes(spec, load.shape, load.dtype) / dense_num_bytes(load.shape, load.dtype)

    return msgspec.structs.replace(
        link,
        forward_bytes=wire(loads[0], out, link.forward_bytes),
        backward_bytes=wire(loads[1], back, link.backward_bytes),
    )


def _coding_seconds(
    spec: CodecSpec, load: LinkLoad, ends: tuple[NodeModel, NodeModel], coding: Coding | None
) -> tuple[float, float]:
    """To encode at the sender and to decode at the receiver."""
    if coding is None or spec == IDENTITY:
        return 0.0, 0.0
    numel = load.shape[0] * load.shape[1]
    sender, receiver = coding(spec, ends[0]), coding(spec, ends[1])
    return sender.encode_s(numel) if sender else 0.0, receiver.decode_s(numel) if receiver else 0.0


def _longer(stage: StageModel, seconds: float, forward: bool) -> StageModel:
    if forward:
        return msgspec.structs.replace(stage, forward_s=stage.forward_s + seconds)
    return msgspec.structs.replace(stage, backward_s=stage.backward_s + seconds)


def scaled_cuts(workload: Workload, factor: float) -> Workload:
    """The workload with ``factor`` times the bytes at every cut."""
    cuts = tuple(Cut(cut.boundary, cut.values, max(1, int(cut.num_bytes * factor))) for cut in workload.cuts)
    return msgspec.structs.replace(workload, cuts=cuts)


def ladder_factors(workload: Workload, ladder: Sequence[CodecSpec] = LADDER) -> list[float]:
    """Bytes on the wire over dense ones, of each codec, for what crosses in the middle of the graph."""
    middle = len(workload.cuts) // 2
    width = workload.widths[middle] if workload.widths else 1024
    shape = (1024, width)
    dense = dense_num_bytes(shape, workload.wire_dtype)
    fitted = [fit_codec(spec, shape, workload.wire_dtype) for spec in ladder]
    return [expected_num_bytes(spec, shape, workload.wire_dtype) / dense for spec in fitted]


def propose(workload: Workload, cluster: Cluster, factors: Iterable[float]) -> list[Placement]:
    """The best placements for each size of what crosses, each fence's own too. Raises PlanError when none fits."""
    found: dict[Placement, None] = {}
    reason: PlanError | None = None
    for factor in factors:
        try:
            ranked = plan_placement(scaled_cuts(workload, factor), cluster)
        except PlanError as error:
            reason = error
            continue
        kept = [*ranked[:KEPT_PER_SIZE], *(candidate for candidate in ranked if candidate.method == ONE_FENCE)]
        found.update(dict.fromkeys(candidate.placement for candidate in kept))
    if not found and reason is not None:
        raise reason
    return list(found)


def best_coded(
    placements: Iterable[Placement],
    rule: str,
    workload: Workload,
    cluster: Cluster,
    *,
    ratio: float = 1.0,
    coding: Coding | None = None,
    ladder: Sequence[CodecSpec] = LADDER,
    slow_only: bool = False,
) -> Coded:
    """The cheapest of the placements under a rule, or one that is hardly dearer and loses less.

    Args:
        rule: of `schedule.ratios`; empty: dense. ratio: of the rules that take one.
        ladder: what ``deadline`` chooses from. slow_only: links inside a fence stay dense.

    Raises:
        PlanError: none of them fits.
    """
    found: dict[tuple[Placement, tuple[tuple[CodecSpec, CodecSpec], ...]], Coded] = {}
    for placement in placements:
        for number in DEADLINES if rule == "deadline" else (ratio,):
            try:
                codecs = _dense(placement)
                if rule:
                    codecs = give_codecs(rule, workload, cluster, placement, number, ladder=ladder, slow_only=slow_only)
                if (placement, codecs) not in found:
                    step_s = replay_coded(workload, cluster, placement, codecs, coding).step_s
                    found[placement, codecs] = Coded(placement=placement, codecs=codecs, step_s=step_s)
            except PlanError:
                break
    if not found:
        raise PlanError("none of the placements fits")
    best = _least(found.values(), ladder)
    if rule == "deadline":
        best = moved_codecs(best, workload, cluster, coding=coding, ladder=ladder)
    return moved_depths(best, workload, cluster, coding=coding)


def _least(found: Iterable[Coded], ladder: Sequence[CodecSpec]) -> Coded:
    found = list(found)
    limit_s = min(coded.cost_s for coded in found) * (1 + WORTH)
    return min((c for c in found if c.cost_s <= limit_s), key=lambda c: (c.loss(ladder), c.cost_s))


def moved_codecs(
    coded: Coded,
    workload: Workload,
    cluster: Cluster,
    *,
    coding: Coding | None = None,
    ladder: Sequence[CodecSpec] = LADDER,
) -> Coded:
    """Single directions of links that are coded moved along the ladder, as long as that makes the whole cheaper, or
    less lossy and not dearer than what was given."""
    loads = [load for pair in link_loads(workload, cluster, coded.placement) for load in pair]
    flat = [spec for pair in coded.codecs for spec in pair]
    limit_s, moving = coded.cost_s, True
    left = MAX_MOVED // (len(coded.placement.nodes) * workload.num_microbatches)
    slowest = sorted(range(len(loads)), key=lambda k: -loads[k].seconds(flat[k]))
    while moving and left > 0:
        moving = False
        for k in slowest:
            load = loads[k]
            if flat[k - k % 2] == flat[k - k % 2 + 1] == IDENTITY:
                continue
            for spec in ladder:
                trial = [*flat[:k], fit_codec(spec, load.shape, load.dtype), *flat[k + 1 :]]
                if trial == flat or left == 0:
                    continue
                left -= 1
                codecs = tuple(zip(trial[::2], trial[1::2]))
                step_s = replay_coded(workload, cluster, coded.placement, codecs, coding).step_s
                other = Coded(placement=coded.placement, codecs=codecs, step_s=step_s)
                if other.cost_s <= limit_s and _least((coded, other), ladder) is other:
                    coded, flat, moving = other, trial, True
    return coded


def moved_depths(coded: Coded, workload: Workload, cluster: Cluster, *, coding: Coding | None = None) -> Coded:
    """With as many microbatches in flight on each stage as make the step shortest, where the schedule lets one choose.

    The planner's depths are those of programs that keep their order; stages that overtake want others.
    """
    if workload.pipeline != AHEAD or len(coded.placement.nodes) == 1:
        return coded
    count, most = len(coded.placement.nodes), workload.num_microbatches
    depths = [program.depth for program in build_programs(pipeline_name(AHEAD, coded.placement.depths), count, most)]
    left, moving = MAX_MOVED // (count * most), True
    while moving and left > 0:
        moving = False
        for k in range(count):
            for depth in sorted({depths[k] - 1, depths[k] + 1, depths[k] + 2, depths[max(0, k - 1)]} - {depths[k]}):
                trial = [*depths[:k], depth, *depths[k + 1 :]]
                if not 1 <= depth <= most or any(a < b for a, b in zip(trial, trial[1:])) or left == 0:
                    continue
                left -= 1
                placement = msgspec.structs.replace(coded.placement, depths=tuple(trial))
                with suppress(PlanError):  # more than the node's memory holds
                    step_s = replay_coded(workload, cluster, placement, coded.codecs, coding).step_s
                    if step_s < coded.step_s * (1 - _SHORTER):
                        coded = Coded(placement=placement, codecs=coded.codecs, step_s=step_s)
                        depths, moving = trial, True
    return coded


def settle_codecs(
    current: Sequence[tuple[CodecSpec, CodecSpec]],
    workload: Workload,
    cluster: Cluster,
    placement: Placement,
    *,
    coding: Coding | None = None,
    ladder: Sequence[CodecSpec] = LADDER,
    slow_only: bool = False,
) -> tuple[tuple[CodecSpec, CodecSpec], ...]:
    """The rule ``deadline`` applied again, with hysteresis.

    What it chooses at rates by `BAND` lower and by `BAND` higher are bounds: a link whose codec lies between both keeps
    it, another one moves to the nearer. Raises PlanError.
    """
    bounds = [
        best_coded(
            [placement], "deadline", workload, _with_rates(cluster, factor), coding=coding, ladder=ladder,
            slow_only=slow_only,
        ).codecs
        for factor in (1 / (1 + BAND), 1 + BAND)
    ]  # fmt: skip

    def settle(now: CodecSpec, a: CodecSpec, b: CodecSpec) -> CodecSpec:
        low, high = sorted((a, b), key=ladder.index)
        return max(low, min(now, high, key=ladder.index), key=ladder.index)

    return tuple(
        (settle(now[0], a[0], b[0]), settle(now[1], a[1], b[1])) for now, a, b in zip(current, *bounds, strict=True)
    )


def _with_rates(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with ``factor`` times the rate of every link between two nodes."""
    rates = tuple(tuple(rate * factor for rate in row) for row in cluster.bandwidth_bytes_per_s)
    return msgspec.structs.replace(cluster, bandwidth_bytes_per_s=rates)


def backward_codec(spec: CodecSpec) -> CodecSpec:
    """Of the gradients of values coded by ``spec`` (docs/codecs.md)."""
    return GRADIENT.get(spec, spec)


def _dense(placement: Placement) -> tuple[tuple[CodecSpec, CodecSpec], ...]:
    return ((IDENTITY, IDENTITY),) * len(placement.boundaries)
