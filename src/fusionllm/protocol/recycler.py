"""Memory for arriving messages, used again once nobody holds it.

Training sends the same few sizes for ever. Fresh memory costs a page fault per 4 KiB, about 0.3 s per GB, a
quarter of what TLS itself takes; a buffer whose last outside reference is gone costs nothing. Whoever still
looks at a buffer (a memoryview, a tensor over it) holds a reference to it, so it cannot be handed out again
under their eyes.
"""

from __future__ import annotations

from sys import getrefcount

from fusionllm.units import KIB

_SMALL_BYTES = 64 * KIB
_MAX_KEPT = 8


def _references(kept: list[bytearray], index: int) -> int:
    return getrefcount(kept[index])


#: What ``_references`` says of a buffer that only the list holds; it depends on the interpreter.
_UNHELD = _references([bytearray(1)], 0)


class Recycler:
    """Hands out ``bytearray``s; keeps the youngest, ``limit_bytes`` in all at most, for another round."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: list[bytearray] = []
        self._kept_bytes = 0

    def take(self, num_bytes: int) -> bytearray:
        """A buffer of exactly that size, its content arbitrary."""
        if num_bytes < _SMALL_BYTES or num_bytes > self._limit_bytes:
            return bytearray(num_bytes)
        # Youngest first, it may still be cached; no loop variable may hold a buffer, it would count.
        for index in reversed(range(len(self._kept))):
            if len(self._kept[index]) == num_bytes and _references(self._kept, index) == _UNHELD:
                self._kept.append(self._kept.pop(index))
                return self._kept[-1]
        fresh = bytearray(num_bytes)
        self._kept.append(fresh)
        self._kept_bytes += num_bytes
        while self._kept_bytes > self._limit_bytes or len(self._kept) > _MAX_KEPT:
            self._kept_bytes -= len(self._kept.pop(0))
        return fresh
