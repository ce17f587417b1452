"""Ratios: which codec each link of a plan uses. Pure functions over the links' dense times.

On the path: Placement -> **CodecSpec per link** -> `compress`. ``adatopk-paper`` is the rule of the FusionLLM paper as
we read it, kept to compare with; ``deadline`` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from fusionllm.errors import PlanError, UserError, known_names
from fusionllm.ir.codec import IDENTITY, CodecSpec, CodecSpeed, codec_spec, expected_num_bytes, fit_codec, parse_codec

#: Dense first, then smaller and smaller on the wire; loss grows along it. Of a model that begins at random.
LADDER = tuple(
    parse_codec(text)
    for text in ("identity", "cast", "int8:block=64", "hadamard", "klt-ec:rate=1.3", "klt-ec:rate=0.5,refresh=200")
)
#: Of a pretrained one: 4 bits forward, or a few channels cut off, lose of what it knew before it can adapt.
PRETRAINED = (*LADDER[:3], parse_codec("outlier:bits=6"))
#: What the gradients of values take that a rung codes, never more bytes; others take the same. `benchmarks convergence`
#: and `benchmarks finetune` ran these pairs.
GRADIENT = {
    LADDER[3]: parse_codec("tangent(hadamard)"),
    LADDER[4]: parse_codec("tangent:bits=8(klt-ec:rate=1.1)"),
    LADDER[5]: parse_codec("tangent:bits=8(klt-ec:rate=0.355,refresh=200)"),
    PRETRAINED[3]: parse_codec("tangent:bits=8(hadamard:bits=2)"),
}
#: Steps more, as a share, to the same loss when one direction of one cut is coded so. From `benchmarks convergence`,
#: three cuts both ways: losses of 0.006 and 0.047 nats where a tenth more steps gave 0.025.
EXTRA_STEPS = {LADDER[4]: 0.004, LADDER[5]: 0.03}


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
    """Ours: each link takes the first codec of the ladder with which it is no longer the bottleneck (`schedule.coded`
    then moves single links).

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
DEADLINE = "deadline"
RATIO_RULES: dict[str, Rule] = {"adatopk-paper": adatopk_paper, "uniform-topk": uniform_topk, DEADLINE: deadline}


def choose_codecs(rule: str, loads: Sequence[LinkLoad], number: float) -> list[CodecSpec]:
    """Codecs by the name of a rule. Raises UserError for one that is not known."""
    if rule not in RATIO_RULES:
        raise UserError(f"unknown ratio rule {rule!r}; {known_names(rule, RATIO_RULES)}")
    return RATIO_RULES[rule](loads, number)


def default_floor(pretrained: bool) -> str:
    """The most lossy codec for a model that begins at random, or knows something already."""
    return str((PRETRAINED if pretrained else LADDER)[-1])


def ladder_to(floor: str) -> tuple[CodecSpec, ...]:
    """The codecs that ``deadline`` may choose from. Raises UserError for a floor of no ladder."""
    for ladder in (LADDER, PRETRAINED):
        for count, spec in enumerate(ladder, 1):
            if str(spec) == floor:
                return ladder[:count]
    known = [str(spec) for spec in (*LADDER, PRETRAINED[-1])]
    raise UserError(f"floor is {floor!r}, no codec of the ladder; {known_names(floor, known)}")


def check_rule(name: str, ratio: float, floor: str) -> None:
    """Raises UserError for a rule, ratio or floor that is not one; an empty floor is left to the model."""
    if name not in RATIO_RULES:
        raise UserError(f"rule is {name!r}; {known_names(name, RATIO_RULES)}")
    if not 1 <= ratio < float("inf"):
        raise UserError(f"ratio is {ratio}; it must be at least 1 and finite")
    if floor:
        ladder_to(floor)
