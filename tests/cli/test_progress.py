"""What a person reads at the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fusionllm.cli.progress import LiveReporter
from fusionllm.telemetry.summary import build_summary


@pytest.mark.parametrize(("part_s", "words"), [(None, "0 steps in 1 min 30 s, "), (20.0, "30 s (20.0 s since it was")])
def test_the_time_of_a_resumed_run_is_of_all_its_parts(part_s, words, capsys):
    summary = build_summary([], wall_s=90.0, part_s=part_s)
    result = SimpleNamespace(summary=summary, run_dir=Path("runs/x"), stopped_early=False, model=None)
    LiveReporter(1).finish(result)
    assert words in capsys.readouterr().out
