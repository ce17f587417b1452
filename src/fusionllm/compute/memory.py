"""How much memory this process has needed at most, in bytes."""

from __future__ import annotations

import sys


def resident_peak_bytes() -> int:
    """The resident peak of this process; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in bytes there, in KiB elsewhere
