"""Random bits: the published values, and the same on every way to make them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionllm.compute import philox, philox_fast
from fusionllm.compute.philox_torch import keep_mask, torch_mask

#: Of the authors' Random123, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0 << 32 | 0xA4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_published_values(counter, key, result):
    assert tuple(int(w) for w in philox.philox(np.array([counter], np.uint32), key)[0]) == result


@settings(max_examples=60)
@given(
    key=st.integers(0, (1 << 63) - 1),
    count=st.integers(0, 70_000),
    p=st.floats(0, 1),
    stream=st.integers(0, (1 << 32) - 1),
)
def test_all_ways_give_the_same_mask(key, count, p, stream):
    expected = philox.keep_mask(key, count, p, stream)
    cpu = torch.device("cpu")
    assert np.array_equal(philox_fast.keep_mask(key, count, p, stream), expected)
    assert np.array_equal(torch_mask(key, count, p, cpu, stream).numpy(), expected)
    assert np.array_equal(keep_mask(key, torch.Size([count]), p, cpu, stream).numpy(), expected)


def test_masks_are_of_the_probability_and_differ_by_place_and_stream():
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    masks = [philox.keep_mask(philox.seed_of(*place), 40_000, 0.3) for place in places]
    masks.append(philox.keep_mask(philox.seed_of(*places[0]), 40_000, 0.3, stream=1))
    for index, mask in enumerate(masks):
        assert abs(mask.mean() - 0.7) < 0.01
        for other in masks[:index]:
            assert abs((mask == other).mean() - 0.58) < 0.02  # independent: 0.7^2 + 0.3^2
    assert philox.keep_mask(1, 1000, 0.0).all() and not philox.keep_mask(1, 1000, 1.0).any()
