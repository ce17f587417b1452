"""Device model: seconds an operator takes on a device, from rates per kind of operator.

Pure. On the path: OpWork + DeviceRates -> **seconds per operator** -> `schedule`. The rates come from a calibration's
measured seconds (`fit_rates`), or from a datasheet and assumed shares of it (`estimate.library`). The model of the
FusionLLM paper, seconds = FLOPs / (lambda x peak), stays selectable: `lambda_rates`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from fusionllm.errors import UserError
from fusionllm.estimate.work import OpWork
from fusionllm.ir.cluster import OpKind, Sample

KINDS: tuple[OpKind, ...] = ("matmul", "attention", "convolution", "memory")


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Achieved rates of a device, all above zero.

    Attributes:
        matmul, attention, convolution: FLOPs per second of the operators of that kind.
        bytes_per_s: of operators that are bound by memory. launch_s: of any operator besides, at least 0.
    """

    matmul: float
    attention: float
    convolution: float
    bytes_per_s: float
    launch_s: float = 0.0

    def forward_s(self, work: OpWork) -> float:
        """Seconds of one operator, forward: computing and moving overlap, the longer one counts."""
        moving_s = work.moved_bytes / self.bytes_per_s
        rate = {"matmul": self.matmul, "attention": self.attention, "convolution": self.convolution}.get(work.kind)
        busy_s = moving_s if rate is None else max(work.flops / rate, moving_s)
        return busy_s + (self.launch_s if work.moved_bytes or work.flops else 0.0)


def lambda_rates(peak_flops_per_s: float, lam: float) -> DeviceRates:
    """After FusionLLM: every FLOP at ``lam`` of the peak, nothing else counts.

    Raises:
        UserError: ``lam`` is not in (0, 1], or the peak is not finite and above zero.
    """
    if not 0 < lam <= 1 or not 0 < peak_flops_per_s < math.inf:
        raise UserError(f"lambda {lam} of a peak of {peak_flops_per_s}; lambda lies in (0, 1], the peak above zero")
    rate = lam * peak_flops_per_s
    return DeviceRates(matmul=rate, attention=rate, convolution=rate, bytes_per_s=math.inf)


def fit_rates(samples: Sequence[Sample]) -> DeviceRates:
    """Fit the rates to measured seconds, the relative error squared being least.

    A kind that was not measured gets the rate of matmul. Rates that the samples cannot tell from infinite are infinite.

    Raises:
        UserError: no matmul among the samples, or a number that is not finite or not above zero.
    """
    for sample in samples:
        numbers = (sample.flops, sample.moved_bytes, sample.seconds)
        if not all(0 <= x < math.inf for x in numbers) or sample.seconds <= 0:
            raise UserError(
                f"calibration sample {sample}: FLOPs and bytes are finite and not negative, seconds above 0"
            )
    if not any(sample.kind == "matmul" and sample.flops > 0 for sample in samples):
        raise UserError("a calibration without a matmul; measure at least one of each kind of operator")
    rows = np.zeros((len(samples), 1 + len(KINDS)))
    for row, sample in zip(rows, samples):
        row[0] = 1.0
        row[1 + KINDS.index(sample.kind)] = sample.moved_bytes if sample.kind == "memory" else sample.flops
    rows /= np.array([[sample.seconds] for sample in samples])
    launch_s, *per_unit = _least_squares(rows)
    rates = [1 / x if x > 0 else math.inf for x in per_unit]
    measured = {sample.kind for sample in samples}
    matmul, attention, convolution, memory = (
        rate if kind in measured else rates[0] if kind != "memory" else math.inf for kind, rate in zip(KINDS, rates)
    )
    return DeviceRates(
        matmul=matmul, attention=attention, convolution=convolution, bytes_per_s=memory, launch_s=launch_s
    )


def _least_squares(rows: np.ndarray) -> list[float]:
    """Non-negative x for which ``rows @ x`` is nearest to one: columns that come out negative are left out."""
    used = [k for k in range(rows.shape[1]) if np.any(rows[:, k])]
    while used:
        scale = np.linalg.norm(rows[:, used], axis=0)
        found, *_ = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)
        if found.min() >= 0:
            solution = [0.0] * rows.shape[1]
            for k, value in zip(used, found / scale):
                solution[k] = float(value)
            return solution
        used.pop(int(found.argmin()))
    return [0.0] * rows.shape[1]
