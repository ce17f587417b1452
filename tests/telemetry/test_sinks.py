"""Sinks keep what they are given, go on after a resume, and close whatever happens."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionllm.errors import UserError
from fusionllm.telemetry.events import Note, StepMetrics, ValMetrics
from fusionllm.telemetry.sinks import Fanout, JsonlSink, MemorySink, TensorBoardSink, open_sinks, read_events


def step(number: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(step=number, loss=loss, lr=0.1, grad_norm=1.0, tokens=8, link_bytes={"n0->n1": 7})


@given(st.integers(0, 12), st.integers(0, 12), st.binary(max_size=30).filter(lambda tail: b"\n" not in tail))
def test_jsonl_resumes_after_a_step_and_drops_a_torn_line(tmp_path_factory, written, resume_step, torn):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    sink = JsonlSink(path)
    for number in range(1, written + 1):
        sink.write(step(number))
        sink.write(ValMetrics(step=number, loss=3.0))
    assert len(read_events(path)) == 2 * written  # flushed before it is closed
    sink.close()
    path.write_bytes(path.read_bytes() + torn)
    sink = JsonlSink(path, resume_step=resume_step)
    kept = read_events(path)
    assert kept == [e for n in range(1, min(written, resume_step) + 1) for e in (step(n), ValMetrics(step=n, loss=3.0))]
    sink.write(step(99))
    sink.close()
    assert read_events(path) == [*kept, step(99)]


def test_a_new_jsonl_replaces_an_old_one(tmp_path):
    for _ in range(2):
        sink = JsonlSink(tmp_path / "sub" / "metrics.jsonl")
        sink.write(step(1))
        sink.close()
    assert read_events(tmp_path / "sub" / "metrics.jsonl") == [step(1)]
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"type": "val", "step": 1, "loss": 2}\nbroken\n{"type": "val"}\n')
    with pytest.raises(UserError, match=r"m\.jsonl:2: not a line of metrics"):
        read_events(tmp_path / "m.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        read_events(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="cannot write"):
        JsonlSink(tmp_path / "m.jsonl" / "x")


def tensorboard_events(folder: Path) -> list:
    """Every event in the files of a folder, read by the format: length, crc, a protocol buffer, crc."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir()):
        raw = file.read_bytes()
        while raw:
            (length,) = struct.unpack("<Q", raw[:8])
            found.append(Event.FromString(raw[12 : 12 + length]))
            raw = raw[16 + length :]
    return found


def test_tensorboard_files_hold_the_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = TensorBoardSink(tmp_path)
    for number in (1, 2, 3):
        sink.write(step(number, loss=number / 2))
    sink.write(ValMetrics(step=3, loss=0.0))
    sink.write(Note(step=3, kind="sample", text="To be, or not"))
    sink.close()
    found: dict[str, dict[int, float]] = {}
    for event in tensorboard_events(tmp_path):
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert found["train/loss"] == {1: 0.5, 2: 1.0, 3: 1.5}
    assert found["val/perplexity"] == {3: 1.0}
    assert found["link_bytes/n0_to_n1"] == {1: 7.0, 2: 7.0, 3: 7.0}
    assert any(tag.startswith("sample") for tag in found)


def test_tensorboard_resume_hides_later_steps(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    TensorBoardSink(tmp_path, resume_step=7).close()
    starts = [e for e in tensorboard_events(tmp_path) if e.session_log.status == event_pb2.SessionLog.START]
    assert [event.step for event in starts] == [8]


def test_open_sinks_by_name(tmp_path):
    pytest.importorskip("tensorboardX")
    sinks = open_sinks(["jsonl", "tensorboard", "memory"], tmp_path)
    sinks.write(step(1))
    sinks.close()
    assert read_events(tmp_path / "metrics.jsonl") == [step(1)]
    assert tensorboard_events(tmp_path / "tb")
    with pytest.raises(UserError, match="unknown sink 'wandb'; known: jsonl, tensorboard, memory"):
        open_sinks(["jsonl", "wandb"], tmp_path)


def test_closing_closes_all_and_still_tells(tmp_path):
    class Failing(MemorySink):
        def close(self) -> None:
            raise OSError("disk full")

    good = JsonlSink(tmp_path / "m.jsonl")
    with pytest.raises(OSError, match="disk full"):
        Fanout([Failing(), good, Failing()]).close()
    with pytest.raises(ValueError, match="closed"):
        good.write(step(1))
