"""How fast a step of a pipeline could be at best on given devices and links: what physics leaves, no schedule's fault.

The largest of: what each device needs for all its work of a step, which may hide in waits; what it needs for its
forwards and backwards, and each link for its bytes, plus the least time that passes before their first piece can come
and after their last one has left (fill and drain of a pipeline that is flushed every step). A stage's backwards wait
for the first microbatch to go to the end and come back, and the last one does so after all its forwards: where that
takes long, the other half of the work does not fill the wait. Pure: numbers in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """What a stage has to do in a step, in processor seconds, and what its host may use.

    Attributes:
        forward_s, backward_s: of one microbatch. work_s: of all forwards and backwards. all_s: of everything.
        share: of a core, or cores. period_s: its quota is ``share * period_s`` in each, at any speed.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    work_s: float = 0.0
    all_s: float = 0.0
    share: float = 1.0
    period_s: float = 0.0

    def part_s(self, one_s: float) -> float:
        """Of all forwards, or of all backwards, when a microbatch has ``one_s`` of them."""
        both_s = self.forward_s + self.backward_s
        return self.work_s * one_s / both_s if both_s else 0.0

    def fastest_s(self, work_s: float) -> float:
        """The least time for work of one thread: the quota at the end of a period, then those of the next ones."""
        quota_s = self.share * self.period_s
        if self.share >= 1 or work_s <= quota_s:
            return work_s
        if not quota_s:
            return work_s / self.share
        periods = math.ceil(work_s / quota_s) - 2
        return quota_s + periods * self.period_s + work_s - (periods + 1) * quota_s


@dataclass(frozen=True)
class Crossing:
    """What goes between stage ``index`` and the next in a step, one direction.

    Attributes:
        num_bytes: of one step. delay_s: one way.
        rates: pipe -> bytes per second, of those on the way that have a rate.
    """

    index: int
    num_bytes: float
    delay_s: float
    rates: dict[str, float] = field(default_factory=dict)

    def microbatch_s(self, num_microbatches: int) -> float:
        """From the first byte sent to the last one received of a microbatch alone on the way."""
        slowest = min(self.rates.values(), default=0.0)
        return self.delay_s + (self.num_bytes / num_microbatches / slowest if slowest else 0.0)


@dataclass(frozen=True)
class Limit:
    """The limit of a step and what sets it."""

    seconds: float
    bottleneck: str


def step_limit(
    stages: Sequence[Stage], forward: Sequence[Crossing], backward: Sequence[Crossing], num_microbatches: int
) -> Limit:
    """The limit of a step.

    Args:
        forward, backward: crossings after stage 0, 1, ...; ``backward[k]`` goes from stage k + 1 to k.
    """
    f = [stage.fastest_s(stage.forward_s) for stage in stages]
    b = [stage.fastest_s(stage.backward_s) for stage in stages]
    cf = [crossing.microbatch_s(num_microbatches) for crossing in forward]
    cb = [crossing.microbatch_s(num_microbatches) for crossing in backward]
    bounds: dict[str, float] = {}
    for s, stage in enumerate(stages):
        flush_s = sum(f[:s]) + sum(cf[:s]) + sum(b[:s]) + sum(cb[:s])
        there_and_back_s = sum(f[s + 1 :]) + sum(cf[s:]) + sum(b[s + 1 :]) + sum(cb[s:])
        bounds[f"stage {s}"] = max(
            stage.all_s / stage.share,
            flush_s + stage.fastest_s(stage.work_s),
            flush_s + f[s] + there_and_back_s + stage.fastest_s(stage.part_s(stage.backward_s)),
            flush_s + stage.fastest_s(stage.part_s(stage.forward_s)) + there_and_back_s + b[s],
        )
    work: dict[str, float] = {}
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    for crossing, is_forward in [(c, True) for c in forward] + [(c, False) for c in backward]:
        k = crossing.index
        if is_forward:
            head = sum(f[: k + 1]) + sum(cf[:k])
            tail = sum(f[k + 1 :]) + sum(cf[k + 1 :]) + sum(b) + sum(cb)
        else:
            head = sum(f) + sum(cf) + sum(b[k + 1 :]) + sum(cb[k + 1 :])
            tail = sum(b[: k + 1]) + sum(cb[:k])
        for pipe, rate in crossing.rates.items():
            work[pipe] = work.get(pipe, 0.0) + crossing.num_bytes / rate
            before[pipe] = min(before.get(pipe, head), head)
            after[pipe] = min(after.get(pipe, tail + crossing.delay_s), tail + crossing.delay_s)
    bounds |= {pipe: before[pipe] + work[pipe] + after[pipe] for pipe in work}
    name = max(bounds, key=lambda key: bounds[key])
    return Limit(bounds[name], name)
