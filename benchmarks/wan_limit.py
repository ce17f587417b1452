"""How fast a step of a pipeline could be at best on given devices and links: what physics leaves, no schedule's fault.

The larger of what each device and each link needs for its own work of a step, plus the least time that passes before
its first piece can come to it and after its last one has left it (fill and drain of a pipeline that is flushed every
step). Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: A backward costs about twice its forward.
FORWARD_SHARE = 1 / 3


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
    compute_s: Sequence[float], forward: Sequence[Crossing], backward: Sequence[Crossing], num_microbatches: int
) -> Limit:
    """The limit of a step.

    Args:
        compute_s: of each stage's device, for all of a step, at its own speed.
        forward, backward: crossings after stage 0, 1, ...; ``backward[k]`` goes from stage k + 1 to k.
    """
    f = [seconds / num_microbatches * FORWARD_SHARE for seconds in compute_s]
    b = [seconds / num_microbatches * (1 - FORWARD_SHARE) for seconds in compute_s]
    cf = [crossing.microbatch_s(num_microbatches) for crossing in forward]
    cb = [crossing.microbatch_s(num_microbatches) for crossing in backward]
    bounds = {
        f"stage {s}": sum(f[:s]) + sum(cf[:s]) + compute_s[s] + sum(b[:s]) + sum(cb[:s]) for s in range(len(compute_s))
    }
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
