"""Coding: nodes, cuts and the codec of each link chosen together.

Pure decision. On the path: Workload + Cluster + LinkRule -> **ranked placements, a codec per link** -> Plan. A cut over
a slow link may be worth making only when what crosses it is compressed, so the planner is asked again with messages as
small as each rung of the ladder makes them; every placement found is then given the codecs its links need and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from fusionllm.ir.codec import IDENTITY, CodecSpec, codec_spec, expected_num_bytes, parse_codec
from fusionllm.schedule.pipeline import build_programs, pipeline_name
from fusionllm.schedule.placement import (
    Cluster,
    Placement,
    Workload,
    build_models,
    check_memory,
    find_fences,
    replay_placement,
)
from fusionllm.schedule.planner import Candidate, plan_placement
from fusionllm.schedule.ratios import LADDER, LinkLoad, choose_codecs, deadline
from fusionllm.schedule.timeline import LinkModel, StageModel, replay

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class LinkRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How links get their codecs.

    Attributes:
        name: a key of ``RATIO_RULES``. ratio: of the rules that have one.
        floor: the most lossy codec ``deadline`` may choose, one of ``LADDER``.
        slow_only: links inside a fence stay dense.
    """

    name: str
    ratio: float = 100.0
    floor: str = "hadamard"
    slow_only: bool = True

    @property
    def ladder(self) -> tuple[CodecSpec, ...]:
        return LADDER[: LADDER.index(parse_codec(self.floor)) + 1]

    def choose(self, loads: Sequence[LinkLoad], deadline_s: float) -> list[CodecSpec]:
        """A codec per load. ``deadline_s``: seconds per microbatch of the busiest stage."""
        if self.name == "deadline":
            return deadline(loads, deadline_s, self.ladder)
        return choose_codecs(self.name, loads, self.ratio)


def backward_codec(spec: CodecSpec) -> CodecSpec:
    """Of the gradients of values coded by ``spec``: rotations keep the radial part exact (docs/codecs.md)."""
    return codec_spec("tangent", {}, spec) if spec.name == "hadamard" else spec


def plan_coded(workload: Workload, cluster: Cluster, rule: LinkRule | None) -> list[Candidate]:
    """Rank placements by replayed step time under the codecs of the rule, best first. Raises PlanError.

    Without a rule everything travels dense.
    """
    dense = plan_placement(workload, cluster)
    if rule is None:
        return dense
    found: dict[Placement, str] = {}
    scales = sorted({_scale(workload, spec) for spec in rule.ladder[1:]}, reverse=True)
    for ranked in (dense, *(plan_placement(_scaled(workload, scale), cluster) for scale in scales)):
        for candidate in ranked:
            found.setdefault(candidate.placement, candidate.method)
    coded = [Candidate(method, p, coded_step_s(workload, cluster, p, rule)) for p, method in found.items()]
    return sorted(coded, key=lambda c: (c.step_s, len(c.placement.nodes), c.placement.nodes))


def coded_step_s(workload: Workload, cluster: Cluster, placement: Placement, rule: LinkRule | None) -> float:
    """Seconds of a step of one placement, its links coded by the rule if there is one. Raises PlanError."""
    if rule is None:
        return float(replay_placement(workload, cluster, placement).step_s)
    name = pipeline_name(workload.pipeline, placement.depths)
    programs = build_programs(name, len(placement.nodes), workload.num_microbatches)
    check_memory(workload, cluster, placement, programs)
    stages, links = build_models(workload, cluster, placement)
    there, back = code_links(workload, cluster, placement, rule, stages, links)
    coded = [
        msgspec.structs.replace(
            link, forward_bytes=_num_bytes(workload, cut, out), backward_bytes=_num_bytes(workload, cut, home)
        )
        for link, cut, out, home in zip(links, _cut_indices(workload, placement), there, back)
    ]
    return float(replay(programs, stages, coded).step_s)


def code_links(
    workload: Workload, cluster: Cluster, placement: Placement, rule: LinkRule,
    stages: Sequence[StageModel], links: Sequence[LinkModel],
) -> tuple[list[CodecSpec], list[CodecSpec]]:  # fmt: skip
    """Codecs of activations and of gradients, one of each per link between neighbouring stages."""
    cuts = _cut_indices(workload, placement)
    fence = {i: k for k, members in enumerate(find_fences(cluster)) for i in members}
    hops = enumerate(pairwise(placement.nodes))
    coded = [k for k, (a, b) in hops if not rule.slow_only or fence[a] != fence[b]]
    there, back = [IDENTITY] * len(links), [IDENTITY] * len(links)
    deadline_s = max(stage.forward_s + stage.backward_s for stage in stages)
    out = rule.choose([_load(workload, cuts[k], links[k].bandwidth_bytes_per_s) for k in coded], deadline_s)
    rates = [links[k].back_bandwidth_bytes_per_s or links[k].bandwidth_bytes_per_s for k in coded]
    home = rule.choose([_load(workload, cuts[k], rate) for k, rate in zip(coded, rates)], deadline_s)
    for k, forward, backward in zip(coded, out, home):
        there[k], back[k] = forward, backward_codec(backward)
    return there, back


def _cut_indices(workload: Workload, placement: Placement) -> list[int]:
    index = {cut.boundary: k for k, cut in enumerate(workload.cuts)}
    return [index[boundary] for boundary in placement.boundaries]


def _shape(workload: Workload, cut: int) -> tuple[int, int]:
    """What crosses a cut as rows, as if it were one tensor."""
    width = workload.widths[cut] if workload.widths else 1
    numel = workload.cuts[cut].num_bytes // _ITEM_BYTES[workload.wire_dtype]
    return max(1, numel // width), width


def _load(workload: Workload, cut: int, bandwidth_bytes_per_s: float) -> LinkLoad:
    return LinkLoad(shape=_shape(workload, cut), dtype=workload.wire_dtype, bandwidth_bytes_per_s=bandwidth_bytes_per_s)


def _num_bytes(workload: Workload, cut: int, spec: CodecSpec) -> float:
    if spec == IDENTITY:
        return float(workload.cuts[cut].num_bytes)
    return expected_num_bytes(spec, _shape(workload, cut), workload.wire_dtype)


def _scale(workload: Workload, spec: CodecSpec) -> float:
    """How much smaller a codec makes messages, by the first cut there is."""
    if not workload.cuts:
        return 1.0
    return min(1.0, _num_bytes(workload, 0, spec) / max(1.0, _num_bytes(workload, 0, IDENTITY)))


def _scaled(workload: Workload, scale: float) -> Workload:
    cuts = tuple(msgspec.structs.replace(c, num_bytes=max(1, int(c.num_bytes * scale))) for c in workload.cuts)
    return msgspec.structs.replace(workload, cuts=cuts)
