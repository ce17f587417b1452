"""Forward and backward of a captured graph against the eager model, GPT-2 and Llama of 6 layers x 384.

Both in one process on the same weights, alternated round by round; the ratio is that of the medians of process CPU time
on one thread, which other work on the machine does not disturb; wall times stand beside it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

MODELS = {
    "gpt2": {
        "n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "llama": {
        "num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6,
        "num_key_value_heads": 6, "max_position_embeddings": 128,
    },
}  # fmt: skip


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vocab", type=int, default=8192)
    args = parser.parse_args(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": args.rounds}
    for name in MODELS:
        times = _measure(name, args.rounds, args.vocab)
        result[f"ratio_{name}"] = median(t["graph_cpu_s"] / t["eager_cpu_s"] for t in times)
        for key in times[0]:
            result[f"{name}_{key}"] = median(t[key] for t in times)
    torch.set_num_threads(before)
    return result


def table(result: dict[str, Any]) -> str:
    return "\n".join(
        f"{name:6} eager {result[f'{name}_eager_cpu_s'] * 1e3:7.1f} ms  graph "
        f"{result[f'{name}_graph_cpu_s'] * 1e3:7.1f} ms  ratio {result[f'ratio_{name}']:.3f}  (CPU time; "
        f"wall {result[f'{name}_eager_wall_s'] * 1e3:.1f} and {result[f'{name}_graph_wall_s'] * 1e3:.1f} ms)"
        for name in MODELS
    )


def _measure(name: str, rounds: int, vocab: int) -> list[dict[str, float]]:
    from fusionllm.capture.export import capture_module
    from fusionllm.capture.sources import ModelConfig, resolve_model
    from fusionllm.compute import ComputeOptions, OptimConfig
    from fusionllm.compute.stage import TorchStage

    model = resolve_model(
        ModelConfig(source=name, config={**MODELS[name], "vocab_size": vocab}), base_dir=Path.cwd(), seed=0
    ).module
    tokens = torch.randint(vocab, (4, 128), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "labels": tokens}
    captured = capture_module(model, inputs)
    stage = TorchStage(captured.graph, ComputeOptions(), OptimConfig(), 1)
    for key, tensor in captured.tensors.items():
        stage.load(key, tensor)

    def eager() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()

    def graph() -> None:
        stage.drop_gradients()
        stage.forward(0, 0, inputs)
        stage.backward(0, 0, {}, 1.0)

    eager(), graph()
    times = []
    for index in range(rounds):
        one = {}
        for what, call in (("eager", eager), ("graph", graph))[:: 1 if index % 2 else -1]:
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            one[f"{what}_wall_s"], one[f"{what}_cpu_s"] = time.perf_counter() - wall, time.process_time() - cpu
        times.append(one)
    return times
