"""A model larger than this machine: a 7B Llama built without weights, captured, costed and cut for 8 nodes.

In a process of its own, whose peak resident memory and seconds from its first import are the result.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from typing import Any

#: Llama 2 7B (arXiv 2307.09288), which is the architecture's default in transformers.
CONFIG = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks bigmodel", description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "benchmarks.bigmodel", str(args.nodes), str(args.seq_len)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    result: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return result


def table(result: dict[str, Any]) -> str:
    lines = [
        f"stage {k}: {flops / 1e12:6.3f} TFLOP forward, {gib:5.2f} GiB of weights, receives {tensors} tensors"
        for k, (flops, gib, tensors) in enumerate(
            zip(result["stage_flops"], result["stage_weight_gib"], result["stage_tensors_received"])
        )
    ]
    lines.append(
        f"{result['parameters'] / 1e9:.2f}B parameters, {result['ops']} operators: {result['seconds']:.1f} s "
        f"(of a core {result['cpu_seconds']:.1f}, imports "
        f"{result['import_seconds']:.1f}, capture {result['capture_seconds']:.1f}), {result['rss_gib']:.2f} GiB "
        f"resident; largest stage {result['max_stage_flops_over_mean']:.3f} of the mean"
    )
    return "\n".join(lines)


def measure(num_nodes: int, seq_len: int) -> dict[str, Any]:
    """Build, capture, cost and cut, here."""
    started = time.perf_counter()
    gc.disable()  # as `api.prepare` does: all that is made is kept
    from pathlib import Path

    import torch

    from fusionllm.capture.export import capture_module
    from fusionllm.capture.options import ModelConfig
    from fusionllm.capture.sources import resolve_model
    from fusionllm.compute.memory import resident_peak_bytes
    from fusionllm.estimate.flops import anchored_flops
    from fusionllm.ir.cuts import split_graph
    from fusionllm.schedule.partition import partition_graph

    imported = time.perf_counter()
    source = resolve_model(ModelConfig(source="llama", config=CONFIG), base_dir=Path.cwd(), seed=0, empty=True)
    tokens = torch.zeros(2, seq_len, dtype=torch.int64)
    graph = capture_module(source.module, {"input_ids": tokens, "labels": tokens}).graph
    captured = time.perf_counter()
    symbols = dict.fromkeys(graph.symbols, 1)
    costs = anchored_flops(graph, symbols)
    boundaries = partition_graph(graph, num_nodes, "equal-compute", symbols, costs=costs)
    stages = split_graph(graph, boundaries)
    edges = [0, *boundaries, len(costs)]
    flops = [sum(costs[a:b]) for a, b in zip(edges, edges[1:])]
    return {
        "seconds": time.perf_counter() - started,
        "rss_gib": resident_peak_bytes() / 2**30,
        "max_stage_flops_over_mean": max(flops) / (sum(flops) / len(flops)),
        "max_tensors_per_cut": max(len(stage.recv) for stage in stages),
        "cpu_seconds": time.process_time(),
        "import_seconds": imported - started,
        "capture_seconds": captured - imported,
        "parameters": graph.num_params,
        "ops": len(graph.ops),
        "stage_flops": flops,
        "stage_weight_gib": [sum(p.spec.num_bytes({}) for p in s.params.values()) / 2**30 for s in stages],
        "stage_tensors_received": [len(stage.recv) for stage in stages],
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
