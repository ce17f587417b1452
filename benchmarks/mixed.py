"""One run over nodes of different frameworks, torch -> JAX -> torch, against a single torch process.

Real node processes that joined a broker; the JAX node has no torch at all. The reference is the eager model with
torch's AdamW on the same microbatches. Every loss of every step is compared. Then the same run of one model once more:
its JAX node is killed midway and a torch node takes over its stage from the last checkpoint.

``--images FOLDER``: a small ResNet in float64 too, on the images that `benchmarks vision` takes as its ``--data``.
"""

from __future__ import annotations

import argparse
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import vision
from benchmarks.plain import plain_steps

GPT2 = {
    "n_layer": 6, "n_head": 4, "n_embd": 64, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
MODELS = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-dropout": ("gpt2", {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "llama": (
        "llama",
        {
            "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 32,
        },
    ),
}  # fmt: skip
#: Those that are made here; the last one with ``--images``.
RESNET = "resnet"
MADE = ("qwen3", "lora-gpt2", RESNET)
TORCH_PACKAGES = ("torch", "functorch", "safetensors", "transformers", "peft", "accelerate", "nvidia", "triton")


def qwen3() -> Any:
    """Grouped heads of their own width, normalised queries and keys."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3", vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def lora_gpt2() -> Any:
    """Adapters on frozen weights: the first and the last stage train little, no stage trains its own matrices."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(**GPT2, vocab_size=256))
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))


def resnet() -> Any:
    """Batch norm throughout, in float64: in float32 its statistics amplify rounding from step to step."""
    return vision.small_resnet().double()


class WideImages(vision.Images):
    """Pixels in float64."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return row | {"pixel_values": row["pixel_values"].astype("float64")}


def image_rows() -> vision.Images:
    """Fashion-MNIST, the ``python:`` source of the ResNet's run."""
    return vision.train_rows(WideImages)


def site_without_torch(folder: Path) -> Path:
    """A folder of links to all installed packages but torch and what needs it, for a machine without."""
    found = [Path(p) for p in sys.path if Path(p).name == "site-packages"] or [Path(p) for p in site.getsitepackages()]
    for entry in (e for place in found for e in place.iterdir()):
        link = folder / entry.name
        if not entry.name.lower().startswith(TORCH_PACKAGES) and entry.suffix != ".pth" and not link.exists():
            link.symlink_to(entry)
    return folder


