"""Rules for codecs: the paper's as written, ours never larger than dense and never longer than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionllm.errors import PlanError, UserError
from fusionllm.ir.codec import IDENTITY, CodecSpeed, dense_num_bytes, expected_num_bytes
from fusionllm.schedule.ratios import (
    EXTRA_STEPS,
    LADDER,
    PRETRAINED,
    LinkLoad,
    choose_codecs,
    deadline,
    default_floor,
    ladder_to,
)

loads = st.lists(
    st.builds(
        LinkLoad,
        shape=st.tuples(st.integers(1, 64), st.integers(1, 512)),
        dtype=st.just("float32"),
        bandwidth_bytes_per_s=st.floats(1e3, 1e9),
    ),
    min_size=1,
    max_size=6,
)


def load(mbps: float) -> LinkLoad:
    return LinkLoad(shape=(64, 1024), dtype="float32", bandwidth_bytes_per_s=mbps * 125e3)


def test_the_papers_rule_as_written():
    slow, middle, fast = choose_codecs("adatopk-paper", [load(10), load(1000), load(10_000)], 100)
    assert slow.number("ratio") == pytest.approx(300)
    assert middle.number("ratio") == pytest.approx(3)
    assert fast == IDENTITY
    expanding = choose_codecs("adatopk-paper", [load(10), load(2000)], 100)[1]
    assert expected_num_bytes(expanding, (64, 1024), "float32") > dense_num_bytes((64, 1024), "float32")


@given(loads, st.floats(1e-6, 10))
def test_ours_is_dense_where_that_is_in_time_and_never_larger(drawn, deadline_s):
    chosen = choose_codecs("deadline", drawn, deadline_s)
    for one, spec in zip(drawn, chosen):
        size = expected_num_bytes(spec, one.shape, one.dtype)
        assert size <= dense_num_bytes(one.shape, one.dtype) + 1
        if one.seconds() <= deadline_s:
            assert spec == IDENTITY
        assert one.seconds(spec) <= max(deadline_s, min(one.seconds(rung) for rung in LADDER)) * (1 + 1e-9)


def test_a_slow_codec_is_not_taken():
    slow = CodecSpeed(1.0, 1.0, 0.0)
    assert deadline([load(10)], 1e-6, speeds=[None, *[slow] * (len(LADDER) - 1)]) == [IDENTITY]


def test_how_far_down_is_by_what_the_model_knows():
    assert ladder_to(default_floor(pretrained=False)) == LADDER
    assert ladder_to(default_floor(pretrained=True)) == PRETRAINED
    assert ladder_to("int8:block=64") == LADDER[:3]
    sizes = [expected_num_bytes(spec, (512, 1024), "float32") for spec in LADDER]
    assert sizes == sorted(sizes, reverse=True)
    assert [*EXTRA_STEPS.values()] == sorted(EXTRA_STEPS.values())


def test_what_cannot_be_is_named():
    with pytest.raises(UserError, match="floor is 'int2', no codec of the ladder; known: identity, cast"):
        ladder_to("int2")
    with pytest.raises(UserError, match="known: adatopk-paper"):
        choose_codecs("adatopk", [], 3)
    with pytest.raises(PlanError, match=r"ratio 0\.5"):
        choose_codecs("uniform-topk", [load(1)], 0.5)
    with pytest.raises(PlanError, match="one per codec"):
        deadline([load(1)], 1, speeds=[])
