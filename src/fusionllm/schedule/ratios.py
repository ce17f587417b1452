"""Ratios: which codec each link of a plan uses. Pure functions over the links' dense times.

On the path: Placement -> **CodecSpec per link** -> `compress`. ``adatopk-paper`` is the rule of the FusionLLM paper as
we read it, kept to compare with; ``deadline`` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fusionllm.errors import PlanError, UserError
from fusionllm.ir.codec import IDENTITY, CodecSpec, CodecSpeed, codec_spec, expected_num_bytes, fit_codec

#: Dense first, then smaller and smaller on the wire; loss grows along it.
LADDER = tuple(
    codec_spec(name, parameters)
    for name, parameters in (
        ("identity", {}), ("cast", {}), ("int8", {"block": 64}), ("hadamard", {}), ("hadamard", {"bits": 2}),
    )
)  # fmt: skip


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of a link: the tensor that crosses per microbatch, and bytes per second."""

    shape: tuple[int, ...]
    dtype: str
    bandwidth_bytes_per_s: float

    def seconds(self, spec: CodecSpec = IDENTITY, speed: CodecSpeed | None = None) -> float:
        """Of one message under a codec, dense where that is smaller; with ``speed`` the codec's time too."""
        fitted = fit_codec(spec, self.shape, self.dtype)
        numel = 1
        for size in self.shape:
            numel *= size
        coding_s = speed.encode_s(numel) + speed.decode_s(numel) if speed is not None and fitted != IDENTITY else 0.0
        return expected_num_bytes(fitted, self.shape, self.dtype) / self.bandwidth_bytes_per_s + coding_s


def adatopk_paper(loads: Sequence[LinkLoad], ratio: float) -> list[CodecSpec]:
    """After FusionLLM: r_i = max(1, 3 r R_i / max_j R_j) for dense times R; Top-K with int64 positions, float32 values.

    Kept as written: for 1 < r_i < 3 the message is larger than dense, as a kept element takes 12 bytes. Links with
    r_i = 1 stay dense. Raises PlanError for a ratio below 1.
    """
    if not 1 <= ratio < float("inf"):
        raise PlanError(f"ratio {ratio}; it must be at least 1 and finite")
    slowest_s = max((load.seconds() for load in loads), default=0.0)
    ratios = [max(1.0, 3 * ratio * load.seconds() / slowest_s) if slowest_s > 0 else 1.0 for load in loads]
    return [codec_spec("topk-paper", {"ratio": r}) if r > 1 else IDENTITY for r in ratios]


def uniform_topk(loads: Sequence[LinkLoad], ratio: float) -> list[CodecSpec]:
    """The paper's baseline: the same Top-K everywhere. Raises PlanError for a ratio below 1."""
    if not 1 <= ratio < float("inf"):
        raise PlanError(f"ratio {ratio}; it must be at least 1 and finite")
    return [codec_spec("topk-paper", {"ratio": ratio}) for _ in loads]


def deadline(
    loads: Sequence[LinkLoad],
    deadline_s: float,
    ladder: Sequence[CodecSpec] = LADDER,
    speeds: Sequence[CodecSpeed | None] | None = None,
) -> list[CodecSpec]:
    """Ours: each link takes the first codec of the ladder with which it is no longer the bottleneck.

    Args:
        deadline_s: seconds per microbatch of the busiest stage: what a link may take without being waited for.
        ladder: least lossy first. speeds: of each codec of it; without them coding takes no time.

    Returns:
        A codec per link, never larger on the wire than dense; where none keeps the deadline, the fastest of the ladder.
    """
    costs = list(speeds) if speeds is not None else [None] * len(ladder)
    if len(costs) != len(ladder):
        raise PlanError(f"{len(costs)} speeds for a ladder of {len(ladder)} codecs; give one per codec")
    chosen = []
    for load in loads:
        times = [load.seconds(spec, speed) for spec, speed in zip(ladder, costs)]
        first = next((k for k, seconds in enumerate(times) if seconds <= deadline_s), None)
        best = min(range(len(times)), key=lambda k: (times[k], k)) if first is None else first
        chosen.append(fit_codec(ladder[best], load.shape, load.dtype))
    return chosen


Rule = Callable[[Sequence[LinkLoad], float], list[CodecSpec]]
#: Rules by name. The number is the ratio, or the deadline in seconds.
RATIO_RULES: dict[str, Rule] = {"adatopk-paper": adatopk_paper, "uniform-topk": uniform_topk, "deadline": deadline}


def choose_codecs(rule: str, loads: Sequence[LinkLoad], number: float) -> list[CodecSpec]:
    """Codecs by the name of a rule. Raises UserError for one that is not known."""
    if rule not in RATIO_RULES:
        raise UserError(f"unknown ratio rule {rule!r}; known: {', '.join(RATIO_RULES)}")
    return RATIO_RULES[rule](loads, number)


def check_rule(name: str, ratio: float, floor: str) -> None:
    """Raises UserError for a rule, ratio or floor that is not one."""
    if name not in RATIO_RULES:
        raise UserError(f"unknown ratio rule {name!r}; known: {', '.join(RATIO_RULES)}")
    if not 1 <= ratio < float("inf"):
        raise UserError(f"ratio is {ratio}; it must be at least 1 and finite")
    if floor not in map(str, LADDER):
        raise UserError(f"floor is {floor!r}; it must be a codec of the ladder: {', '.join(map(str, LADDER))}")
