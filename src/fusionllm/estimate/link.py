"""Link model: seconds for a message, from a latency and a rate that depends on its size.

Pure. On the path: probes or a cluster file -> **LinkRates** -> `schedule`. Small messages do not reach a link's rate
(protocol, slow start); between measured sizes the rate is interpolated over the logarithm of the size, beyond them it
stays. One measured size is the alpha-beta model of the FusionLLM paper, seconds = alpha + bytes / rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from fusionllm.errors import UserError
from fusionllm.ir.codec import CodecSpeed


class LinkRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of a link. ``points``: (message bytes, bytes per second), sizes ascending, at least one."""

    latency_s: float
    points: tuple[tuple[float, float], ...]

    def rate_at(self, num_bytes: float) -> float:
        """Bytes per second of a message of this size."""
        sizes, rates = zip(*self.points)
        return float(np.interp(math.log(max(num_bytes, 1.0)), np.log(sizes), rates))

    def seconds(self, num_bytes: float, numel: int = 0, codec: CodecSpeed | None = None) -> float:
        """Until the last byte is there; with ``codec``, ``numel`` elements are encoded before and decoded after."""
        coding_s = codec.encode_s(numel) + codec.decode_s(numel) if codec is not None else 0.0
        return self.latency_s + num_bytes / self.rate_at(num_bytes) + coding_s


def fit_link(samples: Sequence[tuple[float, float]], round_trip_s: float | None = None) -> LinkRates:
    """From (message bytes, seconds until it was there) of one direction.

    Args:
        round_trip_s: of an empty message; without it the latency is what the smallest messages leave over.

    Raises:
        UserError: no samples, or one that is not finite and above zero.
    """
    if not samples or not all(0 < b < math.inf and 0 < s < math.inf for b, s in samples):
        raise UserError("a link is fitted from at least one pair of bytes and seconds, finite and above zero")
    by_size: dict[float, list[float]] = {}
    for num_bytes, seconds in samples:
        by_size.setdefault(num_bytes, []).append(seconds)
    medians = [(num_bytes, float(np.median(by_size[num_bytes]))) for num_bytes in sorted(by_size)]
    latency_s = round_trip_s / 2 if round_trip_s is not None else _intercept(medians)
    latency_s = min(latency_s, 0.999 * min(seconds for _, seconds in medians))
    points = tuple((num_bytes, num_bytes / (seconds - latency_s)) for num_bytes, seconds in medians)
    return LinkRates(latency_s=latency_s, points=points)


def _intercept(medians: Sequence[tuple[float, float]]) -> float:
    """Seconds at no bytes, on the line through the two smallest sizes."""
    if len(medians) < 2:
        return 0.0
    (small, fast), (large, slow) = medians[:2]
    return max(0.0, fast - small * (slow - fast) / (large - small))
