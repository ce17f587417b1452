"""Compress: tensors to payloads and back, one file per codec. See ``docs/codecs.md``.

On the path: compute's Tensor -> **Payload** -> protocol's Frame. Knows torch; knows no socket, plan or model.
"""

from __future__ import annotations

from fusionllm.compress.codec import Codec, CodecState, Payload, Reference, payload_num_bytes
from fusionllm.compress.registry import CODECS, check_num_bytes, decode, dtype_name, encode, init, support

__all__ = [
    "CODECS", "Codec", "CodecState", "Payload", "Reference", "check_num_bytes", "decode", "dtype_name",
    "encode", "init", "payload_num_bytes", "support",
]  # fmt: skip
