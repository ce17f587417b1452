"""What is measured of devices and links. Nouns: nodes measure them, the broker keeps them, planners read them.

Ground floor. On the path: node -> **NodeProfile, LinkProfile** -> `estimate` -> `schedule`.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Literal

import msgspec

from fusionllm.errors import GraphError
from fusionllm.ir.codec import CodecSpeed

#: Kinds of operators that take their time differently.
OpKind = Literal["matmul", "attention", "convolution", "memory"]
#: What a stage computes in: products in the middle two (autocast), weights and values in the last.
Precision = Literal["float32", "bfloat16", "float16", "bfloat16-weights"]
MAX_SAMPLES = 256
#: A backward pass computes the gradients of both operands of each product.
BACKWARD_OVER_FORWARD = 2.0


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured: what one operator does forward, and the seconds of that: its forward and backward over three."""

    kind: OpKind
    flops: float
    moved_bytes: float
    seconds: float


class NodeProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as its node measured it.

    Attributes:
        device: its name, for people. memory_bytes: free for a job, above zero.
        codecs: what coding takes there, by a codec's text.
    """

    device: str
    memory_bytes: float
    samples: tuple[Sample, ...]
    codecs: dict[str, CodecSpeed] = {}


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way from one node to another.

    Attributes:
        bandwidth_bytes_per_s: of payload; 0: no way through. rtt_s: there and back, of a small message.
        inferred: not measured, taken from a pair of nodes between the same fences.
    """

    bandwidth_bytes_per_s: float
    rtt_s: float
    inferred: bool = False


NO_WAY = LinkProfile(bandwidth_bytes_per_s=0.0, rtt_s=0.0)


def check_node_profile(profile: NodeProfile) -> NodeProfile:
    """Refuse what no device could have measured. Raises GraphError with the value."""
    if not 0 < profile.memory_bytes < inf:
        raise GraphError(f"device with {profile.memory_bytes} bytes of memory")
    if not 1 <= len(profile.samples) <= MAX_SAMPLES:
        raise GraphError(f"device of {len(profile.samples)} samples; expected 1 to {MAX_SAMPLES}")
    for sample in profile.samples:
        numbers = (sample.flops, sample.moved_bytes, sample.seconds)
        if not all(isfinite(x) and x >= 0 for x in numbers) or sample.seconds <= 0:
            raise GraphError(f"calibration sample {sample}: FLOPs and bytes are finite and >= 0, seconds above 0")
    for text, speed in profile.codecs.items():
        numbers = (speed.encode_s_per_element, speed.decode_s_per_element, speed.overhead_s)
        if len(profile.codecs) > MAX_SAMPLES or not all(isfinite(x) and x >= 0 for x in numbers):
            raise GraphError(f"device whose codec {text[:40]!r} takes {speed}")
    return profile


def check_link_profile(profile: LinkProfile) -> LinkProfile:
    """Refuse what no link could have. Raises GraphError with the value."""
    if not (0 <= profile.bandwidth_bytes_per_s < inf and 0 <= profile.rtt_s < inf):
        raise GraphError(f"link of {profile.bandwidth_bytes_per_s} bytes/s and {profile.rtt_s} s of round trip")
    return profile
