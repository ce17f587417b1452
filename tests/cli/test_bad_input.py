"""Bad input: one clear sentence with the value and the fix, the right exit code, nothing half-written."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fusionllm
from fusionllm.cli.main import app
from fusionllm.cli.show_plan import step_options
from fusionllm.errors import CheckpointError, UserError
from fusionllm.schedule.workload import StepOptions
from fusionllm.store.checkpoint import save_checkpoint
from fusionllm.store.manifest import CheckpointMeta

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "examples" / "data" / "shakespeare.txt"
GOOD = f"""
[model]
source = "gpt2"
config = {{ n_layer = 1, n_head = 1, n_embd = 8, n_positions = 32 }}
[data]
source = "{TEXT}"
seq_len = 16
[train]
steps = 1
[cluster]
nodes = 2
"""


def invoke(*args: str):
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps = 1", "step = 1", ["train.step", "did you mean train.steps"]),
        ("[train]", "[trian]", ["trian", "did you mean train"]),
        ("steps = 1", 'steps = "many"', ["train.steps", "'many'", "int"]),
        ("steps = 1", "steps = 0", ["train.steps is 0", "at least 1"]),
        ("steps = 1", 'pipeline = "2f2b"', ["2f2b", "1f1b"]),
        ("[train]", "[train", ["not valid TOML"]),
        (str(TEXT), str(TEXT) + "x", ["shakespeare.txtx"]),
        ("seq_len = 16", "seq_len = 64", ["data.seq_len is 64", "32"]),
        ("nodes = 2", "nodes = 500\n[optimizer]", ["500", "microbatch"]),
        ("steps = 1", "steps = 1\nglobal_batch = 4", ["microbatch"]),
        ("nodes = 2", 'nodes = 2\nbroker = "xyz"', ["'xyz'", "ticket"]),
        ("nodes = 2", "nodes = 2\nfences = [1, 2]", ["3", "2"]),
        ("nodes = 2", 'nodes = 2\nslow_link = { bandwidth = "fast" }', ["'fast'", "Mbps"]),
        ("nodes = 2", 'nodes = 2\nslow_link = { bandwidth = "4 Mbps" }', ["between fences", "all nodes are in one"]),
        ("[cluster]", "[compression]\nforward = 'int8'\n[cluster]", ["between fences", "cluster.fences", "'all'"]),
        ("[cluster]", "[compression]\nrule = 'deadline'\n[cluster]", ["between fences", "cluster.fences", "'all'"]),
        ("[cluster]", "[compression]\nfloor = 'klt-ecc'\n[cluster]", ["compression.floor is 'klt-ecc'", "hadamard"]),
        ("[cluster]", "[compression]\nratio = -5\n[cluster]", ["compression.ratio is -5", "at least 1"]),
        (
            "[cluster]",
            "[compression]\nrule = 'deadlin'\n[cluster]",
            ["rule is 'deadlin'", "mean deadline"],
        ),
        ("[cluster]", "[optimizer]\nlr = nan\n[cluster]", ["optimizer.lr is nan", "finite"]),
        ("[cluster]", "[optimizer]\nname = 'adamx'\n[cluster]", ["'adamx'", "adamw", "sgd"]),
        ("[cluster]", "[cluster]\nstall_s = 0", ["cluster.stall_s is 0", "at least 1"]),
        ("n_layer = 1", "n_layers = 1", ["n_layers", "n_layer"]),
        ("[cluster]", "[compression]\nforward = 'int9'\n[cluster]", ["compression.forward", "int9", "int8"]),
        ("[cluster]", "[compression]\nforward = 'tangent(int8)'\n[cluster]", ["tangent(int8)", "gradients"]),
        ("[cluster]", "[compression]\nbackward = 'ef(int8)'\n[cluster]", ["ef(int8)", "replicas"]),
        ("[cluster]", "[compression]\nlinks = 'fast'\n[cluster]", ["'fast'", "slow", "all"]),
        ("steps = 1", "pipeline = '1F1B-ahed'", ["mean 1f1b-ahead?", "known: gpipe, 1f1b, 1f1b-ahead"]),
        ("steps = 1", "pipeline = 'gpipe:2'", ["'gpipe:2'", "only 1f1b-ahead takes depths"]),
        ("steps = 1", "pipeline = '1f1b-ahead:5,3,1'", ["train.pipeline", "3 depths for 2 stages"]),
        ("steps = 1", "global_batch = 99999999999", ["train.global_batch is 99999999999", "at most 262144"]),
        ("steps = 1", "microbatch_size = 9999999", ["train.microbatch_size is 9999999", "at most 1048576"]),
        ("[cluster]", "[run]\nseed = 99999999999999999999\n[cluster]", ["run.seed is 9999", "at most 9223"]),
        ("[cluster]", "[optimizer]\nwarmup_steps = -1\n[cluster]", ["optimizer.warmup_steps is -1", "at least 0"]),
        ("[cluster]", "[optimizer]\nmin_lr_ratio = 1.5\n[cluster]", ["optimizer.min_lr_ratio is 1.5", "at most 1"]),
        ("[cluster]", "[optimizer]\nclip_norm = -1.0\n[cluster]", ["optimizer.clip_norm is -1.0"]),
        ("n_embd = 8", "n_embd = 0", ["cannot build this model (", "model.config"]),
        ("steps = 1", "precision = 'bfloat'", ["mean bfloat16?"]),
        ("[cluster]", "[cluster]\npartition = 'dpp'", ["mean dp?"]),
        ('source = "gpt2"', 'source = "gtp2"', ["mean gpt2?"]),
        ("seq_len = 16", "seq_len = 16\ntokenizer = 'byte'", ["data.tokenizer 'byte'", "mean bytes?"]),
        ("seq_len = 16", "documents = 'padedd'", ["data.documents = 'padedd'", "mean padded?", "joined"]),
        ("[cluster]", "[compression]\nforward = 'hadamrd'\n[cluster]", ["mean hadamard?"]),
        ("[cluster]", "[compression]\nforward = 'topk:ration=3'\n[cluster]", ["mean ratio?"]),
        ("[cluster]", "[compression]\nforward = 'topk:index=rise'\n[cluster]", ["mean rice?"]),
        ("[cluster]", "[optimizer]\noptions = { amsgrd = true }\n[cluster]", ["mean amsgrad?"]),
        ("[cluster]", "[output]\nsinks = ['tensorbord']\n[cluster]", ["mean tensorboard?"]),
        ("[cluster]", "[compression]\ndense_last = 2\n[cluster]", ["compression.dense_last", "2"]),
    ],
)
def test_a_bad_run_file_is_refused(old, new, words, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(GOOD.replace(old, new))
    result = invoke("train", str(path), "--set", f"run.root={tmp_path / 'runs'}")
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr
    assert not list((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


def test_empty_data_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    path = tmp_path / "run.toml"
    path.write_text(GOOD.replace(str(TEXT), "empty.txt"))
    result = invoke("train", str(path), "--set", f"run.root={tmp_path / 'runs'}")
    assert result.exit_code == 2 and "empty" in result.stderr


def test_more_stages_than_operators_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        "[model]\nsource = 'python:small:make'\n[data]\nsource = 'python:small:rows'\n"
        "[train]\nsteps = 1\nmicrobatch_size = 1\n"
        f"[cluster]\nnodes = 9\n[run]\nroot = '{tmp_path / 'runs'}'\n"
    )
    (tmp_path / "small.py").write_text(
        "import numpy, torch\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.w = torch.nn.Parameter(torch.ones(2))\n"
        "    def forward(self, x):\n        return (x * self.w).mean()\n"
        "def make():\n    return M()\n"
        "def rows():\n    return [{'x': numpy.ones(2, dtype='float32')} for _ in range(64)]\n"
    )
    result = invoke("train", str(path))
    assert result.exit_code in (1, 2) and "9" in result.stderr and "operators" in result.stderr, result.stderr


@pytest.mark.parametrize("command", [["train", "absent.toml"], ["export", "runs/absent", "out"], ["graph", "absent"]])
def test_what_is_not_there_is_named(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*command)
    assert result.exit_code == 2 and "absent" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = invoke("broker", "--host", "127.0.0.1", "--port", str(port))
    assert result.exit_code == 2 and str(port) in result.stderr and "--port" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "70000"], ["--port", "65535"]),
        (["--advertise", "a b", "--port", "0"], ["'a b'", "--advertise"]),
        (["--host", "no.such.host.invalid", "--port", "0"], ["no.such.host.invalid"]),
    ],
)
def test_an_address_that_cannot_be_is_refused(args, words):
    result = invoke("broker", *args)
    assert result.exit_code == 2
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    ("command", "args", "words"),
    [
        ("simulate", ["--jitter", "2"], ["--jitter is 2", "0 and 1", "0.05"]),
        ("simulate", ["--jitter", "nan"], ["--jitter is nan"]),
        ("simulate", ["--drift", "-0.1"], ["--drift is -0.1"]),
        ("simulate", ["--drift-time", "0"], ["--drift-time is 0", "1 and"]),
        ("simulate", ["--loss-every", "1e300 d"], ["--loss-every is 8.64e+304", "1e+09 seconds"]),
        ("simulate", ["--back", "1e305 d"], ["'1e305 d'", "not a finite duration"]),
        ("simulate", ["--detect", "-3 s"], ["'-3 s'", "20 ms"]),
        ("simulate", ["--replan-every", "2000000"], ["--replan-every is 2e+06"]),
        ("simulate", ["--checkpoint-every", "0"], ["--checkpoint-every", "1"]),
        ("simulate", ["--seed", "-1"], ["--seed", "0"]),
        ("simulate", ["--steps", "0"], ["--steps", "1"]),
        ("plan", ["--ratio", "nan"], ["--ratio is nan", "at least 1"]),
        ("plan", ["--ratio", "0.5"], ["--ratio is 0.5"]),
        ("plan", ["--num-microbatches", "0"], ["--num-microbatches", "1"]),
        ("plan", ["--microbatch-size", "-1"], ["--microbatch-size", "1"]),
        ("plan", ["--svg", "plan.png"], ["--svg is plan.png", "ends in .svg"]),
        ("plan", ["--svg", "absent/plan.svg"], ["--svg is absent/plan.svg", "folder"]),
        ("plan", ["--codecs", "deadlin"], ["mean deadline?", "known: adatopk-paper"]),
        ("plan", ["--pipeline", "1f1b-ahed"], ["mean 1f1b-ahead?", "1f1b-interleaved, zb-h1"]),
        ("plan", ["--precision", "float23"], ["mean float32?"]),
        ("plan", ["--what-if", "without lba"], ["mean lab?"]),
        ("simulate", ["--optimizer", "adanw"], ["--optimizer is 'adanw'", "mean adamw?", "sgd"]),
        ("simulate", ["--device-model", "rate"], ["mean rates?"]),
        ("plan", ["--what-if", "add 0x A10 in fence lab"], ["count is 0", "between 1 and"]),
    ],
)
def test_an_option_out_of_range_is_refused_before_the_graph_is_read(command, args, words):
    cluster = ROOT / "examples" / "clusters" / "one-lab.toml"
    result = invoke(command, "absent.opdag", "--cluster", str(cluster), *args)
    assert result.exit_code == 2 and "absent.opdag" not in result.stderr, result.stderr
    for word in words:
        assert word in result.stderr


LAB = "examples/clusters/one-lab.toml"
SCENARIO = "examples/scenarios/two-labs.toml"
RUN = "examples/quickstart.toml"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plan", LAB, "--cluster", RUN], f"{RUN} is a run file, not a cluster file; a cluster file has [[fence]]"),
        (["plan", LAB, "--cluster", LAB], f"{LAB} is a cluster file, not a run file; a run file has [model], [data]"),
        (["simulate", RUN, "--cluster", SCENARIO], "is a scenario, not a cluster file"),
        (["calibrate", "--append", RUN], "is a run file, not a cluster file"),
        (["train", LAB], "is a cluster file, not a run file"),
        (["graph", SCENARIO], "is a scenario, not a run file"),
        (["testbed", "up", LAB], "is a cluster file, not a scenario; a scenario has [[fence]] and [[host]], see docs/"),
        (["plan", RUN, "--cluster", "examples/clusters/one-lba.toml"], "did you mean one-lab.toml?"),
    ],
)
def test_a_file_of_another_kind_is_told_for_what_it_is(args, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = invoke(*args)
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize("name", ["x.xyz", "absent/x.png"])
def test_a_benchmarks_picture_that_cannot_be_is_refused_before_it_measures(name, capsys):
    from benchmarks import figure_file, pareto

    with pytest.raises(SystemExit):
        pareto.run(["--figure", name])
    assert name in capsys.readouterr().err and figure_file("x.svg") == Path("x.svg")


def test_joining_with_a_bad_ticket():
    result = invoke("join", "nonsense")
    assert result.exit_code == 2 and "ticket" in result.stderr
    nobody = f"fusion1:127.0.0.1:1:{'ab' * 32}:tokentoken"
    result = invoke("join", nobody)
    assert result.exit_code == 2 and "no broker answers at 127.0.0.1:1" in result.stderr


def test_a_broker_refuses_with_its_reason():
    from fusionllm.broker import Broker
    from fusionllm.errors import AdmissionError
    from fusionllm.node.join import join_broker
    from fusionllm.protocol.messages import CONTROL_VERSION, Join, Refused, Ticket
    from fusionllm.transport.control import connect_control

    async def attempt(ticket: Ticket, **changes):
        async with connect_control(ticket) as channel:
            fields = {"role": "node", "name": "n", "token": ticket.token, "fence": "", **changes}
            await join_broker(channel, **fields)

    async def scenario() -> None:
        broker = Broker(token_hours=1)
        ticket = await broker.start()
        try:
            with pytest.raises(AdmissionError, match="wrong join token"):
                await attempt(ticket, token="wrong-token")
            with pytest.raises(AdmissionError, match="other certificate"):
                await attempt(Ticket(ticket.host, ticket.port, "00" * 32, ticket.token))
            async with connect_control(ticket) as channel:
                await channel.send(
                    Join(version=CONTROL_VERSION + 1, role="node", name="n", token=ticket.token, public_key_pem=b"")
                )
                answer = await channel.receive(10)
                assert isinstance(answer, Refused) and f"version {CONTROL_VERSION + 1}" in answer.reason
            async with connect_control(ticket) as channel:
                await channel._socket.send(b"\x00garbage")
                answer = await channel.receive(10)
                assert isinstance(answer, Refused) and "bad control message" in answer.reason
            await attempt(ticket)
        finally:
            await broker.close()
        expired = Broker(token_hours=-1)
        ticket = await expired.start()
        try:
            with pytest.raises(AdmissionError, match="expired"):
                await attempt(ticket)
        finally:
            await expired.close()

    asyncio.run(scenario())


def test_flags_are_frozen():
    """A flag that goes or changes its name breaks people's scripts: change this list on purpose only."""
    flags = {
        "train": {"nodes", "name", "broker", "resume", "sets", "as_json", "run_toml"},
        "broker": {"host", "port", "advertise", "token_hours", "as_json"},
        "join": {"ticket", "name", "fence", "host", "port", "advertise", "backend", "device", "threads",
            "weights_from", "allow_op", "imports"},
        "graph": {"model", "batch", "seq_len", "sets", "as_json", "dot", "text"},
        "export": {"run", "folder", "step", "as_json"},
        "calibrate": {"name", "backend", "device", "append", "as_json"},
        "plan": {
            "graph_or_run", "cluster", "microbatch_size", "num_microbatches", "pipeline", "precision", "optimizer",
            "device_model", "what_if", "codecs", "ratio", "advice", "svg", "as_json",
        },
        "simulate": {
            "graph_or_run", "cluster", "steps", "seed", "jitter", "drift", "drift_time", "loss_every", "back", "detect",
            "checkpoint_every", "replan_every", "microbatch_size", "num_microbatches", "pipeline", "precision",
            "optimizer", "device_model", "as_json",
        },
        "testbed up": {"scenario", "name", "throttle", "as_json"},
        "testbed run": {"scenario", "host", "name"},
        "testbed down": {"scenario", "name"},
    }  # fmt: skip
    import typer

    group = typer.main.get_command(app)
    commands = dict(group.commands)
    commands |= {f"testbed {name}": command for name, command in commands.pop("testbed").commands.items()}
    assert {name: {p.name for p in command.params} - {"help"} for name, command in commands.items()} == flags
    for name in flags:
        help_text = invoke(*name.split(), "--help").output
        assert "Example" in help_text and "fusionllm " + name in help_text
    assert invoke("--version").output.startswith("fusionllm 0.")


