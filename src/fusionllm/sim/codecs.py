"""Codecs: what `fusionllm plan --codecs` says: nodes, cuts and a codec per link, chosen together.

On the path: Workload + Cluster + rule -> **CodedReport**. Codecs take the time assumed for devices whose rates
are known, none on others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from fusionllm.errors import UserError, known_names
from fusionllm.estimate.coding import assumed_speed
from fusionllm.estimate.device import DeviceRates
from fusionllm.ir.codec import CodecSpec, CodecSpeed
from fusionllm.schedule.coded import best_coded, ladder_factors, propose
from fusionllm.schedule.placement import Cluster, NodeModel, Workload
from fusionllm.schedule.ratios import RATIO_RULES


class CodedReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan under a rule: seconds of a step, nodes in order, and per link the codecs forward and backward."""

    rule: str
    step_s: float
    nodes: tuple[str, ...]
    boundaries: tuple[int, ...]
    codecs: tuple[tuple[str, str], ...]


def speeds_of(rates: Mapping[str, DeviceRates]) -> Callable[[CodecSpec, NodeModel], CodecSpeed | None]:
    """Seconds of a codec on a node, by the rates of its device; None where those are not known."""

    def speed(spec: CodecSpec, node: NodeModel) -> CodecSpeed | None:
        return assumed_speed(spec, rates[node.device]) if node.device in rates else None

    return speed


def check_rule(rule: str, ratio: float) -> None:
    """Raises UserError for a rule that is not known or a ratio that is none."""
    if rule and rule not in RATIO_RULES:
        raise UserError(f"--codecs is {rule!r}; {known_names(rule, RATIO_RULES)}")
    if not 1 <= ratio < float("inf"):
        raise UserError(f"--ratio is {ratio}; it must be at least 1 and finite")


def plan_codecs(
    workload: Workload, cluster: Cluster, rule: str, ratio: float, rates: Mapping[str, DeviceRates]
) -> CodedReport:
    """Plan under a rule, with the rates of devices by name. Raises PlanError when nothing fits."""
    factors = {*ladder_factors(workload), *([min(1.0, 3 / ratio)] if rule != "deadline" else [])}
    pool = propose(workload, cluster, sorted(factors, reverse=True))
    best = best_coded(pool, rule, workload, cluster, ratio=ratio, coding=speeds_of(rates))
    return CodedReport(
        rule=rule,
        step_s=best.step_s,
        nodes=tuple(cluster.nodes[k].name for k in best.placement.nodes),
        boundaries=best.placement.boundaries,
        codecs=tuple((str(out), str(back)) for out, back in best.codecs),
    )
