"""Codec specs: the text form, the verifier, sizes."""

from __future__ import annotations

import contextlib
import math

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from fusionllm.errors import UserError
from fusionllm.ir.codec import (
    FORMATS,
    IDENTITY,
    CodecSpec,
    adjoint_codec,
    codec_spec,
    dense_num_bytes,
    expected_num_bytes,
    fit_codec,
    parse_codec,
    verify_codec,
    wire_num_bytes,
)
from fusionllm.ir.codec_formats import Parameter
from fusionllm.ir.tensor import DTYPES, FLOATS

SHAPES = st.lists(st.integers(0, 70), max_size=4).map(tuple)


def values_of(parameter: Parameter) -> st.SearchStrategy:
    if parameter.choices:
        return st.sampled_from(parameter.choices)
    if isinstance(parameter.default, float):
        return st.floats(parameter.low, parameter.high)
    return st.integers(int(parameter.low), int(parameter.high))


@st.composite
def specs(draw: st.DrawFn, depth: int = 2) -> CodecSpec:
    names = [name for name, known in FORMATS.items() if depth or not known.wraps]
    name = draw(st.sampled_from(names))
    known = FORMATS[name]
    given_keys = draw(st.sets(st.sampled_from(sorted(known.parameters)))) if known.parameters else set()
    parameters = {key: draw(values_of(known.parameters[key])) for key in given_keys}
    return codec_spec(name, parameters, draw(specs(depth=depth - 1)) if known.wraps else None)


@given(specs())
def test_text_and_json_round_trip(spec: CodecSpec) -> None:
    assert parse_codec(str(spec)) == spec
    again = msgspec.json.decode(msgspec.json.encode(spec), type=CodecSpec)
    verify_codec(again)
    assert str(again) == str(spec)


@given(specs(), SHAPES, st.sampled_from(FLOATS))
def test_sizes_are_whole_and_expected_is_within_the_bound(spec: CodecSpec, shape: tuple, dtype: str) -> None:
    bound = wire_num_bytes(spec, shape, dtype)
    assert isinstance(bound, int) and bound >= 0
    assert 0 <= expected_num_bytes(spec, shape, dtype) <= bound


@given(specs(), SHAPES, st.sampled_from(sorted(DTYPES)))
def test_fit_never_expands_and_keeps_integers_dense(spec: CodecSpec, shape: tuple, dtype: str) -> None:
    fitted = fit_codec(spec, shape, dtype)
    assert fitted in (spec, IDENTITY)
    assert wire_num_bytes(fitted, shape, dtype) <= dense_num_bytes(shape, dtype) + 1
    if dtype not in FLOATS:
        assert fitted.is_lossless
    assert fit_codec(fitted, shape, dtype) == fitted


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        verify_codec(parse_codec(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a codec"),
        ("nope", "unknown codec 'nope'; known: identity"),
        ("topk:k=3", "no parameter 'k'; known: ratio"),
        ("topk:ratio=0.5", "outside 1"),
        ("topk:ratio=nan", "outside 1"),
        ("topk:ratio=2,ratio=3", "given twice"),
        ("topk:ratio", "not one key=value"),
        ("topk:ratio=two", "not a valid float"),
        ("topk:values=int2", "is not known; did you mean int8"),
        ("int8:block=-1", "outside 0"),
        ("int8:block=1.5", "not a valid int"),
        ("int8(identity)", "wraps no other"),
        ("ef(ef(ef(ef(identity))))", "nested deeper"),
        ("ef(identity", "is not a codec"),
        ("identity" * 100, "characters; the limit"),
    ],
)
def test_bad_texts_say_why(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        parse_codec(text)


@pytest.mark.parametrize(
    "spec",
    [
        CodecSpec("nope"),
        CodecSpec("ef"),
        CodecSpec("int8", inner=IDENTITY),
        CodecSpec("topk", (("ratio", 0.0),)),
        CodecSpec("topk", (("ratio", 10.0),)),  # the default must be left out
        CodecSpec("topk", (("ratio", 20),)),  # an int where a float belongs
        CodecSpec("topk", (("ratio", math.inf),)),
        CodecSpec("topk", (("values", "int4"), ("ratio", 20.0))),  # not in order
        CodecSpec("topk", (("ratio", 20.0), ("ratio", 30.0))),
        CodecSpec("hadamard", (("bits", 3),)),
    ],
)
def test_verifier_refuses(spec: CodecSpec) -> None:
    with pytest.raises(UserError):
        verify_codec(spec)


def test_normal_form() -> None:
    assert str(parse_codec("topk:values=int8,ratio=100.0,index=auto")) == "topk:ratio=100"
    assert parse_codec("zstd") == parse_codec("zstd(identity)")
    assert parse_codec("topk:ratio=2.5").number("ratio") == 2.5


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("identity", 4096),
        ("cast", 2048),
        ("int8", 1024 + 2 * 16),
        ("int8:block=100", 1024 + 2 * 11),
        ("int4:block=64", 512 + 2 * 16),
        ("hadamard:bits=2", 256 + 2 * 16),
        ("outlier:channels=4", 512 + 2 * 16 + 4 * 4 + 2 * 4 * 16),
        ("topk-paper:ratio=8", 12 * 128),
        ("randomk:ratio=8,values=float16", 8 + 2 * 128),
        ("powersgd:rank=3", 2 * 3 * (16 + 64)),
        ("tangent(int8)", 1024 + 2 * 16 + 4 + 2 * 16),
    ],
)
def test_sizes_of_a_16_by_64_tensor(text: str, num_bytes: int) -> None:
    assert wire_num_bytes(parse_codec(text), (16, 64), "float32") == num_bytes


def test_paper_topk_is_a_third_of_its_name() -> None:
    shape = (4, 1024, 768)
    dense = dense_num_bytes(shape, "float32")
    assert dense / wire_num_bytes(parse_codec("topk-paper:ratio=100"), shape, "float32") == pytest.approx(33.3, 0.01)
    assert dense / expected_num_bytes(parse_codec("topk:ratio=100"), shape, "float32") > 190


def test_adjoints() -> None:
    assert adjoint_codec(IDENTITY) == IDENTITY
    assert str(adjoint_codec(parse_codec("topk:ratio=20,scope=row"))) == "same-mask:ratio=20,scope=row"
    assert str(adjoint_codec(parse_codec("zstd(randomk:ratio=4)"))) == "same-mask:ratio=4"
    assert str(adjoint_codec(parse_codec("topk-paper:ratio=4"))) == "same-mask:ratio=4,values=float32"
    assert adjoint_codec(parse_codec("int8")) is None
