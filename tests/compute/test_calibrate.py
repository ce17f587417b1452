"""What calibration reports is what a device sustains."""

from __future__ import annotations

import time

from fusionllm.compute.calibrate import _sustained_s


def test_a_device_that_works_a_part_of_the_time_shows_it():
    """A quarter of a core: three calls of four run at once, the fourth waits for its turn."""
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            time.sleep(0.02)

    assert 0.004 < _sustained_s("cpu", call) < 0.01
