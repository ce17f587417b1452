"""Selection and position coding."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings

from fusionllm.compress.positions import check_positions, decode_positions, encode_positions
from fusionllm.compress.select import largest, largest_per_row
from fusionllm.compress.sparse import stratified
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec_formats import index_num_bytes_at_most

INDEXES = ("auto", "rice", "gaps", "bitmap", "int32")


@st.composite
def position_sets(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    numel = draw(st.integers(1, 5000))
    chosen = draw(st.one_of(st.sets(st.integers(0, numel - 1), max_size=60), st.just(set(range(numel)))))
    return np.array(sorted(chosen), np.int64), numel


@given(position_sets(), st.sampled_from(INDEXES))
def test_positions_round_trip_within_the_bound(drawn: tuple[np.ndarray, int], index: str) -> None:
    positions, numel = drawn
    mode, low_bits, data = encode_positions(positions, numel, index)
    assert len(data) <= index_num_bytes_at_most(index, positions.size, numel)
    back = decode_positions(mode, low_bits, memoryview(data), positions.size, numel)
    assert np.array_equal(back, positions)


@given(position_sets(), st.binary(max_size=200), st.integers(0, 255), st.integers(0, 255))
def test_any_bytes_are_positions_or_refused(
    drawn: tuple[np.ndarray, int], data: bytes, mode: int, low_bits: int
) -> None:
    positions, numel = drawn
    try:
        back = decode_positions(mode % 5, low_bits % 50, memoryview(data), positions.size, numel)
    except RemoteProtocolError:
        return
    assert back.size == positions.size
    assert not back.size or (back[0] >= 0 and back[-1] < numel and bool((np.diff(back) > 0).all()))


def test_positions_whose_difference_wraps_are_refused() -> None:
    wild = np.array([2**62, -(2**62) - 1, 3], np.int64)
    with pytest.raises(RemoteProtocolError, match="strictly increasing"):
        check_positions(wild, 3, 10)
    with pytest.raises(RemoteProtocolError, match="strictly increasing"):
        check_positions(np.array([0, 2**63 - 1, -(2**63) + 5], np.int64), 3, 10)


def test_rice_is_within_three_percent_of_the_entropy() -> None:
    numel = 1 << 20
    for share in (0.001, 0.01, 0.1):
        rng = np.random.default_rng(0)
        positions = np.sort(rng.choice(numel, int(share * numel), replace=False))
        _, _, data = encode_positions(positions, numel, "rice")
        entropy_bits = -numel * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
        assert len(data) * 8 <= 1.03 * entropy_bits


def test_the_smallest_code_is_chosen_and_a_mask_of_channels_costs_next_to_nothing() -> None:
    rows, width, numel = 2048, 512, 2048 * 512
    channels = (np.arange(rows)[:, None] * width + np.array([3, 77, 200, 411])).reshape(-1)
    sizes = {index: len(encode_positions(channels, numel, index)[2]) for index in INDEXES}
    assert sizes["auto"] == min(sizes.values()) == sizes["gaps"] < 0.05 * sizes["rice"]
    random = np.sort(np.random.default_rng(0).choice(numel, numel // 100, replace=False))
    sizes = {index: len(encode_positions(random, numel, index)[2]) for index in INDEXES}
    assert sizes["auto"] == min(sizes.values()) < sizes["int32"] / 3
    dense = np.sort(np.random.default_rng(0).choice(numel, numel // 2, replace=False))
    assert len(encode_positions(dense, numel, "auto")[2]) <= numel // 8


def test_gaps_that_do_not_add_up_are_refused() -> None:
    for raw, count in ((b"\1\2", 3), (b"\1\2\3", 2), (b"\xff\1\0\0", 2), (b"\1" * 11, 2)):
        data = zstandard.ZstdCompressor().compress(raw)
        with pytest.raises(RemoteProtocolError):
            decode_positions(3, 0, memoryview(data), count, 1000)
    with pytest.raises(RemoteProtocolError, match="broken zstd"):
        decode_positions(3, 0, memoryview(b"no frame of zstd"), 2, 1000)


@given(st.integers(0, 2**31), st.integers(1, 3000), st.integers(0, 3000), st.booleans())
def test_largest_is_exact_and_breaks_ties_low(seed: int, numel: int, count: int, ties: bool) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).abs()
    x = x.round() if ties else x
    count = min(count, numel)
    expected = sorted(sorted(range(numel), key=lambda i: (-float(x[i]), i))[:count])
    assert largest(x, count).tolist() == expected if count else True


@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "spikes"])
@pytest.mark.parametrize("count", [1, 7, 1000, 30_000])
def test_sampled_selection_equals_the_plain_one(kind: str, count: int) -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(3)).abs()
    if kind == "ties":
        x = (x * 4).round()
    if kind == "constant":
        x = torch.ones_like(x)
    if kind == "spikes":
        x = torch.where(torch.arange(x.numel()) % 7919 == 0, x, torch.zeros_like(x))
    expected = x.sort(descending=True, stable=True).indices[:count].sort().values
    assert torch.equal(largest(x, count), expected)


def test_largest_per_row() -> None:
    x = torch.tensor([[1.0, 9.0, 2.0], [7.0, 0.0, 8.0]])
    assert largest_per_row(x, 2).tolist() == [1, 2, 3, 5]


@given(st.integers(0, 2**64 - 1), st.integers(0, 500), st.integers(0, 2000))
@settings(max_examples=50)
def test_strata_give_one_position_each(seed: int, count: int, extra: int) -> None:
    numel = count + extra
    positions = stratified(seed, count, numel).numpy()
    edges = np.arange(count + 1) * numel // max(1, count)
    assert bool(((positions >= edges[:-1]) & (positions < edges[1:])).all())


def test_strata_differ_from_message_to_message() -> None:
    assert stratified(0, 100, 10_000).tolist() != stratified(1, 100, 10_000).tolist()
    assert stratified(0, 3, 30).tolist() == stratified(0, 3, 30).tolist()
