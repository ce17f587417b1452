"""Losses of a pipeline of node processes against a plain single-process PyTorch loop, bit for bit on the CPU.

Every case is the real thing: node processes, sockets with TLS, real text. The plain loop is the eager model of
Hugging Face with torch's optimizer on the same microbatches, one thread as in each node. With clipping the norm is
summed in another order, so those cases are compared relatively; so are those that exchange tied gradients once a step
(the default).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.plain import plain_steps

GPT2 = {"n_layer": 4, "n_head": 2, "n_embd": 48, "n_positions": 32}
LLAMA = {
    "num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "gpt2": ("gpt2", {**GPT2, **NO_DROPOUT}),
    "gpt2-dropout": ("gpt2", {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    "llama": ("llama", LLAMA),
}
#: (model, stages, pipeline, clip_norm, tied, optimizer, recompute)
CASES = [
    ("gpt2", 1, "gpipe", 0.0, "microbatch", "adamw", False),
    ("gpt2", 2, "1f1b", 0.0, "microbatch", "adamw", False),
    ("gpt2", 3, "gpipe", 0.0, "microbatch", "adamw", False),
    ("gpt2", 4, "1f1b", 0.0, "microbatch", "adamw", False),
    ("gpt2", 3, "1f1b-ahead", 0.0, "microbatch", "adamw", False),
    ("gpt2-dropout", 2, "gpipe", 0.0, "microbatch", "adamw", True),
    ("gpt2-dropout", 4, "1f1b", 0.0, "microbatch", "sgd", False),
    ("llama", 2, "gpipe", 0.0, "microbatch", "adamw", False),
    ("llama", 3, "1f1b", 0.0, "microbatch", "adamw", False),
    ("gpt2", 3, "1f1b", 0.5, "microbatch", "adamw", False),
    ("llama", 4, "gpipe", 0.5, "microbatch", "adamw", False),
    ("gpt2", 4, "1f1b", 0.0, "step", "adamw", False),
]
FULL = [
    (model, stages, pipeline, clip, "microbatch", "adamw", False)
    for model in MODELS for stages in (1, 2, 3, 4) for pipeline in ("gpipe", "1f1b") for clip in (0.0, 0.5)
]  # fmt: skip


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks equality", description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--full", action="store_true", help="every model x stages x pipeline x clipping")
    args = parser.parse_args(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for case in (FULL if args.full else []) + CASES:
        rows.append(_compare(case, args.steps))
        print(_line(rows[-1]), flush=True)
    torch.set_num_threads(before)
    exact = [r for r in rows if not r["clip_norm"] and r["tied"] == "microbatch"]
    return {
        "max_abs_loss_diff": max(r["abs"] for r in exact),
        "max_rel_loss_diff_clipped": max(r["rel"] for r in rows if r["clip_norm"]),
        "max_rel_loss_diff_tied_per_step": max(r["rel"] for r in rows if r["tied"] == "step"),
        "cases": len(rows),
        "steps": args.steps,
    }


def table(result: dict[str, Any]) -> str:
    return (
        f"{result['cases']} cases of {result['steps']} steps: largest loss difference {result['max_abs_loss_diff']}, "
        f"relative with clipping {result['max_rel_loss_diff_clipped']:.2g}, "
        f"with tied gradients once a step {result['max_rel_loss_diff_tied_per_step']:.2g}"
    )


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:13} {row['stages']} stages {row['pipeline']:6} {row['optimizer']:5} clip {row['clip_norm']} "
        f"tied {row['tied']:10} recompute {row['recompute']!s:5}  abs {row['abs']:.3g}  rel {row['rel']:.3g}  "
        f"loss {row['first']:.4f} -> {row['last']:.4f}"
    )


def _compare(case: tuple[Any, ...], steps: int) -> dict[str, Any]:
    import fusionllm
    from fusionllm.api.config import build_config

    model, stages, pipeline, clip, tied, optimizer, recompute = case
    source, shape = MODELS[model]
    text = Path(__file__).parents[1] / "examples" / "data" / "shakespeare.txt"
    with tempfile.TemporaryDirectory() as root:
        config = build_config(
            {
                "run": {"root": root, "seed": 3, "base_dir": root},
                "model": {"source": source, "config": {**shape, "vocab_size": 256}},
                "data": {"source": str(text), "tokenizer": "bytes", "seq_len": 32},
                "train": {
                    "steps": steps, "global_batch": 8, "microbatch_size": 2, "pipeline": pipeline, "tied": tied,
                    "recompute": recompute,
                },
                "optimizer": {
                    "name": optimizer, "lr": 3e-3 if optimizer == "adamw" else 0.1, "weight_decay": 0.1,
                    "warmup_steps": 3, "clip_norm": clip,
                },
                "cluster": {"nodes": stages, "threads": 1},
                "output": {"sinks": [], "plot": False},
            }
        )  # fmt: skip
        losses = fusionllm.train(config=config).losses
        expected = [loss for loss, _ in plain_steps(config, Path(root))]
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    return {
        "model": model, "stages": stages, "pipeline": pipeline, "clip_norm": clip, "tied": tied,
        "optimizer": optimizer, "recompute": recompute, "abs": max(differences),
        "rel": max(d / abs(b) for d, b in zip(differences, expected)), "first": losses[0], "last": losses[-1],
    }  # fmt: skip
