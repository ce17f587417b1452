"""Work, memory, devices and links: against counts by hand, and fits that find what made the samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from tests.strategies import dataflows

from fusionllm.errors import GraphError, UserError
from fusionllm.estimate.device import DeviceRates, fit_rates, lambda_rates
from fusionllm.estimate.flops import anchored_flops
from fusionllm.estimate.library import DEVICES
from fusionllm.estimate.link import LinkRates, fit_link
from fusionllm.estimate.memory import memory_of
from fusionllm.estimate.work import graph_work
from fusionllm.ir.cluster import Sample
from fusionllm.ir.codec import CodecSpeed
from fusionllm.ir.cuts import anchored_ops
from fusionllm.ir.graph import Op, OpGraph, Param, Value
from fusionllm.ir.tensor import TensorSpec

rates = st.floats(1e9, 1e15)
TABLE = st.builds(
    DeviceRates,
    matmul=rates,
    attention=rates,
    convolution=rates,
    bytes_per_s=st.floats(1e9, 1e13),
    launch_s=st.floats(0, 1e-4),
)


def mlp() -> OpGraph:
    """loss = mean(relu(x @ w) @ w): one parameter read twice."""
    spec = TensorSpec("float32", ("B", 8))

    def linear(x: str, y: str) -> Op:
        return Op(
            name="aten.linear.default", args={"input": {"r": x}, "weight": {"r": "p:w"}}, outs=(y,), specs=(spec,)
        )

    return OpGraph(
        symbols={"B": 1},
        inputs=(Value("x", spec),),
        params={"w": Param("p:w", TensorSpec("float32", (8, 8)))},
        ops=(
            linear("x", "h"),
            Op(name="aten.relu.default", args={"self": {"r": "h"}}, outs=("a",), specs=(spec,)),
            linear("a", "y"),
            Op(name="aten.mean.default", args={"self": {"r": "y"}}, outs=("loss",), specs=(TensorSpec("float32", ()),)),
        ),
        outputs=("loss",),
    )  # fmt: skip


def test_work_of_a_small_network_by_hand():
    first, relu, second, mean = graph_work(mlp(), {"B": 4})
    assert (first.kind, first.flops, relu.kind) == ("matmul", 2 * 4 * 8 * 8, "memory")
    assert (first.param_bytes, second.param_bytes) == (256, 0)  # a tied parameter counts once
    assert first.moved_bytes == 4 * 8 * 4 * 2 + 256
    assert [w.saved_bytes for w in (first, relu, second, mean)] == [0, 128, 0, 0]  # the input is no anchored value
    memory = memory_of([first, relu, second, mean], "adamw")
    assert memory.state_bytes == 256 * 4
    assert memory.total_bytes(3) == 256 * 4 + 3 * 128
    with pytest.raises(UserError, match="known: adadelta"):
        memory_of([first], "lion")


@given(dataflows())
def test_work_agrees_with_the_flops_and_parameters_of_the_graph(graph):
    try:
        flops = anchored_flops(graph, {"B": 3})
    except GraphError:  # shapes of drawn graphs need not make sense
        reject()
    works = graph_work(graph, {"B": 3})
    assert len(works) == len(anchored_ops(graph))
    assert [w.flops for w in works] == flops
    used = {ref for op in anchored_ops(graph) for ref in op.refs()}
    assert sum(w.param_bytes for w in works) == sum(
        p.spec.num_bytes({"B": 3}) for p in graph.params.values() if p.id in used
    )
    assert all(w.saved_bytes >= 0 and w.output_bytes >= 0 for w in works)


@given(TABLE)
def test_a_calibration_is_fitted_back(table):
    samples = [
        Sample(kind=kind, flops=size, moved_bytes=size / 10, seconds=table.launch_s + size / rate)
        for kind, rate in (("matmul", table.matmul), ("attention", table.attention), ("convolution", table.convolution))
        for size in (1e6, 1e9, 1e11)
    ]
    samples += [
        Sample(kind="memory", flops=1, moved_bytes=size, seconds=table.launch_s + size / table.bytes_per_s)
        for size in (1e4, 1e7, 1e9)
    ]
    fitted = fit_rates(samples)
    for sample in samples:
        if sample.kind == "memory":
            predicted = fitted.launch_s + sample.moved_bytes / fitted.bytes_per_s
        else:
            predicted = fitted.launch_s + sample.flops / getattr(fitted, sample.kind)
        assert predicted == pytest.approx(sample.seconds, rel=1e-3)


def test_what_cannot_be_fitted_is_named():
    with pytest.raises(UserError, match="without a matmul"):
        fit_rates([Sample(kind="memory", flops=1, moved_bytes=1, seconds=1)])
    with pytest.raises(UserError, match="seconds above 0"):
        fit_rates([Sample(kind="matmul", flops=1, moved_bytes=1, seconds=0)])
    with pytest.raises(UserError, match="lambda 2"):
        lambda_rates(1e12, 2)
    with pytest.raises(UserError, match="at least one pair"):
        fit_link([(1, math.inf)])


def test_lambda_is_the_papers_model():
    (work, *_) = graph_work(mlp(), {"B": 4})
    assert lambda_rates(1e12, 0.5).forward_s(work) == work.flops / 0.5e12


#: Multiprocessors, clocks in GHz of fp32 and of tensor cores, FLOPs a clock and multiprocessor in fp32 and in half with
#: accumulation in fp32, pins of the memory's bus and Gbps of each.
CHIPS = {
    "RTX 2080": (46, 1.71, 1.71, 128, 512, 256, 14),
    "RTX 2080 Ti": (68, 1.545, 1.545, 128, 512, 352, 14), "RTX 3060": (28, 1.777, 1.777, 256, 512, 192, 15),
    "RTX 3080": (68, 1.71, 1.71, 256, 512, 320, 19), "RTX 3090": (82, 1.695, 1.695, 256, 512, 384, 19.5),
    "RTX 4070 Ti": (60, 2.61, 2.61, 256, 512, 192, 21), "RTX 4080": (76, 2.505, 2.505, 256, 512, 256, 22.4),
    "RTX 4090": (128, 2.52, 2.52, 256, 512, 384, 21), "RTX A6000": (84, 1.8, 1.8, 256, 1024, 384, 16),
    "T4": (40, 1.59, 1.59, 128, 1024, 256, 10), "V100": (80, 1.53, 1.53, 128, 1024, 4096, 1.752),
    "A10": (72, 1.695, 1.695, 256, 1024, 384, 12.5), "L4": (58, 2.04, 2.04, 256, 1024, 192, 12.5),
    "A100 40GB": (108, 1.41, 1.41, 128, 2048, 5120, 2.43), "A100 80GB": (108, 1.41, 1.41, 128, 2048, 5120, 3.186),
    "H100": (132, 1.98, 1.83, 256, 4096, 5120, 5.23),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in DEVICES if not name.startswith("CPU")])
def test_what_is_published_follows_from_the_chip(name):
    count, clock, tensor_clock, plain, tensor, pins, gbps = CHIPS[name]
    spec = DEVICES[name]
    assert spec.fp32 == pytest.approx(count * clock * 1e9 * plain, rel=0.01)
    assert spec.half == pytest.approx(count * tensor_clock * 1e9 * tensor, rel=0.01)
    assert spec.bytes_per_s == pytest.approx(pins * gbps * 1e9 / 8, rel=0.01)


@pytest.mark.parametrize("name", DEVICES)
def test_every_known_device_is_usable(name):
    spec = DEVICES[name]
    assert 0 < spec.usable_bytes < spec.memory_bytes
    assert spec.rates("float32").matmul <= 0.8 * spec.fp32
    assert spec.rates().matmul >= spec.rates("float32").matmul * 0.6


@given(st.floats(0, 1), st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e3, 1e10)), min_size=1, max_size=6))
def test_a_link_is_fitted_back(latency_s, drawn):
    points = dict(drawn)
    true = LinkRates(latency_s=latency_s, points=tuple(sorted(points.items())))
    fitted = fit_link([(b, true.seconds(b)) for b in points], round_trip_s=2 * latency_s)
    for num_bytes in points:
        assert fitted.seconds(num_bytes) == pytest.approx(true.seconds(num_bytes), rel=1e-6)
    codec = CodecSpeed(1e-9, 2e-9, 1e-6)
    assert fitted.seconds(1e6, 1000, codec) == pytest.approx(fitted.seconds(1e6) + 3e-6 + 2e-6)
