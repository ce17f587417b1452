"""The loss curve, the summary and the log lines of a run."""

from __future__ import annotations

import io
import logging
import math
import re
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionllm.errors import UserError
from fusionllm.telemetry.events import Note, StepMetrics, ValMetrics
from fusionllm.telemetry.log import configure_logging
from fusionllm.telemetry.plot import plot_loss, smooth
from fusionllm.telemetry.sinks import JsonlSink
from fusionllm.telemetry.summary import build_summary, encode_summary

RUN = [
    ValMetrics(step=0, loss=4.0, seconds=1.0),
    *[StepMetrics(step=n, loss=4 / n, tokens=100, seconds=0.5, link_bytes={"b->a": 3, "a->b": n}) for n in range(1, 5)],
    Note(step=4, kind="sample", text="hi"),
    ValMetrics(step=4, loss=1.5, seconds=1.0),
]


def png_size(raw: bytes) -> tuple[int, int]:
    assert raw.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", raw[16:24])


def test_loss_curve_from_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for event in RUN:
        sink.write(event)
    sink.close()
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "gpt2 on 4 nodes")
    raw = (tmp_path / "loss.png").read_bytes()
    assert png_size(raw) == (960, 540)
    assert len(raw) > 10_000  # more than empty axes


@pytest.mark.parametrize(
    "events",
    [[], RUN[:1], RUN[1:2], [StepMetrics(step=1, loss=math.nan), ValMetrics(step=1, loss=math.inf)]],
)
def test_loss_curve_of_little_or_strange_data(tmp_path, events):
    pytest.importorskip("matplotlib")
    plot_loss(events, tmp_path / "loss.png", "a title with $dollars$ and 漢字")
    assert png_size((tmp_path / "loss.png").read_bytes()) == (960, 540)


def test_loss_curve_that_cannot_be_written(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="cannot write"):
        plot_loss(RUN, tmp_path / "none" / "loss.png", "title")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_the_smoothed_line_starts_at_the_first_loss_and_stays_in_range(losses):
    smoothed = smooth(losses)
    assert len(smoothed) == len(losses)
    assert smoothed[0] == pytest.approx(losses[0])
    low, high = min(losses), max(losses)
    assert all(low - 1e-3 <= value <= high + 1e-3 for value in smoothed)


def test_summary():
    summary = build_summary(RUN, wall_s=10.0, versions={"x": "1"}, extra={"name": "r"})
    assert summary.steps == 4
    assert (summary.first_train_loss, summary.last_train_loss) == (4.0, 1.0)
    assert (summary.val_loss, summary.best_val_loss) == (1.5, 1.5)
    assert summary.val_perplexity == pytest.approx(math.exp(1.5))
    assert (summary.tokens, summary.train_s, summary.val_s, summary.wall_s) == (400, 2.0, 2.0, 10.0)
    assert summary.part_s == 10.0 and build_summary(RUN, wall_s=10.0, part_s=4.0).part_s == 4.0
    assert summary.tokens_per_s == 200.0
    assert summary.link_bytes == {"a->b": 10, "b->a": 12}
    raw = msgspec.json.decode(encode_summary(summary))
    assert raw["steps"] == 4
    assert raw["extra"] == {"name": "r"}


def test_summary_of_nothing_names_versions():
    summary = build_summary([], wall_s=0.0)
    assert summary.steps == 0
    assert summary.val_loss is None
    assert {"python", "numpy"} <= set(summary.versions)
    assert msgspec.json.decode(encode_summary(summary))["tokens_per_s"] == 0


@pytest.fixture
def package_logger():
    logger = logging.getLogger("fusionllm")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_log_line(package_logger):
    stream = io.StringIO()
    configure_logging("owner", "info", io.StringIO())
    configure_logging("n3", "info", stream)  # again: one handler, the new name
    logging.getLogger("fusionllm.node.stage").info("stage %d ready", 2)
    logging.getLogger("fusionllm.node").debug("not shown")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    n3  node\.stage: stage 2 ready\n", stream.getvalue())


def test_unknown_log_level(package_logger):
    with pytest.raises(UserError, match="unknown log level 'loud'; known: debug, info, warning, error"):
        configure_logging("n3", "loud")
