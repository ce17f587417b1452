"""Every codec passes the conformance kit."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from tests.kits import codec_kit as kit
from tests.kits.codec_kit import CASES, CodecCase

from fusionllm.compress import CODECS, WRAPPERS
from fusionllm.ir.codec import FORMATS

every_codec = pytest.mark.parametrize("case", CASES, ids=str)
few = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 2**31)


def test_every_format_has_code_and_a_case() -> None:
    assert set(FORMATS) == set(CODECS) | set(WRAPPERS)
    assert set(FORMATS) == {case.spec.name for case in CASES}
    assert len({known.wire_id for known in FORMATS.values()}) == len(FORMATS)


@every_codec
def test_spec_and_error(case: CodecCase) -> None:
    kit.check_spec(case)
    kit.check_error_on_normal_data(case)


@every_codec
@given(x=kit.tensors())
@few
def test_round_trip_and_size(case: CodecCase, x: torch.Tensor) -> None:
    kit.check_round_trip(case, x)
    kit.check_wire_size(case, x)


@every_codec
@given(x=kit.tensors())
@few
def test_determinism_and_state(case: CodecCase, x: torch.Tensor) -> None:
    kit.check_determinism(case, x)
    kit.check_state_round_trip(case, x)


@every_codec
@given(x=kit.tensors(), seed=SEEDS)
@few
def test_hostile_payloads(case: CodecCase, x: torch.Tensor, seed: int) -> None:
    kit.check_hostile(case, x, seed)
    kit.check_damage_shows(case, x, seed)


@every_codec
@given(x=kit.tensors(), seed=SEEDS)
@few
def test_allocation(case: CodecCase, x: torch.Tensor, seed: int) -> None:
    kit.check_allocation(case, x, seed)


@every_codec
@given(x=kit.tensors(), seed=SEEDS)
@few
def test_adjoint(case: CodecCase, x: torch.Tensor, seed: int) -> None:
    kit.check_adjoint(case, x, seed)


@every_codec
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite(case: CodecCase, value: float) -> None:
    kit.check_nonfinite(case, value)
