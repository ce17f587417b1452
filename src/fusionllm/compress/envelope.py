"""The envelope of a payload: which codec made it, how long it is, and whether it arrived whole.

24 bytes: magic ``FC``, version, the codec's wire id, a fingerprint of its text (so that a link may change
codec between two messages without a barrier), the payload's length, and an xxh3 checksum of the payload. It
guards against accidents; forgery is what TLS is for. On the path: Payload -> **sealed buffers** -> protocol's
Frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import xxhash

from fusionllm.compress.codec import Payload, payload_num_bytes
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import HEADER_NUM_BYTES, CodecSpec

VERSION = 1
_MAGIC = b"FC"
_HEADER = struct.Struct("<2sBBIQQ")


def fingerprint(spec: CodecSpec) -> int:
    """A 32-bit name of a spec: parameters and all."""
    return zlib.crc32(str(spec).encode())


def _checksum(parts: Iterable[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


def seal(spec: CodecSpec, payload: Payload) -> Payload:
    """Put the envelope before a payload; copies nothing."""
    header = _HEADER.pack(
        _MAGIC,
        VERSION,
        spec.format.wire_id,
        fingerprint(spec),
        payload_num_bytes(payload),
        _checksum(payload),
    )
    return [memoryview(header), *payload]


def unseal(data: bytes | bytearray | memoryview, specs: Iterable[CodecSpec]) -> tuple[CodecSpec, memoryview]:
    """Open an envelope.

    Args:
        data: envelope and payload in one buffer.
        specs: the codecs this link may use now: those of the plan, identity, and the one before a change.

    Returns:
        The spec that made the payload, and the payload (a view of ``data``).

    Raises:
        RemoteProtocolError: no envelope, another version, a codec not among ``specs``, a wrong length or
            checksum.
    """
    view = memoryview(data).cast("B")
    if view.nbytes < HEADER_NUM_BYTES:
        raise RemoteProtocolError(f"{view.nbytes} bytes are no payload; its envelope alone takes {HEADER_NUM_BYTES}")
    magic, version, wire_id, name, num_bytes, checksum = _HEADER.unpack_from(view)
    body = view[HEADER_NUM_BYTES:]
    if magic != _MAGIC or version != VERSION:
        raise RemoteProtocolError(f"payload envelope {magic!r} version {version}; this side speaks FC {VERSION}")
    allowed = {(spec.format.wire_id, fingerprint(spec)): spec for spec in specs}
    spec = allowed.get((wire_id, name))
    if spec is None:
        known = ", ".join(str(s) for s in allowed.values())
        raise RemoteProtocolError(f"payload of codec {wire_id}/{name:08x}; this link allows {known}")
    if body.nbytes != num_bytes:
        raise RemoteProtocolError(f"payload of {body.nbytes} bytes, but its envelope says {num_bytes}")
    if _checksum([body]) != checksum:
        raise RemoteProtocolError(f"payload of {num_bytes} bytes for {spec} fails its checksum; it was damaged")
    return spec, body
