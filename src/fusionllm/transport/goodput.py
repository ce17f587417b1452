"""Goodput of a link, seen in passing: bytes delivered over the time that any were on their way. Pure."""

from __future__ import annotations

#: Less than this says more about the round trip than about the rate.
_ENOUGH_BYTES = 1 << 20
_ENOUGH_S = 0.5
#: What is older than so many busy seconds, or twice as many, counts half, then a quarter: a link's rate changes.
_MEMORY_S = 4.0


class Goodput:
    """Adds up busy spells: from the first byte queued to the last one acknowledged."""

    def __init__(self) -> None:
        self._busy_s = self._num_bytes = self._spells = 0.0
        self._since_s: float | None = None

    def queued(self, now_s: float) -> None:
        """Something is on its way."""
        if self._since_s is None:
            self._since_s = now_s
            self._spells += 1

    def delivered(self, now_s: float, num_bytes: int, *, more: bool) -> None:
        """So many bytes arrived; ``more`` are on their way, or the spell is over."""
        self._num_bytes += num_bytes
        if self._since_s is not None:
            self._busy_s += max(0.0, now_s - self._since_s)
            self._since_s = now_s if more else None
        if self._busy_s > 2 * _MEMORY_S:
            self._busy_s, self._num_bytes, self._spells = self._busy_s / 2, self._num_bytes / 2, self._spells / 2

    def bytes_per_s(self, rtt_s: float) -> float | None:
        """The rate without the round trip that every spell begins with; None before it can be told."""
        carrying_s = self._busy_s - self._spells * rtt_s
        enough = self._num_bytes >= _ENOUGH_BYTES or carrying_s >= _ENOUGH_S
        if not enough or carrying_s < self._busy_s / 4:
            return None
        return self._num_bytes / carrying_s
