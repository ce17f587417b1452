"""Seconds from `fusionllm train` to the first completed step, quickstart model on four local nodes.

Beside it, the import times that it contains. Medians of several fresh processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    seconds = [_first_step() for _ in range(args.rounds)]
    names = ("torch", "transformers.models.gpt2.modeling_gpt2")
    imports = {name: median(_import(name) for _ in range(args.rounds)) for name in names}
    return {
        "seconds": median(seconds),
        "rounds": seconds,
        "import_torch_s": imports["torch"],
        "import_transformers_s": imports["transformers.models.gpt2.modeling_gpt2"],
    }


def table(result: dict[str, Any]) -> str:
    return (
        f"first step after {result['seconds']:.1f} s (rounds: {', '.join(f'{s:.1f}' for s in result['rounds'])}); "
        f"import torch {result['import_torch_s']:.1f} s, with transformers {result['import_transformers_s']:.1f} s, "
        "alone on the machine"
    )


def _first_step() -> float:
    with tempfile.TemporaryDirectory() as root:
        command = [
            sys.executable, "-m", "fusionllm.cli.main", "train", "examples/quickstart.toml", "--json",
            "--set", "train.steps=2", "--set", f"run.root={root}", "--set", "output.sample_prompt=''",
        ]  # fmt: skip
        started = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            first = None
            for line in process.stdout:
                if first is None and json.loads(line).get("type") == "step":
                    first = time.perf_counter() - started
        if first is None or process.returncode:
            raise SystemExit(f"the run failed with code {process.returncode}")
        return first


def _import(name: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True, capture_output=True)
    return time.perf_counter() - started
