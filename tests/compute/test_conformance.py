"""Every backend through the shared kit."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from tests.kits.backend_kit import BackendContract

from fusionllm.compute import BACKENDS


class TestTorch(BackendContract):
    backend = "torch"


class TestJax(BackendContract):
    backend = "jax"


@pytest.mark.skipif(find_spec("tinygrad") is None, reason="needs the extra tinygrad")
class TestTinygrad(BackendContract):
    backend = "tinygrad"


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_is_in_the_kit(name: str) -> None:
    assert name in {case.backend for case in BackendContract.__subclasses__()}
