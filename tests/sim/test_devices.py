"""Devices that were calibrated: written, read back, named by nodes, and counted in a plan as measured."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.test_planning import BASE, deep
from typer.testing import CliRunner

from fusionllm.cli.main import app
from fusionllm.cli.show_plan import warn_unmeasured
from fusionllm.errors import UserError
from fusionllm.estimate.device import DeviceRates
from fusionllm.estimate.library import DEVICES
from fusionllm.estimate.work import graph_work
from fusionllm.ir.cluster import NodeProfile, Sample
from fusionllm.schedule.workload import StepOptions, build_workload
from fusionllm.sim.cluster import (
    append_device,
    build_cluster,
    build_spec,
    device_rates,
    load_cluster,
    unmeasured_devices,
)
from fusionllm.sim.devices import Device, measured_device
from fusionllm.sim.what_if import change

LAB = Path(__file__).parents[2] / "examples" / "clusters" / "one-lab.toml"
rates = st.builds(
    DeviceRates, **dict.fromkeys(("matmul", "attention", "convolution", "bytes_per_s"), st.floats(1e3, 1e16)),
    launch_s=st.floats(0, 1e-2),
)  # fmt: skip
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.+ -]{0,30}", fullmatch=True)


def profile_of(table: DeviceRates) -> NodeProfile:
    """What a device of exactly these rates would report."""
    samples = [
        Sample(kind=kind, flops=size, moved_bytes=size, seconds=table.launch_s + size / getattr(table, rate))
        for kind, rate in (("matmul", "matmul"), ("attention", "attention"), ("convolution", "convolution"),
                           ("memory", "bytes_per_s"))
        for size in (1e6, 1e9, 1e11)
    ]  # fmt: skip
    return NodeProfile(device="cpu, 2 threads", memory_bytes=12.5e9, samples=tuple(samples))


FULL = DeviceRates(matmul=2e12, attention=1e12, convolution=5e11, bytes_per_s=2e10, launch_s=1e-5)
HALF = DeviceRates(matmul=4e12, attention=1e12, convolution=5e11, bytes_per_s=3e10, launch_s=1e-5)


@given(names, rates, st.none() | rates, st.integers(1, 10**7))
def test_a_device_is_written_and_read_back(tmp_path_factory, name, full, half, memory_mb):
    path = tmp_path_factory.mktemp("clusters") / "lab.toml"
    path.write_bytes(LAB.read_bytes())
    device = Device(name=name, memory=f"{memory_mb} MB", float32=full, bfloat16=half)
    append_device(path, device)
    spec = load_cluster(path)
    assert spec.device == (device,)
    assert msgspec.structs.replace(spec, device=()) == load_cluster(LAB)
    assert device_rates(spec, "float32")[name] == full and device_rates(spec)[name] == (half or full)


def test_what_was_measured_is_what_a_node_takes(tmp_path, monkeypatch):
    def measure(backend: str, device: str, precision: str) -> NodeProfile:
        return profile_of(FULL if precision == "float32" else HALF)

    monkeypatch.setattr("fusionllm.compute.calibrate", measure)
    path = tmp_path / "lab.toml"
    path.write_bytes(LAB.read_bytes())
    words = ["calibrate", "--device", "cpu", "--name", "desk", "--append", str(path)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and shown.output == path.read_text()[-len(shown.output) :], shown.output
    as_json = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "--json"])
    assert json.loads(as_json.stdout)["name"] == "cpu 2 threads"
    spec = change(load_cluster(path), "add 1x desk in fence lab")
    for precision, table in (("float32", FULL), ("bfloat16", HALF)):
        workload = build_workload(deep(), StepOptions(precision=precision), device_rates(spec, precision))
        node = build_cluster(spec, precision).nodes[-1]
        assert (node.device, node.memory_bytes) == ("desk", 12.5e9)
        (work, *_) = graph_work(deep(), {"B": 1})
        assert workload.device_s["desk"][0] == pytest.approx(table.forward_s(work), rel=1e-3)
        by_lambda = build_cluster(spec, precision, "lambda").nodes[-1]
        assert by_lambda.flops_per_s == pytest.approx(table.matmul, rel=1e-3) and by_lambda.device == ""
    again, before = CliRunner().invoke(app, words), path.read_text()
    assert again.exit_code == 2 and "has a device 'desk' already" in again.stderr and path.read_text() == before
    bad = CliRunner().invoke(app, ["calibrate", "--name", 'a"b'])
    assert bad.exit_code == 2 and "is no name for a device" in bad.stderr


def test_a_measurement_wins_over_a_datasheet():
    mine = msgspec.to_builtins(Device(name="T4", memory="9 GB", float32=FULL))
    cluster = build_cluster(build_spec({**BASE, "device": [mine]}))
    assert cluster.nodes[-1].memory_bytes == 9e9 and cluster.nodes[-1].flops_per_s == FULL.matmul
    assert build_cluster(build_spec(BASE)).nodes[-1].memory_bytes == DEVICES["T4"].usable_bytes


def test_rates_that_stand_in_for_another_precision_are_named(capsys):
    devices = [msgspec.to_builtins(Device(name=name, memory="9 GB", float32=FULL)) for name in ("T4", "unused")]
    spec = build_spec({**BASE, "device": devices})
    assert unmeasured_devices(spec, "float32") == () and unmeasured_devices(build_spec(BASE), "bfloat16") == ()
    assert unmeasured_devices(spec, "bfloat16") == ("T4",)
    warn_unmeasured(spec, "bfloat16")
    assert "device T4 has no rates in bfloat16, counted with those in float32" in capsys.readouterr().err


def test_rates_too_fast_to_tell_are_those_of_products():
    samples = [Sample(kind="matmul", flops=x, moved_bytes=x, seconds=1e-3 + x / 1e12) for x in (1e8, 1e10, 1e11)]
    samples += [Sample(kind="attention", flops=x, moved_bytes=x, seconds=1e-3 - x / 1e11) for x in (1e6, 1e7)]
    samples += [Sample(kind="memory", flops=x, moved_bytes=x, seconds=1e-3 + x / 1e9) for x in (1e6, 1e7)]
    found = measured_device("a", {"float32": NodeProfile(device="a", memory_bytes=1e9, samples=tuple(samples))})
    assert found.float32.attention == found.float32.convolution == found.float32.matmul
    with pytest.raises(UserError, match=r"device 'a'\.float32\.bytes_per_s is inf"):
        measured_device("a", {"float32": NodeProfile(device="a", memory_bytes=1e9, samples=tuple(samples[:5]))})


DESK = msgspec.to_builtins(Device(name="desk", memory="9 GB", float32=FULL))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"float32": {**DESK["float32"], "matmul": float("inf")}}, "device[0].float32.matmul is inf"),
        ({"float32": {**DESK["float32"], "matmul": 0.0}}, "device[0].float32.matmul is 0.0"),
        ({"float32": {**DESK["float32"], "launch_s": -1.0}}, "device[0].float32.launch_s is -1.0"),
        ({"float32": {**DESK["float32"], "matmull": 1.0}}, "did you mean device[0].float32.matmul"),
        ({"float32": {"matmul": 1.0}}, "attention"),
        ({"float32": "fast"}, "device[0].float32 must be a table"),
        ({"memory": "0 GB"}, "above zero"),
        ({"memory": "lots"}, "'lots' is not a size"),
        ({"name": "a\nb"}, "no name for a device"),
        ({"nam": "a"}, "did you mean device[0].name"),
    ],
)
def test_a_device_that_cannot_be_is_refused(change, words):
    with pytest.raises(UserError) as caught:
        build_spec({**BASE, "device": [{**DESK, **change}]})
    assert words in str(caught.value)


def test_devices_are_named_once_and_near_ones_are_named():
    with pytest.raises(UserError, match="'desk' stands for 2 devices"):
        build_spec({**BASE, "device": [DESK, DESK]})
    with pytest.raises(UserError, match="device 'dsk' is not known; did you mean desk"):
        build_spec({**BASE, "device": [DESK], "node": [{"fence": "lab", "device": "dsk"}]})
