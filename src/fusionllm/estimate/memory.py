"""Memory of a stage under a pipeline schedule: weights, gradients, optimizer, and the stash of microbatches in flight.

Pure. On the path: OpWork -> **bytes per operator** -> `schedule`, which adds up what a stage holds and multiplies the
stash by the microbatches its program keeps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fusionllm.errors import UserError, known_names
from fusionllm.estimate.work import OpWork

#: Copies of a trained parameter that an optimizer of torch keeps beside it, at most (adafactor: rows and columns only).
OPTIMIZER_COPIES = {
    "adadelta": 2, "adafactor": 0, "adagrad": 1, "adam": 2, "adamax": 2, "adamw": 2, "asgd": 1, "muon": 2, "nadam": 2,
    "none": 0, "radam": 2, "rmsprop": 3, "rprop": 2, "sgd": 1,
}  # fmt: skip


class StageMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes a range of operators needs. ``stash_bytes`` is of one microbatch."""

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    stash_bytes: float

    @property
    def state_bytes(self) -> float:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def total_bytes(self, in_flight: int) -> float:
        """With ``in_flight`` microbatches between forward and backward."""
        return self.state_bytes + in_flight * self.stash_bytes


def memory_of(works: Sequence[OpWork], optimizer: str = "adamw") -> StageMemory:
    """What these operators need together. Raises UserError for an optimizer that is not known."""
    if optimizer not in OPTIMIZER_COPIES:
        raise UserError(f"optimizer {optimizer!r}; {known_names(optimizer, OPTIMIZER_COPIES)}")
    trained = sum(work.trained_bytes for work in works)
    return StageMemory(
        weight_bytes=sum(work.param_bytes for work in works),
        gradient_bytes=trained,
        optimizer_bytes=trained * OPTIMIZER_COPIES[optimizer],
        stash_bytes=sum(work.saved_bytes for work in works),
    )
