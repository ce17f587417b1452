"""Integers as flags: they come back, near their entropy, and nothing from outside breaks the reader."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fusionllm.compress.flags import MAX_MAGNITUDE, Reader, classes_of, read_integers, write_integers, write_number
from fusionllm.errors import RemoteProtocolError


def coded(codes: np.ndarray) -> tuple[bytes, np.ndarray]:
    nonzeros, sums = np.count_nonzero(codes, 0).astype(float), np.abs(codes).sum(0).astype(float)
    classes = classes_of(nonzeros, sums, max(1, codes.shape[0]))
    return write_integers(codes, classes), classes


def geometric(seed: int, rows: int, shares: list[float]) -> np.ndarray:
    rng = np.random.default_rng(seed)
    columns = [rng.geometric(1 - p, rows) - 1 for p in shares]
    return np.stack(columns, 1) * rng.choice([-1, 1], (rows, len(shares)))


@given(
    st.integers(0, 2**31),
    st.integers(0, 40),
    st.lists(st.floats(0, 0.99), max_size=12),
    st.sampled_from([1, 9, MAX_MAGNITUDE]),
)
@settings(max_examples=60)
def test_integers_come_back(seed: int, rows: int, shares: list[float], limit: int) -> None:
    codes = geometric(seed, rows, shares) if shares else np.zeros((rows, 0), np.int64)
    codes = np.clip(codes, -limit, limit)
    data, classes = coded(codes)
    reader = Reader(memoryview(data))
    assert np.array_equal(read_integers(reader, rows, classes), codes)
    reader.end()


def test_integers_take_little_more_than_their_entropy() -> None:
    shares = [0.003, 0.01, 0.02, 0.05, 0.09, 0.14, 0.2, 0.3, 0.37, 0.45, 0.55, 0.7, 0.85, 0.93] * 4
    data, _ = coded(geometric(0, 4096, shares))
    # Of a geometric number from 0 on with a share p going on, and a sign where it is not 0.
    p = np.array(shares)
    entropy_bits = 4096 * (p - (p * np.log2(p) + (1 - p) * np.log2(1 - p)) / (1 - p)).sum()
    assert entropy_bits < 8 * len(data) < 1.045 * entropy_bits


@given(st.integers(0, 2**31), st.integers(1, 30), st.integers(1, 6), st.binary(max_size=60))
@settings(max_examples=150)
def test_any_bytes_are_integers_or_refused(seed: int, rows: int, columns: int, noise: bytes) -> None:
    rng = np.random.default_rng(seed)
    codes = geometric(seed, rows, [0.4] * columns)
    data, classes = coded(codes)
    broken = bytearray(data)
    if broken:
        broken[rng.integers(len(broken))] ^= 1 << int(rng.integers(8))
    wild = rng.integers(0, 256, columns).astype(np.uint8)
    for bytes_, kinds in ((broken, classes), (data[:-1], classes), (noise, classes), (data, wild), (noise, wild)):
        try:
            back = read_integers(Reader(memoryview(bytes(bytes_))), rows, kinds)
        except RemoteProtocolError:
            continue
        assert back.shape == codes.shape and np.abs(back).max() <= rows * columns * MAX_MAGNITUDE


def test_numbers_from_outside_have_limits() -> None:
    for number in (0, 1, 127, 128, 70_000, 2**40):
        assert Reader(memoryview(write_number(number))).number(number) == number
    with pytest.raises(RemoteProtocolError, match="at most 5"):
        Reader(memoryview(write_number(6))).number(5)
    with pytest.raises(RemoteProtocolError, match="goes on"):
        Reader(memoryview(b"\x80" * 20)).number(5)
    with pytest.raises(RemoteProtocolError, match="before the end"):
        Reader(memoryview(b"\x80")).number(5)
    with pytest.raises(RemoteProtocolError, match="follow the end"):
        Reader(memoryview(b"\0")).end()


def test_long_magnitudes_do_not_make_the_reader_allocate() -> None:
    """The complement of few ends among many places would be large: refused by its numbers alone."""
    with pytest.raises(RemoteProtocolError, match="the long way round"):
        # One column of one row: a set flag, then a magnitude of 1024 written by the 1023 places that are no end.
        no_look, no_zero = b"\0", bytes((1 << 7, 0)) + write_number(0) + write_number(0)
        flags = no_look + write_number(1) + no_zero + 11 * write_number(0)
        read_integers(Reader(memoryview(flags + write_number(1024) + bytes((1 << 7, 0)))), 1, np.zeros(1, np.uint8))


def test_busy_rows_are_told_from_the_columns_before() -> None:
    """Rows of different activity: knowing it saves bits, and where rows are alike they pay nothing for it."""
    rng = np.random.default_rng(0)
    activity = rng.choice([0.2, 0.6, 1.6], (2048, 1))
    busy = (rng.random((2048, 60)) < np.linspace(0.5, 0.02, 60) * activity).astype(np.int64)
    alike = busy[rng.permuted(np.tile(np.arange(2048)[:, None], 60), axis=0), np.arange(60)]
    assert np.array_equal(busy.sum(0), alike.sum(0))
    assert len(coded(busy)[0]) < 0.95 * len(coded(alike)[0])
    assert coded(busy)[0][0] == 1 and coded(alike)[0][0] == 0
