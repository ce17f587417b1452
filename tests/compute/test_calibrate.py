"""What calibration reports is what a device sustains."""

from __future__ import annotations

import math
import time
from functools import partial
from importlib import import_module

import pytest

from fusionllm.compute import CALIBRATIONS, calibrate, warm_up
from fusionllm.compute.timing import sustained_s, time_kinds
from fusionllm.errors import UserError
from fusionllm.estimate.device import fit_rates
from fusionllm.ir.cluster import Sample


def test_a_device_that_works_a_part_of_the_time_shows_it():
    """A quarter of a core: three calls of four run at once, the fourth waits for its turn."""
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        if count % 4 == 0:
            time.sleep(0.02)

    assert 0.004 < sustained_s(call) < 0.01


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", CALIBRATIONS)
def test_every_kind_of_operator_is_measured(backend: str, precision: str):
    pytest.importorskip(backend)
    ready = warm_up(backend, "cpu")
    if precision not in ready.dtypes:
        with pytest.raises(UserError, match=precision):
            calibrate(backend, "cpu", precision)
        return
    profile = calibrate(backend, "cpu", precision)
    own = {"matmul", "attention", "memory"} | ({"convolution"} if "aten.conv2d.default" in ready.operators else set())
    assert {sample.kind for sample in profile.samples} == own
    assert profile.memory_bytes > 0 and all(0 < sample.seconds < 10 for sample in profile.samples)
    assert 0 < fit_rates(profile.samples).matmul < math.inf


def test_a_forward_is_a_third_of_a_training_pass():
    samples = time_kinds({"memory": None}, lambda _, shape, count: partial(time.sleep, 0.03 * count), 4)
    assert all(0.01 <= sample.seconds < 0.02 for sample in samples)


def test_a_pause_does_not_end_the_sizes_too_early():
    """The second size is held up once; a size is the last one when it is long twice."""
    held = []

    def call(num_bytes: int) -> None:
        if num_bytes == 1 << 20 and len(held) < 2:  # the warm-up and the first that counts
            held.append(time.sleep(1.0))
        time.sleep(0.0005 if num_bytes < 1 << 26 else 0.02)

    samples = time_kinds({"memory": None}, lambda _, shape, count: partial(call, shape[0]), 4)
    assert len(held) == 2 and len(samples) == 5 and samples[1].seconds < 0.001


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16-weights", "bfloat16")],
)
def test_torch_is_timed_as_it_trains(monkeypatch: pytest.MonkeyPatch, precision: str, dtype: str):
    """Forward and both gradients of a product, in what a stage of that precision computes them in."""
    torch = pytest.importorskip("torch")
    room, products = import_module("fusionllm.compute.calibrate"), []

    class Seen(import_module("torch.utils._python_dispatch").TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                products.append(str(args[0].dtype))
            return function(*args, **(kwargs or {}))

    def one(functions, prepare, item_bytes):  # type: ignore[no-untyped-def]
        with Seen():
            prepare(functions["matmul"], (8, 8), 1)()
        return (Sample(kind="matmul", flops=1.0, moved_bytes=1.0, seconds=1.0),)

    monkeypatch.setattr(room, "time_kinds", one)
    calibrate("torch", "cpu", precision)
    assert products == [f"torch.{dtype}"] * 3
