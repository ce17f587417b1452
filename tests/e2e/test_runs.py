"""The real thing, through the command line: node processes, sockets, text, checkpoints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import fusionllm
from fusionllm.api.config import load_config
from fusionllm.errors import UserError
from fusionllm.telemetry.events import Note

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-W", "ignore", "-m", "fusionllm.cli.main"]
TINY = """
[model]
source = "gpt2"
config = { n_layer = 2, n_head = 2, n_embd = 32, n_positions = 32, vocab_size = 256 }
[data]
source = "%s"
seq_len = 32
val_fraction = 0.02
[train]
steps = 6
global_batch = 8
microbatch_size = 4
eval_batches = 2
[cluster]
nodes = 2
""" % (ROOT / "examples" / "data" / "shakespeare.txt")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def train(toml: Path, root: Path, *more: str) -> list[dict]:
    """Events of a run that must succeed."""
    done = subprocess.run(
        [*CLI, "train", str(toml), "--json", "--set", f"run.root={root}", *more],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def losses(events: list[dict]) -> list[float]:
    return [e["loss"] for e in events if e["type"] == "step"]


def start(toml: Path, root: Path, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*CLI, "train", str(toml), "--json", "--set", f"run.root={root}", *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_step(process: subprocess.Popen, step: int) -> None:
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == "step" and event["step"] >= step:
            return
    raise AssertionError(process.stderr.read()[-2000:])


def children(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, seconds)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_the_quickstart_trains_exports_and_gives_the_same_validation_loss(tmp_path):
    events = train(ROOT / "examples" / "quickstart.toml", tmp_path, "--name", "q", "--set", "train.steps=4")
    run = tmp_path / "q"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["last_train_loss"] < summary["first_train_loss"]
    assert len(losses(events)) == 4 and events[-1]["type"] == "summary"
    assert summary["extra"]["sample"].startswith("KING HENRY: ")
    assert summary["link_bytes"]["node1->node2"] > 0
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 5
    assert list((run / "tb").iterdir()) and (run / "config.toml").is_file()

    folder = tmp_path / "exported"
    done = subprocess.run(
        [*CLI, "export", str(run), str(folder)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        from fusionllm.store.dataset import open_dataset

        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        config = load_config(run / "config.toml")
        data = open_dataset(config.data, seed=0, base_dir=Path(config.run.base_dir))
        with torch.no_grad():
            total = rows = 0.0
            for batch in data.val_batches(4, 8):
                inputs = {k: torch.from_numpy(v) for k, v in batch.items()}
                total += model(**inputs).loss.item() * len(batch["labels"])
                rows += len(batch["labels"])
    assert total / rows == pytest.approx(summary["val_loss"], abs=1e-5)


def test_ctrl_c_keeps_a_checkpoint_and_resume_equals_an_uninterrupted_run(tiny, tmp_path):
    whole = train(tiny, tmp_path, "--name", "whole", "--set", "train.steps=40")
    process = start(tiny, tmp_path, "--name", "cut", "--set", "train.steps=40")
    wait_for_step(process, 3)
    nodes = children(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err[-2000:]
    assert gone(nodes, 10)
    stopped = json.loads(out.splitlines()[-1])
    assert 3 <= stopped["steps"] < 40
    events = train(tiny, tmp_path, "--name", "cut", "--resume", "--set", "train.steps=40")
    resumed, told = events[-1], [event["text"] for event in events if event.get("kind") == "resume"]
    assert told == [f"from the checkpoint of step {stopped['steps']} of 40"]
    before_s = resumed["wall_s"] - resumed["part_s"]  # until the checkpoint, which is before the end
    assert 0 < before_s < stopped["wall_s"] == stopped["part_s"] and resumed["part_s"] > 0
    assert load_config(tmp_path / "cut" / "config.toml").run.resume is False
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert losses(lines) == losses(whole)
    process = start(tiny, tmp_path, "--name", "cut", "--resume", "--set", "train.steps=40")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.endswith(
        "error: run 'cut' has its 40 steps; to go on raise train.steps (--set train.steps=N)\n"
    )
    assert len(list((tmp_path / "cut" / "checkpoints").glob("step-*40*"))) == 1


def test_a_models_own_config_is_not_the_runs():
    with pytest.raises(UserError, match="goes with its source: model="):
        fusionllm.train("gpt2", config={"n_layer": 2})


def test_no_node_outlives_its_parent_killed(tiny, tmp_path):
    process = start(tiny, tmp_path, "--set", "train.steps=100000")
    wait_for_step(process, 1)
    nodes = children(process)
    assert len(nodes) >= 2
    process.kill()
    process.communicate()
    assert gone(nodes, 15)


def test_a_killed_node_ends_the_run_with_its_name(tiny, tmp_path):
    process = start(tiny, tmp_path, "--name", "hit", "--set", "train.steps=100000", "--set", "train.checkpoint_every=2")
    wait_for_step(process, 5)
    nodes = children(process)
    pid = re.search(r"joined as process (\d+)", (tmp_path / "hit" / "logs" / "node1.log").read_text())
    os.kill(int(pid[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("error: node1 was killed by SIGKILL") and "Traceback" not in err, err[-2000:]
    assert gone(nodes, 10)
    last = sorted((tmp_path / "hit" / "checkpoints").glob("step-*"))[-1]
    done = int(last.name.removeprefix("step-"))
    result = fusionllm.train(config=tiny, root=str(tmp_path), name="hit", resume=True, steps=done + 2, nodes=1)
    assert [e.step for e in result.history if hasattr(e, "lr")] == list(range(1, done + 3))


@pytest.mark.parametrize("ending", ["pipe", "hang-up"])
def test_a_closed_pipe_and_a_hang_up_leave_a_checkpoint(tiny, tmp_path, ending):
    process = start(tiny, tmp_path, "--name", "shut", "--set", "train.steps=100000")
    wait_for_step(process, 2)
    nodes = children(process)
    if ending == "pipe":
        process.stdout.close()
        with process.stderr as errors:
            code, err = process.wait(60), errors.read()
        assert code == 1 and "--resume --name shut" in err and "Traceback" not in err, err[-2000:]
    else:
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert gone(nodes, 10)
    assert list((tmp_path / "shut" / "checkpoints").glob("step-*"))


def test_a_killed_broker_ends_the_run_in_one_sentence(tiny, tmp_path):
    broker = subprocess.Popen(
        [*CLI, "broker", "--host", "127.0.0.1", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with broker:
        ticket = json.loads(broker.stdout.readline())["ticket"]
        node = subprocess.Popen(
            [*CLI, "join", ticket, "--name", "lab", "--host", "127.0.0.1"], stderr=subprocess.PIPE, text=True
        )
        process = start(
            tiny, tmp_path, "--broker", ticket, "--set", "cluster.nodes=1", "--set", "train.steps=100000",
            "--set", "cluster.threads=1",
        )  # fmt: skip
        wait_for_step(process, 2)
        broker.kill()
        _, err = process.communicate(timeout=60)
        _, said = node.communicate(timeout=60)
    assert process.returncode == 1 and node.returncode in (0, 1)
    assert err.splitlines()[-1].startswith(("error: control connection with broker", "error: node lab lost")), err
    assert "Traceback" not in err and "Task was destroyed" not in err, err[-2000:]
    assert "Traceback" not in said and "terminate called" not in said, said[-2000:]


def test_sigterm_before_the_first_step_leaves_nothing(tiny, tmp_path):
    process = start(tiny, tmp_path / "new", "--set", "cluster.nodes=1")
    deadline = time.monotonic() + 60
    while not (nodes := children(process)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err[-2000:]
    assert gone(nodes, 10)
    assert not (tmp_path / "new").exists()


def test_a_broker_and_two_nodes_train_twice(tiny, tmp_path):
    broker = subprocess.Popen(
        [*CLI, "broker", "--host", "127.0.0.1", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    processes = [broker]
    try:
        ticket = json.loads(broker.stdout.readline())["ticket"]
        for index in range(2):
            command = [*CLI, "join", ticket, "--name", f"lab{index}", "--host", "127.0.0.1"]
            processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        first = train(tiny, tmp_path, "--broker", ticket, "--set", "cluster.threads=1")
        second = train(tiny, tmp_path, "--broker", ticket, "--set", "cluster.threads=1")
        assert losses(first) == losses(second) and len(losses(first)) == 6
        twin = subprocess.run(
            [*CLI, "join", ticket, "--name", "lab0"], capture_output=True, text=True, timeout=60, check=False
        )
        assert twin.returncode == 1 and "already here" in twin.stderr
        processes[1].send_signal(signal.SIGINT)
        assert processes[1].wait(20) == 130
    finally:
        for process in reversed(processes):
            process.terminate()
        deadline = time.monotonic() + 20
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
        broker.stdout.close()


def test_a_module_and_arrays_from_python(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.layers(x) - y).square().mean()

    torch.manual_seed(0)
    x = torch.randn(50, 4)
    data = [{"x": a.numpy(), "y": (a.sum(0, keepdim=True)).numpy()} for a in x]
    model = Model()
    result = fusionllm.train(
        model, data, steps=12, nodes=2, global_batch=16, microbatch_size=4, root=str(tmp_path), lr=0.05,
        pipeline="gpipe", val_fraction=0.2, eval_every=6,
    )  # fmt: skip
    assert len(result.losses) == 12 and result.losses[-1] < result.losses[0]  # 40 rows: every third step is short
    assert result.model is model and result.summary.val_loss is not None


def test_texts_from_python_then_export_without_them(tmp_path, monkeypatch):
    monkeypatch.setattr("fusionllm.api.trainer.NEWS_S", 0.0)
    model = {"source": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}}
    seen = []
    result = fusionllm.train(
        model, ["one two three four " * 20, "five six seven " * 20], steps=3, nodes=2, seq_len=16, global_batch=4,
        microbatch_size=2, root=str(tmp_path), name="texts", progress=seen.append, plot=False,
    )  # fmt: skip
    assert len(result.losses) == 3 and not result.stopped_early
    assert [type(e).__name__ for e in result.history] == ["StepMetrics"] * 3 + ["ValMetrics"]
    assert {"Plan", "StepMetrics", "ValMetrics"} <= {type(e).__name__ for e in seen}
    assert any(isinstance(e, Note) and e.kind == "validating" and "batches" in e.text for e in seen)
    next(result.run_dir.glob("checkpoints/*/optimizer.safetensors")).write_bytes(b"")
    folder = fusionllm.export(result.run_dir, tmp_path / "hf")
    assert (folder / "model.safetensors").is_file()
    with pytest.raises(UserError, match=r"did you mean steps"):
        fusionllm.train(model, ["text"], step=3)
    with pytest.raises(UserError, match=r"exists in"):
        fusionllm.train(model, ["text"], root=str(tmp_path), name="texts")
