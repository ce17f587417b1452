"""Units, written and read. Mbps and MB/s mixed up is off by eight and silent, so every rate inside is bytes per second.

Knows nothing of the rest of the package. ``parse_*`` read what people write in a TOML or a flag; ``format_*`` write
what people read in a log line.
"""

from __future__ import annotations

import math
import re

from fusionllm.errors import UserError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*"
_QUANTITY = re.compile(_NUMBER + r"([A-Za-z/]*)\s*")
_BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": KIB, "mib": MIB, "gib": GIB}
_BITS_PER_S = {"bps": 1, "kbps": 1e3, "mbps": 1e6, "gbps": 1e9, "kbit/s": 1e3, "mbit/s": 1e6, "gbit/s": 1e9}
_SECONDS = {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6, "min": 60, "m": 60, "h": 3600, "d": 86400}


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        below = ", being below zero" * text.strip().startswith("-")
        raise UserError(f"{text!r} is not a {what}{below}; write it like {example}")
    return float(match.group(1)), match.group(2)


def _finite(value: float, text: str, what: str) -> float:
    if not math.isfinite(value):
        raise UserError(f"{text!r} is not a finite {what}; write a smaller one")
    return value


def parse_num_bytes(text: str) -> int:
    """Read a size such as ``"1.5 GiB"`` or ``"64MB"``. Returns bytes. Raises UserError on anything else."""
    value, unit = _split(text, "size", "'64 MiB'")
    scale = _BYTES.get(unit.lower())
    if scale is None:
        raise UserError(f"{text!r}: unknown size unit {unit!r}; use one of B, KB, MB, GB, KiB, MiB, GiB")
    return int(_finite(value * scale, text, "size"))


def parse_bandwidth_bytes_per_s(text: str) -> float:
    """Read a rate such as ``"100 Mbps"`` (bits) or ``"12.5 MB/s"`` (bytes). Returns bytes per second, > 0."""
    value, unit = _split(text, "rate", "'100 Mbps' or '12.5 MB/s'")
    low = unit.lower()
    if low in _BITS_PER_S:
        rate = value * _BITS_PER_S[low] / 8
    elif low.endswith("/s") and low[:-2] in _BYTES and low != "/s":
        rate = value * _BYTES[low[:-2]]
    else:
        raise UserError(
            f"{text!r}: unknown rate unit {unit!r}; use Kbps, Mbps, Gbps (bits) or KB/s, MB/s, GB/s (bytes)"
        )
    if rate <= 0:
        raise UserError(f"{text!r}: a rate must be above zero")
    return _finite(rate, text, "rate")


def parse_duration_s(text: str) -> float:
    """Read a duration such as ``"20 ms"`` or ``"1.5 h"``. Returns seconds."""
    value, unit = _split(text, "duration", "'20 ms'")
    scale = _SECONDS.get(unit.lower())
    if scale is None:
        raise UserError(f"{text!r}: unknown time unit {unit!r}; use us, ms, s, min, h or d")
    return _finite(value * scale, text, "duration")


def format_num_bytes(num_bytes: float) -> str:
    """Write a size for people: ``"12.3 MiB"``."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_bandwidth(bytes_per_s: float) -> str:
    """Write a rate for people, in bits: ``"8.0 Mbps"``."""
    bits = bytes_per_s * 8
    for unit, scale in (("Gbps", 1e9), ("Mbps", 1e6), ("Kbps", 1e3)):
        if bits >= scale:
            return f"{bits / scale:.1f} {unit}"
    return f"{bits:.0f} bps"


def format_duration(seconds: float) -> str:
    """Write a duration for people: ``"850 ms"``, ``"12.4 s"``, ``"3 min 05 s"``, ``"2 h 10 min"``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_count(count: float) -> str:
    """Write a count for people: ``"4.7 M"``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f}"