class MixedCluster:
    """A broker in this process and node processes, in the order of their stages; used in ``with``.

    Args:
        nodes: ``BACKEND`` or ``BACKEND:PYTHON``, the interpreter of an environment of its own.
    """

    def __init__(self, nodes: Sequence[str], folder: Path) -> None:
        self._wanted, self._folder = nodes, folder
        self._nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> str:
        from fusionllm.api.loop import LoopThread
        from fusionllm.broker import Broker

        self._loop, self._broker = LoopThread("broker"), Broker()
        self._loop.start()
        ticket = str(self._loop.submit(self._broker.start()).result(30))
        (self._folder / "site").mkdir(parents=True)
        self._ticket, self._bare = ticket, site_without_torch(self._folder / "site")
        for index, wanted in enumerate(self._wanted):
            self._nodes.append(self._start(f"node{index}", wanted))
        return ticket

    def kill(self, index: int) -> None:
        """Kill a node by SIGKILL, as a machine is lost."""
        with self._nodes[index] as node:  # which waits, and closes its pipe
            node.kill()

    def take_over(self, index: int, wanted: str) -> str:
        """Start another node where one was killed. Returns its name, which sorts to the same stage."""
        name = f"node{index}-{wanted.partition(':')[0]}"
        self._nodes[index] = self._start(name, wanted)
        return name

    def _start(self, name: str, wanted: str) -> subprocess.Popen[bytes]:
        import fusionllm
        from fusionllm.node.options import NodeConfig, Nursling
        from fusionllm.protocol.messages import parse_ticket

        backend, _, python = wanted.partition(":")
        source = str(Path(fusionllm.__file__).parents[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        flags = []
        if python:
            environment["PYTHONPATH"] = source
        elif backend != "torch":  # no site of its own: only what the links lead to
            flags, environment["PYTHONPATH"] = ["-S"], f"{source}{os.pathsep}{self._bare}"
        config = NodeConfig(
            ticket=parse_ticket(self._ticket), name=name, host="127.0.0.1", backend=backend, device="cpu"
        )
        # as local nodes start: it ends when this pipe does
        node = subprocess.Popen(
            [python or sys.executable, *flags, "-m", "fusionllm.node.nursery"], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        assert node.stdin is not None
        node.stdin.write(msgspec.json.encode([Nursling(config, str(self._folder / f"{name}.log"))]) + b"\n")
        node.stdin.flush()
        return node

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            if node.stdin is not None:
                node.stdin.close()
        for node in self._nodes:
            node.wait(20)
        self._loop.submit(self._broker.close()).result(10)
        self._loop.close()


def mixed_config(root: Path, ticket: str, model: str, *, nodes: int, steps: int, **tables: Any) -> Any:
    """The run's configuration."""
    from fusionllm.api.config import build_config

    made = {"source": f"python:benchmarks.mixed:{model.replace('-', '_')}"}
    source, shape = MODELS.get(model, ("", {}))
    text = Path(__file__).parents[1] / "examples" / "data" / "shakespeare.txt"
    data: dict[str, Any] = {"source": str(text), "tokenizer": "bytes", "seq_len": 32}
    if model == RESNET:
        data = {"source": "python:benchmarks.mixed:image_rows", "val_fraction": 0.001}
    return build_config(
        {
            "run": {"root": str(root), "seed": 3, "base_dir": str(root)},
            "model": made if model in MADE else {"source": source, "config": {**shape, "vocab_size": 256}},
            "data": data,
            "train": {"steps": steps, "global_batch": 8, "microbatch_size": 2, "pipeline": "1f1b", "eval_batches": 1},
            "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 5, "clip_norm": 1.0},
            "cluster": {"broker": ticket, "nodes": nodes, "threads": 1},
            "output": {"sinks": [], "plot": False},
            **tables,
        }
    )


def takeover(model: str, nodes: Sequence[str], steps: int, root: Path) -> tuple[list[float], list[float]]:
    """A run whose second node is killed midway, and which goes on by itself with a spare torch node in its place.

    Returns:
        Losses of all steps as the run recorded them, and those of the unbroken reference.
    """
    import fusionllm
    from fusionllm.store.run_dir import RunDir
    from fusionllm.telemetry.events import StepMetrics
    from fusionllm.telemetry.sinks import read_events

    every = max(1, steps // 5)
    last = steps // 2 + (steps // 2 % every == 0)  # beyond a checkpoint, so that steps are done anew
    cluster, spares = MixedCluster(nodes, root / "nodes"), list[str]()

    def kill_midway(event: Any) -> None:
        if isinstance(event, StepMetrics) and event.step == last and not spares:
            cluster.kill(1)
            spares.append(cluster.take_over(1, "torch"))
        if getattr(event, "kind", "") == "restart":
            assert "node1" in event.text, event
            print(f"{model:13} {event.text}", flush=True)

    with cluster as ticket:
        config = mixed_config(
            root, ticket, model, nodes=len(nodes), steps=steps, output={"sinks": ["jsonl"], "plot": False}
        )
        result = fusionllm.train(config=config, checkpoint_every=every, max_restarts=1, progress=kill_midway)
        held = [stage.node for stage in result.plan.stages]
        assert [held[1]] == spares, f"no spare took stage 1: {held}"
    events = read_events(RunDir(result.run_dir).metrics)
    losses = [event.loss for event in events if isinstance(event, StepMetrics)]
    return losses, [loss for loss, _ in plain_steps(config, root)]


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference of two runs of as many steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def run(argv: list[str]) -> dict[str, Any]:
    import torch

    import fusionllm

    parser = argparse.ArgumentParser(prog="python -m benchmarks mixed", description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--nodes", nargs="+", default=["torch", "jax", "torch"], metavar="BACKEND[:PYTHON]", help="in order of stages"
    )
    parser.add_argument("--model", action="append", choices=[*MODELS, *MADE])
    parser.add_argument(
        "--takeover-steps", type=int, default=20, help="of the run whose second node is killed; 0: none"
    )
    parser.add_argument("--images", type=Path, help="of Fashion-MNIST, for a small ResNet in float64")
    args = parser.parse_args(argv)
    if args.images:
        os.environ[vision.FOLDER] = str(args.images.resolve())
    elif RESNET in (args.model or ()):
        raise SystemExit("--model resnet needs --images FOLDER, see python -m benchmarks vision --help")
    torch.set_num_threads(1)
    rows = []
    for model in args.model or [name for name in (*MODELS, *MADE) if args.images or name != RESNET]:
        with tempfile.TemporaryDirectory() as name, MixedCluster(args.nodes, Path(name) / "nodes") as ticket:
            root = Path(name)
            config = mixed_config(root, ticket, model, nodes=len(args.nodes), steps=args.steps)
            losses = fusionllm.train(config=config).losses
            expected = [loss for loss, _ in plain_steps(config, root)]
        rel = largest_difference(losses, expected)
        rows.append({"model": model, "rel": rel, "first": losses[0], "last": losses[-1]})
        print(f"{model:13} rel {rel:.2g}  loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
    broken: dict[str, float] = {}
    if args.takeover_steps:
        with tempfile.TemporaryDirectory() as name:
            broken["takeover_max_rel_loss_diff"] = largest_difference(
                *takeover((args.model or [*MODELS])[0], args.nodes, args.takeover_steps, Path(name))
            )
    return {
        "max_rel_loss_diff": max(row["rel"] for row in rows),
        **broken,
        "steps": args.steps,
        "nodes": [_release(node) for node in args.nodes],
        "models": rows,
    }


def _release(node: str) -> str:
    """A node's framework and its release, by asking its interpreter."""
    backend, _, python = node.partition(":")
    code = f"import importlib.metadata as m; print(m.version({backend!r}))"
    done = subprocess.run([python or sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return f"{backend} {done.stdout.strip()}"


def table(result: dict[str, Any]) -> str:
    return (
        f"{len(result['models'])} models of {result['steps']} steps over {' -> '.join(result['nodes'])}: "
        f"largest relative loss difference {result['max_rel_loss_diff']:.2g}"
        + (
            f"; with the second node killed midway and torch in its place {result['takeover_max_rel_loss_diff']:.2g}"
            if "takeover_max_rel_loss_diff" in result
            else ""
        )
    )
