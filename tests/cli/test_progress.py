"""What a person reads at the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fusionllm.cli import progress
from fusionllm.cli.progress import LiveReporter
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
