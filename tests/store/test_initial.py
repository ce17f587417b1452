"""Initial values: of the distribution asked for, and the same for ever."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from fusionllm.errors import GraphError
from fusionllm.ir.init import Init
from fusionllm.store.initial import erfinv, initial_values

NORMAL = Init((("normal", (1.0, 0.5)),))


def values(init: Init, seed: int = 0, name: str = "w", shape: tuple[int, ...] = (400, 500)) -> np.ndarray:
    return initial_values(init, seed, name, shape).numpy()


def test_distributions():
    normal = values(NORMAL)
    assert normal.dtype == np.float32 and normal.shape == (400, 500)
    assert normal.mean() == pytest.approx(1.0, abs=5e-3) and normal.std() == pytest.approx(0.5, abs=5e-3)
    below = [(normal < 1.0 + 0.5 * z).mean() for z in (-2.0, -1.0, 1.0, 2.0)]
    expected = [0.5 * (1 + math.erf(z / math.sqrt(2))) for z in (-2.0, -1.0, 1.0, 2.0)]
    assert below == pytest.approx(expected, abs=5e-3)
    uniform = values(Init((("uniform", (-0.25, 0.75)),)))
    assert uniform.min() >= -0.25 and uniform.max() <= 0.75 and uniform.mean() == pytest.approx(0.25, abs=5e-3)
    assert (values(Init((("constant", (3.0,)),))) == 3).all()


def test_steps_and_zero_rows():
    init = Init(
        (("uniform", (-0.9, 0.9)), ("erfinv", ()), ("mul", (2.0,)), ("add", (1.0,)), ("clamp", (0.0, 2.0))), (1,)
    )
    found = values(init, shape=(3, 4000))
    assert (found[1] == 0).all()
    assert found[0].min() == 0.0 and found[0].max() == 2.0 and 0.5 < found[0].mean() < 1.5


def test_a_function_of_seed_and_name_alone():
    assert np.array_equal(values(NORMAL), values(NORMAL))
    others = [values(NORMAL, seed=1), values(NORMAL, name="v"), values(NORMAL, seed=1, name="v")]
    assert all(abs(np.corrcoef(values(NORMAL).ravel(), o.ravel())[0, 1]) < 0.02 for o in others)
    # the same for ever: whoever changes the stream or the arithmetic changes every run begun from it
    digest = hashlib.sha256(values(NORMAL, seed=7, name="model.layers.0", shape=(1000,)).tobytes()).hexdigest()
    assert digest == "acfbff6cef7cc27982f381f4458692f86d0676cb85f53dfdac45201e2551500b"


def test_the_inverse_error_function():
    x = np.concatenate([np.linspace(-0.999999, 0.999999, 5001), [1 - 1e-12, -1 + 1e-12]])
    back = np.array([math.erf(v) for v in erfinv(x)])
    assert np.abs(back - x).max() < 1e-6
    assert np.isfinite(erfinv(np.array([-1.0, 1.0]))).all()


@pytest.mark.parametrize(
    "steps",
    [(), (("mul", (1.0,)),), (("normal", (1.0,)),), (("normal", (0.0, math.inf)),), (("normal", (0.0, 1.0)),) * 2,
     (("eval", ()),), (("constant", (0.0,)), *((("add", (1.0,)),) * 16))],
)  # fmt: skip
def test_steps_that_mean_nothing_are_refused(steps):
    with pytest.raises(GraphError):
        values(Init(steps))
