"""What calibration reports is what a device sustains."""

from __future__ import annotations

import time

import pytest

from fusionllm.compute import CALIBRATIONS, calibrate
from fusionllm.compute.timing import sustained_s


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
    profile = calibrate(backend, "cpu", precision)
    assert {sample.kind for sample in profile.samples} == {"matmul", "attention", "convolution", "memory"}
    assert profile.memory_bytes > 0 and all(0 < sample.seconds < 10 for sample in profile.samples)
