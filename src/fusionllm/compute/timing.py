"""How long a call takes on a device that may work only part of the time. Knows no framework; for calibrations."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A size is the last of its kind when a call takes this long.
LONG_S = 0.01
_REPEATS = 3
#: Some slices of a shared processor.
_ROW_S = 0.2


def sustained_s(call: Callable[[], object]) -> float:
    """Seconds of a call, which waits for its result, in a row of them, long enough to show the pauses of its device.

    A processor share is handed out in slices (5 of every 20 ms, 25 of every 100); a short call alone fits in one.
    """
    call()  # the first warms up and does not count
    started, count = time.perf_counter(), 0
    while count < _REPEATS or time.perf_counter() < started + _ROW_S:
        call()
        count += 1
    return max((time.perf_counter() - started) / count, 1e-9)
