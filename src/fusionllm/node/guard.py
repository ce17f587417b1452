"""Quality guard: what codecs do to the messages of a stage, looked at now and then, and a way back to dense.

Pure but for a line of log. The sender of a message decodes it again on a sample and compares. When the error of a link
has run away from what it was in the beginning, that link sends dense instead of that codec for the rest of the job: a
message names its codec, so its receiver need not be asked. On no path; `node.codecs` feeds it.
"""

from __future__ import annotations

import logging
import math
from statistics import median

from fusionllm.errors import RemoteProtocolError

log = logging.getLogger(__name__)

#: Messages of a link and kind that are looked at: the first few, then one in so many.
FIRST = 5
EVERY = 32
#: Run away: this many looks in a row beyond so many times the beginning's error, and beyond a squared error of 5 %.
STRIKES = 3
TIMES = 4.0
LEAST = 0.05

Way = tuple[str, int, str]


class Guard:
    """One per stage and job. A way is (kind of message, other stage, codec)."""

    def __init__(self) -> None:
        self._seen: dict[Way, int] = {}
        self._first: dict[Way, list[float]] = {}
        self._strikes: dict[Way, int] = {}
        self._dense: set[Way] = set()
        #: Of the last message looked at, by kind and stage.
        self.errors: dict[tuple[str, int], float] = {}

    def is_dense(self, way: Way) -> bool:
        """Whether the way was given up on."""
        return way in self._dense

    def state(self) -> dict[Way, list[float]]:
        """Of each way: messages seen, strikes, whether it was given up, and the errors it began with."""
        return {
            way: [seen, self._strikes.get(way, 0), way in self._dense, *self._first.get(way, [])]
            for way, seen in self._seen.items()
        }

    def load(self, way: Way, looks: list[float]) -> None:
        """Take what `state` gave. Raises RemoteProtocolError."""
        if not 3 <= len(looks) <= 3 + FIRST or not all(map(math.isfinite, looks[:3])):
            raise RemoteProtocolError(f"{looks!r:.80} is no state of a guard")
        seen, strikes, is_dense, *first = looks
        self._seen[way], self._strikes[way], self._first[way] = int(seen), int(strikes), first
        if is_dense:
            self._dense.add(way)

    def wants(self, way: Way) -> bool:
        """Count a message; whether to look at it."""
        seen = self._seen[way] = self._seen.get(way, -1) + 1
        return seen < FIRST or seen % EVERY == 0

    def note(self, way: Way, nmse: float) -> None:
        """Take the error of a message: squared, over its square."""
        kind, stage, codec = way
        self.errors[kind, stage] = nmse
        first = self._first.setdefault(way, [])
        if len(first) < FIRST:
            first.append(nmse)
            return
        limit = max(LEAST, TIMES * median(first))
        self._strikes[way] = 0 if nmse <= limit else self._strikes.get(way, 0) + 1
        if self._strikes[way] >= STRIKES:
            self._dense.add(way)
            log.warning(
                "%s to stage %d travels dense instead of by %s from now on: its error is %.2g, it began with %.2g",
                kind, stage, codec, nmse, median(first),
            )  # fmt: skip
