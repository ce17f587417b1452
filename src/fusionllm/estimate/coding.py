"""Coding: seconds a codec takes on a device nobody measured, from the rate of its memory.

Pure data and one division. On the path: CodecSpec + DeviceRates -> **CodecSpeed** -> `schedule.coded`. Codecs are bound
by memory. The bytes below keep the proportions that were measured on a CPU (docs/codecs.md), where a cast, which reads
4 and writes 2 bytes per element, took 7 ms: an ASSUMPTION for others until `compress.measure_speed` replaces it.
"""

from __future__ import annotations

from fusionllm.estimate.device import DeviceRates
from fusionllm.ir.codec import CodecSpec, CodecSpeed

#: Bytes of memory traffic per element to encode and to decode.
TRAFFIC = {
    "identity": (0.0, 0.0),
    "cast": (6.0, 1.0),
    "int8": (16.0, 2.0),
    "int4": (17.0, 3.5),
    "fp8": (13.0, 17.0),
    "hadamard": (33.0, 21.0),
    "outlier": (47.0, 24.0),
    "topk": (28.0, 9.0),
    "topk-paper": (17.0, 3.5),
    "klt": (107.0, 54.0),
}
#: Seconds per element to encode and decode of those whose entropy coder runs on the host's processor, measured there.
ON_HOST = {"klt-ec": (3e-8, 3e-8)}
#: Operators that a codec runs, each launched by itself.
LAUNCHES = 10


def assumed_speed(spec: CodecSpec, device: DeviceRates) -> CodecSpeed | None:
    """On a device; None for a codec that nobody measured."""
    if spec.core.name in ON_HOST:
        return CodecSpeed(*ON_HOST[spec.core.name], LAUNCHES * device.launch_s)
    traffic = TRAFFIC.get(spec.core.name)
    if traffic is None:
        return None
    encode_s, decode_s = (num_bytes / device.bytes_per_s for num_bytes in traffic)
    return CodecSpeed(encode_s, decode_s, LAUNCHES * device.launch_s)
