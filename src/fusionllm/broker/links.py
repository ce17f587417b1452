"""Codecs of a job's links: as asked, by a rule, and by that rule again when the job's own traffic shows other numbers.

Pure. On the path: placement and rule -> **LinkCodecs** of every pair of stages -> Assign and Planned, later Commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from math import isfinite
from statistics import median

import msgspec

from fusionllm.errors import GraphError, PlanError, RemoteProtocolError
from fusionllm.ir.cluster import LinkProfile, check_link_profile
from fusionllm.ir.codec import IDENTITY, CodecSpec, expected_num_bytes, parse_codec
from fusionllm.protocol.membership import Member
from fusionllm.protocol.messages import Compression, LinkChoice, LinkCodecs, Recoded
from fusionllm.schedule.coded import Coded, Coding, backward_codec, replay_coded, settle_codecs
from fusionllm.schedule.placement import Cluster, Workload, build_models
from fusionllm.schedule.ratios import LADDER, check_rule, default_floor, ladder_to
from fusionllm.units import format_bandwidth

Pair = tuple[int, int]
_DENSE = LinkCodecs(str(IDENTITY), str(IDENTITY))


def ladder_of(compression: Compression) -> tuple[CodecSpec, ...]:
    """What the rule may choose from, dense first. Raises UserError."""
    if not compression.rule:
        return LADDER[:1]
    check_rule(compression.rule, compression.ratio, compression.floor)
    return ladder_to(compression.floor or default_floor(pretrained=True))


def codecs_by_hand(nodes: Sequence[Member], compression: Compression) -> tuple[tuple[CodecSpec, CodecSpec], ...]:
    """Of the links of neighbours: forward and backward as asked, on links between fences or on all."""
    codecs = parse_codec(compression.forward), parse_codec(compression.backward)
    every = compression.links == "all"
    return tuple(codecs if every or a.fence != b.fence else (IDENTITY, IDENTITY) for a, b in pairwise(nodes))


def link_codecs(codecs: Sequence[tuple[CodecSpec, CodecSpec]]) -> dict[tuple[int, int], LinkCodecs]:
    """Of every pair of stages, the earlier one first, what is not dense: the smallest codecs on the way."""
    found = {}
    for j, k in combinations(range(len(codecs) + 1), 2):
        out, back = (min((pair[way] for pair in codecs[j:k]), key=_share) for way in (0, 1))
        if (out, back) != (IDENTITY, IDENTITY):
            found[j, k] = LinkCodecs(str(out), str(back))
    return found


def _share(spec: CodecSpec) -> float:
    """Bytes of a message of usual size."""
    return expected_num_bytes(spec, (128, 1024), "float32")


def link_choices(
    codecs: Mapping[Pair, LinkCodecs], num_stages: int, compression: Compression
) -> dict[Pair, LinkChoice]:
    """All that each link may use: the codecs it has, or where the rule is applied again any of the ladder."""
    if compression.rule != "deadline" or not compression.rule_every:
        return {pair: LinkChoice((link.forward,), (link.backward,)) for pair, link in codecs.items()}
    rungs = ladder_of(compression)[1:]
    choice = LinkChoice(tuple(map(str, rungs)), tuple(str(backward_codec(spec)) for spec in rungs))
    return dict.fromkeys(combinations(range(num_stages), 2), choice)


class Tuner:
    """Applies the rule ``deadline`` again every so many steps, to what the job itself has shown meanwhile.

    The median over these steps of each stage's seconds of compute, and the latest goodput of each link, replace what
    was measured before the job.

    Args:
        coded: the plan under way. coding: seconds of codecs on the nodes.
    """

    def __init__(
        self, workload: Workload, cluster: Cluster, coded: Coded, coding: Coding, compression: Compression
    ) -> None:
        self._workload, self._cluster, self._placement, self._coding = workload, cluster, coded.placement, coding
        self._compression, self._codecs = compression, coded.codecs
        self._index = {cluster.nodes[i].name: i for i in coded.placement.nodes}
        self._rates: dict[Pair, float] = {}
        self._compute_s: dict[int, list[float]] = {}
        self._num_steps = 0

    def observe(self, name: str, compute_s: float, links: Mapping[str, LinkProfile]) -> None:
        """What a stage has seen in a step. Raises RemoteProtocolError for what cannot be."""
        if not (isfinite(compute_s) and compute_s >= 0):
            raise RemoteProtocolError(f"{name} reported {compute_s} s of compute")
        self._compute_s.setdefault(self._index[name], []).append(compute_s)
        for peer, profile in links.items():
            if peer in self._index:
                try:
                    rate = check_link_profile(profile).bandwidth_bytes_per_s
                except GraphError as error:
                    raise RemoteProtocolError(f"{name} reported a {error}") from None
                if rate > 0:
                    self._rates[self._index[name], self._index[peer]] = rate

    def is_due(self) -> bool:
        """Count a step; whether the rule is to be applied now."""
        self._num_steps += 1
        return self._num_steps % self._compression.rule_every == 0

    def retune(self) -> tuple[Recoded, ...]:
        """Links whose codecs change."""
        cluster, workload = self._seen_cluster(), self._seen_workload()
        self._compute_s = {}
        try:
            codecs = settle_codecs(
                self._codecs, workload, cluster, self._placement, coding=self._coding,
                ladder=ladder_of(self._compression), slow_only=self._compression.links == "slow",
            )  # fmt: skip
            old_s, new_s = (
                replay_coded(workload, cluster, self._placement, found, self._coding).step_s
                for found in (self._codecs, codecs)
            )
        except PlanError:  # a link that is down for now
            return ()
        old, new = link_codecs(self._back(self._codecs)), link_codecs(self._back(codecs))
        self._codecs = codecs
        stages, _ = build_models(workload, cluster, self._placement)
        busiest_s = max(stage.forward_s + stage.backward_s for stage in stages)
        found = []
        for j, k in sorted({*old, *new}):
            if old.get((j, k)) == new.get((j, k)):
                continue
            a, b = self._placement.nodes[j], self._placement.nodes[k]
            out, back = (format_bandwidth(cluster.bandwidth_bytes_per_s[x][y]) for x, y in ((a, b), (b, a)))
            why = (
                f"{out} there and {back} back seen, the busiest stage takes {busiest_s:.3g} s a microbatch; "
                f"a step is to take {new_s:.3g} s instead of {old_s:.3g} s"
            )
            link = f"{cluster.nodes[a].name}->{cluster.nodes[b].name}"
            found.append(Recoded(link, new.get((j, k), _DENSE), why if k == j + 1 else ""))
        return tuple(found)

    @staticmethod
    def _back(codecs: Sequence[tuple[CodecSpec, CodecSpec]]) -> list[tuple[CodecSpec, CodecSpec]]:
        return [(out, backward_codec(back)) for out, back in codecs]

    def _seen_cluster(self) -> Cluster:
        known, rates = self._cluster.bandwidth_bytes_per_s, dict(self._rates)
        count = range(len(self._cluster.nodes))
        seen = tuple(tuple(rates.get((a, b), known[a][b]) for b in count) for a in count)
        return msgspec.structs.replace(self._cluster, bandwidth_bytes_per_s=seen)

    def _seen_workload(self) -> Workload:
        """With every stage's operators as much slower or faster as the stage was."""
        stages, _ = build_models(self._workload, self._cluster, self._placement)
        device_s = dict(self._workload.device_s)
        for stage, i in zip(stages, self._placement.nodes):
            seen_s = median(self._compute_s.get(i) or [0.0]) / self._workload.num_microbatches
            device, planned_s = self._cluster.nodes[i].device, stage.forward_s + stage.backward_s
            if seen_s > 0 and planned_s > 0:
                device_s[device] = tuple(seconds * seen_s / planned_s for seconds in device_s[device])
        return msgspec.structs.replace(self._workload, device_s=device_s)
