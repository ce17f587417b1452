"""Frames: what travels inside a wire, and the incremental reader that trusts no length.

A frame is a 12-byte prefix (magic, protocol version, kind, header length, payload length), a msgpack header
and, for ``Data`` only, a payload of raw bytes; prefix and header are padded to 64 bytes. Pure: no clock, no
socket, no session state. It sits between the session machine and the ordered byte stream of ``transport``.

Payload bytes land where the owner says (``place``), so a tensor arrives in its own buffer without another
copy. Nothing is allocated here by a length that came from the peer: prefix and header share one scratch
buffer of fixed size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, cast

import msgspec
import xxhash
from msgspec import Meta

from fusionllm.errors import LocalProtocolError, RemoteProtocolError
from fusionllm.units import KIB

PROTOCOL_VERSION = 1
MAGIC = b"FL"
#: magic, version, kind, header bytes, reserved (zero), payload bytes
PREFIX = struct.Struct("<2sBBHHI")
#: Prefix and header together are padded to this, so that nearly every frame's are read in one go.
HEAD_BYTES = 64
MAX_HEADER_BYTES = 4096
MAX_CHUNK_BYTES = 256 * KIB
#: Meta travels in the header of a message's first chunk; the rest of that header takes at most 48 bytes.
MAX_META_BYTES = MAX_HEADER_BYTES - 48
#: How far message ids may run ahead of the oldest undelivered one; bounds the tables both sides keep.
MAX_AHEAD = 1024
#: Messages that may be half received at one time; bounds the resume table in a Hello.
MAX_PARTIALS = 64

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Word = Annotated[int, Meta(ge=0)]  # msgpack has nothing above 64 bits
Bitmap = Annotated[bytes, Meta(max_length=MAX_AHEAD // 8)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Header, frozen=True):
    """First frame in each direction of every wire: who speaks, and where the session stands.

    Attributes:
        node: sender's name, equal to the one in its certificate.
        incarnation: random number of the sender's process; another one means it restarted.
        epoch: which session with this peer the sender is in, counted from 1.
        peer_incarnation, peer_epoch: the receiver's numbers as the sender knows them; 0 when it has none.
        window_bytes: cost of messages the sender of this Hello will hold unconsumed.
        next_in: every message id below it has been delivered.
        delivered: bit ``k`` set: message ``next_in + k`` has been delivered too (little endian).
        consumed: absolute cost consumed by the application, see ``Credit``.
        partial: message id minus ``next_in`` -> bytes held of a message that is half received.
    """

    node: Name
    incarnation: Count
    epoch: Count
    peer_incarnation: Count
    peer_epoch: Count
    window_bytes: Count
    next_in: Count
    delivered: Bitmap
    consumed: Count
    partial: Annotated[dict[Count, Count], Meta(max_length=MAX_PARTIALS)]


class Data(_Header, frozen=True):
    """One chunk: bytes ``offset ..`` of message ``message_id``.

    ``meta`` is set only where ``offset`` is 0.
    """

    message_id: Count
    offset: Count
    total: Count
    checksum: Word
    meta: Annotated[bytes, Meta(max_length=MAX_META_BYTES)] = b""


class Credit(_Header, frozen=True):
    """What the receiver has delivered and its application has consumed.

    Absolute, so losing one does no harm.
    """

    consumed: Count
    next_in: Count
    delivered: Bitmap = b""


class Ping(_Header, frozen=True):
    stamp: Count


class Pong(_Header, frozen=True):
    stamp: Count


class Close(_Header, frozen=True):
    """The sender closes this wire; ``final``: and the session with it."""

    reason: Annotated[str, Meta(max_length=1024)]
    final: bool


Header = Hello | Data | Credit | Ping | Pong | Close
KINDS: dict[int, type[_Header]] = {1: Hello, 2: Data, 3: Credit, 4: Ping, 5: Pong, 6: Close}
_KIND_OF: dict[type, int] = {header: kind for kind, header in KINDS.items()}
_DATA_KIND = _KIND_OF[Data]
_DECODERS = {kind: msgspec.msgpack.Decoder(header) for kind, header in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode_frame(header: Header, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; the caller sends ``payload_bytes`` of payload right after it.

    Raises:
        LocalProtocolError: the header or payload is over its limit.
    """
    encoded = _encode(header)
    if len(encoded) > MAX_HEADER_BYTES or payload_bytes > MAX_CHUNK_BYTES:
        raise LocalProtocolError(
            f"frame with a header of {len(encoded)} bytes (limit {MAX_HEADER_BYTES}) and a payload of "
            f"{payload_bytes} bytes (limit {MAX_CHUNK_BYTES})"
        )
    prefix = PREFIX.pack(MAGIC, PROTOCOL_VERSION, _KIND_OF[type(header)], len(encoded), 0, payload_bytes)
    return (prefix + encoded).ljust(HEAD_BYTES, b"\0")


