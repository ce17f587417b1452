"""Compress: tensors to payloads and back, one file per family of codecs. See ``docs/codecs.md``.

On the path: compute's Tensor -> **Payload** -> protocol's Frame. Knows torch; knows no socket, plan or model.
"""

from __future__ import annotations

from fusionllm.compress.calibrate import measure_speed
from fusionllm.compress.codec import Codec, CodecState, Payload, Reference, payload_num_bytes
from fusionllm.compress.cut import Cut
from fusionllm.compress.distortion import Distortion, measure_distortion
from fusionllm.compress.envelope import seal, unseal
from fusionllm.compress.registry import (
    CODECS,
    WRAPPERS,
    check_num_bytes,
    decode,
    dtype_name,
    encode,
    encode_or_dense,
    init,
    remember,
    support,
)

__all__ = [
    "CODECS", "WRAPPERS", "Codec", "CodecState", "Cut", "Distortion", "Payload", "Reference",
    "check_num_bytes", "decode", "dtype_name", "encode", "encode_or_dense", "init", "measure_distortion",
    "measure_speed", "payload_num_bytes", "remember", "seal", "support", "unseal",
]  # fmt: skip
