"""What calibration reports is what a device sustains."""

from __future__ import annotations

import math
import time

import pytest

from fusionllm.compute import CALIBRATIONS, calibrate, warm_up
from fusionllm.compute.timing import sustained_s
from fusionllm.errors import UserError
from fusionllm.estimate.device import fit_rates


def test_a_device_that_works_a_part_of_the_time_shows_it():
    """A quarter of a core: three calls of four run at once, the fourth waits for its turn."""
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            time.sleep(0.02)

    assert 0.004 < sustained_s(call) < 0.01


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", CALIBRATIONS)
def test_every_kind_of_operator_is_measured(backend: str, precision: str):
    pytest.importorskip(backend)
    ready = warm_up(backend, "cpu")
    if precision not in ready.dtypes:
        with pytest.raises(UserError, match=precision):
            calibrate(backend, "cpu", precision)
        return
    profile = calibrate(backend, "cpu", precision)
    own = {"matmul", "attention", "memory"} | ({"convolution"} if "aten.conv2d.default" in ready.operators else set())
    assert {sample.kind for sample in profile.samples} == own
    assert profile.memory_bytes > 0 and all(0 < sample.seconds < 10 for sample in profile.samples)
    assert 0 < fit_rates(profile.samples).matmul < math.inf
