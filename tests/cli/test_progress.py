"""What a person reads at the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fusionllm.cli import progress
from fusionllm.cli.progress import LiveReporter
from fusionllm.telemetry.events import StepMetrics
from fusionllm.telemetry.summary import build_summary


@pytest.mark.parametrize(("part_s", "words"), [(None, "0 steps in 1 min 30 s, "), (20.0, "30 s (20.0 s since it was")])
def test_the_time_of_a_resumed_run_is_of_all_its_parts(part_s, words, capsys):
    summary = build_summary([], wall_s=90.0, part_s=part_s)
    result = SimpleNamespace(summary=summary, run_dir=Path("runs/x"), stopped_early=False, model=None)
    LiveReporter(1).finish(result)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("there", "argv", "called"),
    [
        ("/usr/bin/fusionllm", "/x/fusionllm/__main__.py", "fusionllm"),
        (None, "/x/fusionllm/__main__.py", "python -m fusionllm"),
        (None, "/venv/bin/fusionllm", "/venv/bin/fusionllm"),
    ],
)
def test_what_to_do_next_can_be_typed(there, argv, called, monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: there)
    monkeypatch.setattr("sys.argv", [argv])
    result = SimpleNamespace(
        summary=build_summary([], wall_s=1.0), run_dir=Path("runs/x"), stopped_early=True, model=None
    )
    LiveReporter(1).finish(result)
    out = capsys.readouterr().out
    assert progress.program() == called and f"go on with: {called} train runs/x/config.toml --resume --name x" in out
    assert "loss curve" not in out  # there is none


def test_what_is_left_is_said_once_a_step_has_shown_it(monkeypatch, capsys):
    times = iter([99.0, 100.0, 102.0, 110.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    reporter = LiveReporter(11)
    for step, seconds in ((1, 60.0), (2, 2.0), (3, 8.0)):  # the first one loads
        reporter(StepMetrics(step=step, loss=1.0, tokens_per_s=1.0, seconds=seconds))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/11") and "left" not in first
    assert second.startswith("step 3/11") and second.endswith("left 40.0 s")
