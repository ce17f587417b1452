"""Tokens per second of four node processes over loopback TLS against one plain PyTorch process given the same cores.

Same model, same data, same microbatches, same optimizer. Rounds of the two alternate; the ratio of each pair's medians
is taken, then the median over the rounds. The plain process uses all cores with torch's own threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

WARM_STEPS = 3


def _options(args: argparse.Namespace, root: str) -> dict[str, Any]:
    text = Path(__file__).parents[1] / "examples" / "data" / "shakespeare.txt"
    return {
        "run": {"root": root},
        "model": {
            "source": "gpt2",
            "config": {
                "n_layer": args.layers, "n_head": 6, "n_embd": args.width, "n_positions": 128,
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            },
        },
        "data": {"source": str(text), "tokenizer": "bytes", "seq_len": 128},
        "train": {"steps": args.steps, "global_batch": 32, "microbatch_size": 4, "pipeline": args.pipeline},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "cluster": {"nodes": args.nodes},
        "output": {"sinks": [], "plot": False},
    }  # fmt: skip


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pipeline", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--pipeline", default="1f1b")
    args = parser.parse_args(argv)
    ours, plain = [], []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as root:
            options = _options(args, root)
            plain.append(_in_process("_plain", options))
            ours.append(_in_process("_ours", options))
    ratios = [a / b for a, b in zip(ours, plain)]
    return {
        "ratio": median(ratios),
        "ratios": ratios,
        "tokens_per_s": median(ours),
        "plain_tokens_per_s": median(plain),
        "nodes": args.nodes,
        "cores": os.cpu_count(),
        "pipeline": args.pipeline,
    }


def table(result: dict[str, Any]) -> str:
    return (
        f"{result['nodes']} nodes ({result['pipeline']}): {result['tokens_per_s']:.0f} tokens/s   "
        f"one plain process, {result['cores']} cores: {result['plain_tokens_per_s']:.0f} tokens/s   "
        f"ratio {result['ratio']:.3f}  (rounds: {', '.join(f'{r:.3f}' for r in result['ratios'])})"
    )


def _in_process(what: str, options: dict[str, Any]) -> float:
    """Tokens per second, measured in a fresh process."""
    code = f"from benchmarks.pipeline import {what}; import json, sys; {what}(json.loads(sys.stdin.read()))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(options), capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{what} failed: {done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def _ours(options: dict[str, Any]) -> None:
    import fusionllm
    from fusionllm.telemetry.events import StepMetrics

    result = fusionllm.train(**options)
    steps = [e for e in result.history if isinstance(e, StepMetrics)][WARM_STEPS:]
    print(median(e.tokens_per_s for e in steps))


def _plain(options: dict[str, Any]) -> None:
    import torch

    from benchmarks.plain import plain_steps
    from fusionllm.api.config import build_config

    torch.set_num_threads(os.cpu_count() or 1)
    speeds = [tokens_per_s for _, tokens_per_s in plain_steps(build_config(options), Path.cwd())]
    print(median(speeds[WARM_STEPS:]))
