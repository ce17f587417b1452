"""Run folders: numbered when unnamed, never written over, found again for a resume."""

from __future__ import annotations

import pytest

from fusionllm.errors import UserError
from fusionllm.store.run_dir import RunDir


def test_unnamed_runs_are_numbered(tmp_path):
    names = [RunDir.create(tmp_path / "runs").name for _ in range(3)]
    assert names == ["run-001", "run-002", "run-003"]
    assert RunDir.create(tmp_path / "runs", resume=True).name == "run-003"


def test_layout(tmp_path):
    run = RunDir.create(tmp_path, "first")
    run.write_config("a = 1\n")
    run.write_config("a = 2\n")
    assert run.config.read_text() == "a = 2\n" and run.config.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in run.path.iterdir()] == ["config.toml"]
    paths = (run.metrics, run.tensorboard, run.loss_curve, run.summary, run.checkpoints)
    assert [p.name for p in paths] == ["metrics.jsonl", "tb", "loss.png", "summary.json", "checkpoints"]


def test_an_existing_run_is_not_written_over(tmp_path):
    run = RunDir.create(tmp_path, "first")
    assert RunDir.create(tmp_path, "first") == run  # still empty: nothing would be lost
    run.write_config("")
    with pytest.raises(UserError, match=r"run 'first' exists in .* without a checkpoint; choose another"):
        RunDir.create(tmp_path, "first")
    (run.checkpoints / "step-1").mkdir(parents=True)
    with pytest.raises(UserError, match=r"run 'first' exists in .*; resume it, choose another name, or remove"):
        RunDir.create(tmp_path, "first")
    assert RunDir.create(tmp_path, "first", resume=True) == run
    assert RunDir.open(tmp_path, "first") == run


def test_a_run_to_resume_must_exist(tmp_path):
    with pytest.raises(UserError, match="no numbered run"):
        RunDir.create(tmp_path, resume=True)
    RunDir.create(tmp_path, "first")
    with pytest.raises(UserError, match=r"no run 'frist' in .*; did you mean first"):
        RunDir.create(tmp_path, "frist", resume=True)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a\nb", "x" * 101])
def test_bad_names(tmp_path, name):
    with pytest.raises(UserError, match="run name"):
        RunDir.create(tmp_path, name)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="cannot make a run"):
        RunDir.create(tmp_path / "runs", "a")
