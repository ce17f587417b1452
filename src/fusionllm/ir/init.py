"""How a parameter begins, as data: a few steps that anyone computes alike from (seed, name).

Ground floor: names the steps; `store.initial` computes them, `capture.inits` reads them off a model's constructor.
"""

from __future__ import annotations

import math

import msgspec

from fusionllm.errors import GraphError

#: Step -> how many numbers it takes. The first step fills the tensor, the others change every element.
STEPS = {"constant": 1, "normal": 2, "uniform": 2, "erfinv": 0, "mul": 1, "add": 1, "clamp": 2}
FILLS = ("constant", "normal", "uniform")
MAX_STEPS = 16


class Init(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of a parameter.

    Attributes:
        steps: (name, numbers): ``constant`` value; ``normal`` mean, deviation; ``uniform`` low, high; then ``erfinv``,
            ``mul``, ``add``, ``clamp`` low, high.
        zero_rows: indices into the first axis of rows that are zero, such as that of the padding token.
    """

    steps: tuple[tuple[str, tuple[float, ...]], ...]
    zero_rows: tuple[int, ...] = ()


def verify_init(init: Init) -> None:
    """Raises GraphError for steps that mean nothing."""
    if not 1 <= len(init.steps) <= MAX_STEPS or init.steps[0][0] not in FILLS:
        raise GraphError(f"an initial value of {len(init.steps)} steps; it has 1 to {MAX_STEPS} and begins by filling")
    for index, (name, numbers) in enumerate(init.steps):
        if name not in STEPS or (name in FILLS) != (index == 0) or len(numbers) != STEPS[name]:
            raise GraphError(f"step {name[:40]!r} with {len(numbers)} numbers cannot stand in an initial value")
        if not all(math.isfinite(number) for number in numbers):
            raise GraphError(f"step {name} of an initial value with {numbers}; its numbers must be finite")
