"""Events go to a line of JSON and come back, whatever the numbers."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionllm.errors import UserError
from fusionllm.telemetry.events import Note, StepMetrics, ValMetrics, decode_event, encode_event

numbers = st.floats(allow_nan=True, allow_infinity=True)
events = st.one_of(
    st.builds(
        StepMetrics,
        step=st.integers(1, 2**40),
        loss=numbers,
        lr=numbers,
        grad_norm=st.none() | numbers,
        tokens=st.integers(0, 2**40),
        seconds=numbers,
        link_bytes=st.dictionaries(st.text(max_size=9), st.integers(0, 2**50), max_size=3),
    ),
    st.builds(ValMetrics, step=st.integers(0, 2**40), loss=numbers),
    st.builds(Note, step=st.integers(0, 9), kind=st.text(max_size=9), text=st.text()),
)


@given(events)
def test_round_trip(event):
    line = encode_event(event)
    assert b"\n" not in line
    assert repr(decode_event(line)) == repr(event)  # by text: a NaN is not equal to itself


def test_the_line_is_plain_json():
    line = encode_event(StepMetrics(step=1, loss=math.nan, link_bytes={"n0->n1": 5}))
    raw = msgspec.json.decode(line)
    assert raw["type"] == "step"
    assert raw["loss"] == "nan"
    assert raw["link_bytes"] == {"n0->n1": 5}


def test_perplexity():
    assert ValMetrics(step=0, loss=0.0).perplexity == 1
    assert ValMetrics(step=0, loss=1e9).perplexity == math.inf


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b'{"type": "other"}', b'{"type": "val"}', b"[" * 99999])
def test_bad_lines(line):
    with pytest.raises(UserError, match="not a line of metrics"):
        decode_event(line)