def goodbye(reason: str, final: bool) -> bytes:
    """A Close frame, its reason cut to what fits."""
    return encode_frame(Close(reason[:1024], final))


checksum_of = xxhash.xxh3_64_intdigest


def checksum_of_pieces(pieces: list[memoryview]) -> int:
    """xxh3-64 of the pieces one after another."""
    if len(pieces) == 1:
        return int(checksum_of(pieces[0]))
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest())


class FrameReader:
    """Reads frames from a byte stream cut anywhere.

    Fill (part of) ``get_buffer()`` with the next bytes of the stream and call ``advance``.

    Args:
        place: given a Data header and its payload length (<= 256 KiB), returns exactly that much writable
            memory for the payload. May raise RemoteProtocolError.
    """

    def __init__(self, place: Callable[[Data, int], memoryview]) -> None:
        self._place = place
        self._scratch = memoryview(bytearray(PREFIX.size + MAX_HEADER_BYTES))
        self._head = self._scratch[:HEAD_BYTES]
        self._header_end = 0
        self._kind = 0
        self._payload_bytes = 0
        self._header: Header | None = None
        self._await_head()

    def _await_head(self) -> None:
        self._state = 0
        self._target = self._head
        self._filled = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._target[self._filled :] if self._filled else self._target

    def advance(self, num_bytes: int) -> tuple[Header, memoryview] | None:
        """Account for ``num_bytes`` written at the start of ``get_buffer()``.

        Returns:
            The header and payload of a frame that is now whole, or None while more bytes are needed.

        Raises:
            RemoteProtocolError: the peer's bytes are not a frame of this version.
        """
        self._filled += num_bytes
        if self._filled < len(self._target):
            return None
        if self._state == 0:
            self._read_prefix()
            if self._header_end > HEAD_BYTES:
                self._state, self._target, self._filled = 1, self._scratch[HEAD_BYTES : self._header_end], 0
                return None
        if self._state < 2:
            header = self._decode()
            payload_bytes = self._payload_bytes
            payload = self._place(header, payload_bytes) if isinstance(header, Data) else self._scratch[:0]
            if payload_bytes:
                self._header = header
                self._state, self._target, self._filled = 2, payload, 0
                return None
            self._await_head()
            return header, payload
        payload, whole = self._target, self._header
        assert whole is not None
        self._await_head()
        return whole, payload

    def _read_prefix(self) -> None:
        magic, version, kind, header_bytes, reserved, payload_bytes = PREFIX.unpack_from(self._head)
        if magic != MAGIC:
            raise RemoteProtocolError(f"not a frame: it starts with {magic!r}, frames start with {MAGIC!r}")
        if version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"the peer speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}; "
                "install the same release of fusionllm on both"
            )
        if kind not in KINDS or reserved != 0:
            raise RemoteProtocolError(
                f"unknown frame kind {kind} (flags {reserved}); known kinds are 1 to {len(KINDS)}"
            )
        if not 0 < header_bytes <= MAX_HEADER_BYTES:
            raise RemoteProtocolError(f"frame header of {header_bytes} bytes, allowed are 1 to {MAX_HEADER_BYTES}")
        if payload_bytes > (MAX_CHUNK_BYTES if kind == _DATA_KIND else 0):
            raise RemoteProtocolError(
                f"{KINDS[kind].__name__} frame with a payload of {payload_bytes} bytes; "
                f"the limit is {MAX_CHUNK_BYTES} for Data and 0 for all others"
            )
        self._kind, self._payload_bytes, self._header_end = kind, payload_bytes, PREFIX.size + header_bytes

    def _decode(self) -> Header:
        try:
            return cast(Header, _DECODERS[self._kind].decode(self._scratch[PREFIX.size : self._header_end]))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"{KINDS[self._kind].__name__} frame with a bad header: {error}") from None
