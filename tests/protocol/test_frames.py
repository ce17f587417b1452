"""Frames: cut anywhere they read the same; hostile bytes end in one clear error and cost no memory."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fusionllm.errors import LocalProtocolError, RemoteProtocolError
from fusionllm.protocol.frames import (
    HEAD_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    MAX_META_BYTES,
    PREFIX,
    PROTOCOL_VERSION,
    Close,
    Credit,
    Data,
    FrameReader,
    Hello,
    Ping,
    Pong,
    encode_frame,
    goodbye,
)

counts = st.integers(0, (1 << 63) - 1)
words = st.integers(0, (1 << 64) - 1)
headers = st.one_of(
    st.builds(Ping, counts),
    st.builds(Pong, counts),
    st.builds(Credit, counts, counts, st.binary(max_size=128)),
    st.builds(Close, st.text(max_size=50), st.booleans()),
    st.builds(Data, counts, counts, counts, words, st.binary(max_size=MAX_META_BYTES)),
    st.builds(
        Hello, st.text("abc", min_size=1, max_size=64), counts, counts, counts, counts, counts, counts,
        st.binary(max_size=128), counts, st.dictionaries(counts, counts, max_size=64),
    ),
)  # fmt: skip


def feed(stream: bytes, cuts: list[int]) -> list[tuple[object, bytes]]:
    """Read a stream, at most ``cuts[k]`` bytes at a time, in turn."""
    reader = FrameReader(lambda header, num_bytes: memoryview(bytearray(num_bytes)))
    frames, offset, turn = [], 0, 0
    while offset < len(stream):
        target = reader.get_buffer()
        assert len(target) > 0
        piece = stream[offset : offset + min(len(target), cuts[turn % len(cuts)])]
        target[: len(piece)] = piece
        offset, turn = offset + len(piece), turn + 1
        if frame := reader.advance(len(piece)):
            frames.append((frame[0], bytes(frame[1])))
    return frames


@given(
    st.lists(st.tuples(headers, st.binary(max_size=300)), max_size=6),
    st.lists(st.integers(1, 5000), min_size=1),
)
def test_frames_read_the_same_however_the_stream_is_cut(frames, cuts):
    sent = [(header, payload if isinstance(header, Data) else b"") for header, payload in frames]
    stream = b"".join(encode_frame(header, len(payload)) + payload for header, payload in sent)
    assert feed(stream, cuts) == sent


@given(st.binary(max_size=400), st.integers(0, 5), st.booleans())
def test_random_bytes_are_refused_or_wait_for_more(noise, kind, honest_prefix):
    if honest_prefix:
        noise = PREFIX.pack(b"FL", PROTOCOL_VERSION, kind + 1, min(len(noise) + 1, 64), 0, 0) + noise
    try:
        feed(noise, [len(noise) + 1])
    except RemoteProtocolError as error:
        assert str(error)


def prefix(magic=b"FL", version=PROTOCOL_VERSION, kind=2, header_bytes=5, reserved=0, payload_bytes=0):
    return PREFIX.pack(magic, version, kind, header_bytes, reserved, payload_bytes)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (prefix(magic=b"GE"), "it starts with b'GE'"),
        (prefix(version=7), f"version 7, this side speaks {PROTOCOL_VERSION}"),
        (prefix(kind=0), "unknown frame kind 0"),
        (prefix(kind=77), "unknown frame kind 77"),
        (prefix(reserved=1), "unknown frame kind"),
        (prefix(header_bytes=0), "header of 0 bytes"),
        (prefix(header_bytes=MAX_HEADER_BYTES + 1), "header of 4097 bytes"),
        (prefix(payload_bytes=MAX_CHUNK_BYTES + 1), "payload of 262145 bytes"),
        (prefix(payload_bytes=(1 << 32) - 1), "payload of 4294967295 bytes"),
        (prefix(kind=4, payload_bytes=1), "Ping frame with a payload of 1 bytes"),
        (prefix() + b"\xc1\xc1\xc1\xc1\xc1", "bad header"),
        (prefix(kind=4, header_bytes=2) + b"\x91\xff", "bad header"),
        (prefix(kind=4, header_bytes=3) + b"\x92\x01\x01", "bad header"),
        (prefix(header_bytes=4000) + b"\x91" * 4000, "bad header"),
    ],
)
def test_hostile_bytes_end_in_an_error_that_names_them(stream, message):
    with pytest.raises(RemoteProtocolError, match=message):
        feed(stream.ljust(HEAD_BYTES, b"\0"), [len(stream)])


def test_our_own_oversized_frames_are_our_error():
    with pytest.raises(LocalProtocolError, match="limit 4096"):
        encode_frame(Data(1, 0, 0, 0, bytes(MAX_HEADER_BYTES)))
    with pytest.raises(LocalProtocolError, match="limit 262144"):
        encode_frame(Data(1, 0, 0, 0), MAX_CHUNK_BYTES + 1)
    assert len(encode_frame(Data((1 << 63) - 1, 0, (1 << 63) - 1, (1 << 64) - 1, bytes(MAX_META_BYTES)))) <= 4108


def test_a_goodbye_always_fits():
    [(header, _)] = feed(goodbye("ü" * 5000, final=True), [10_000])
    assert header.final and header.reason == "ü" * 1024