def test_a_plan_of_a_run_takes_its_step_from_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nsource = "gpt2"\n[data]\nsource = "x.txt"\n[optimizer]\nname = "sgd"\n'
        '[train]\nglobal_batch = 24\nmicrobatch_size = 4\npipeline = "gpipe"\nprecision = "float32"\n'
    )
    own = step_options(file, precision=None, microbatch_size=None)
    assert own == StepOptions(
        microbatch_size=4, num_microbatches=6, pipeline="gpipe", precision="float32", optimizer="sgd"
    )
    assert step_options(file, precision="bfloat16").precision == "bfloat16"
    assert step_options(tmp_path / "graph.opdag", optimizer=None) == StepOptions()


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "fusionllm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == invoke("--version").output


def test_the_graph_command(tmp_path):
    import json

    small = ["--set", "n_layer=1", "--set", "n_embd=8", "--set", "n_head=1", "--set", "vocab_size=64"]
    result = invoke("graph", "gpt2", *small, "--seq-len", "16", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["ops"] > 50 and summary["single_tensor_cuts"] > 0 and summary["tied"]
    assert "digraph" in invoke("graph", "gpt2", *small, "--seq-len", "16", "--dot").stdout


def test_export_onto_a_file_and_lifetimes_that_cannot_be(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "config.toml").write_text("")
    out.write_text("mine")
    result = invoke("export", str(run), str(out))
    assert result.exit_code == 2 and "is a file" in result.stderr and out.read_text() == "mine"
    for hours in ("-1", "nan", "0", "1e9"):
        result = invoke("broker", "--port", "0", "--token-hours", hours)
        assert result.exit_code == 2 and "--token-hours" in result.stderr, hours


def test_a_users_function_that_raises_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def broken():\n    raise RuntimeError('boom inside')\n")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 100)
    path = tmp_path / "run.toml"
    path.write_text('[model]\nsource = "python:mine:broken"\n[data]\nsource = "text.txt"\nseq_len = 16\n')
    result = invoke("graph", str(path))
    assert result.exit_code == 2 and "broken raised RuntimeError: boom inside" in result.stderr, result.stderr
    assert "mine.py, line 2" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("model", [42, ["gpt2"], object()])
def test_what_is_no_model_is_refused_by_its_type(model):
    import fusionllm
    from fusionllm.errors import UserError

    with pytest.raises(UserError, match=f"model is a {type(model).__name__}"):
        fusionllm.train(model, "book.txt", steps=1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"source": "absent"}, "no such folder or file"),
        ({"source": "absent.json"}, "no such folder or file"),
        ({"source": "python:x"}, "python:MODULE:FUNCTION"),
        ({"source": "gpt2", "init": "pretrained"}, r"no \.safetensors"),
        ({"source": "gpt2", "config": {"n_positions": 8}}, "data.seq_len is 16, the model's context is 8"),
        ("gpt2", "29 training rows but one global batch needs 99"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_anything_is_started(tmp_path, monkeypatch, model, words):
    monkeypatch.setattr("fusionllm.api.run.LocalCluster", None)
    text = tmp_path / "text.txt"
    text.write_text("word " * 100)
    with pytest.raises(UserError, match=words):
        fusionllm.train(
            model, str(text), seq_len=16, global_batch=99, run={"root": str(tmp_path / "runs")}, base_dir=tmp_path
        )
    assert not (tmp_path / "runs").exists()


def test_what_a_run_goes_on_from_is_looked_at_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr("fusionllm.api.run.LocalCluster", None)
    text, folder = tmp_path / "text.txt", tmp_path / "old" / "checkpoints"
    text.write_text("word " * 1000)
    folder.mkdir(parents=True)

    def resume(**options):
        run = {"root": str(tmp_path), "name": "old", "resume": True}
        fusionllm.train("gpt2", str(text), seq_len=16, run=run, base_dir=tmp_path, **options)

    with pytest.raises(CheckpointError, match="no checkpoint in"):
        resume()
    save_checkpoint(folder, 3, {}, {}, CheckpointMeta(graph_hash="", seed=0, data_step=3, data_fingerprint="other"))
    with pytest.raises(CheckpointError, match="made with other data: other"):
        resume()
    with pytest.raises(UserError, match="has its 3 steps"):
        resume(steps=3)


@pytest.mark.parametrize("package", ["torch", "transformers", "matplotlib", "tensorboardX"])
def test_a_package_that_is_not_here_is_named_before_anything_is_started(package, tmp_path, monkeypatch):
    monkeypatch.setattr("fusionllm.api.run.LocalCluster", None)
    monkeypatch.setattr("fusionllm.api.run.find_spec", lambda name: None if name == package else name)
    with pytest.raises(UserError, match=f"needs the package '{package}'; install it with"):
        fusionllm.train("gpt2", str(TEXT), seq_len=16, run={"root": str(tmp_path / "runs")})
