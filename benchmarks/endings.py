"""What a model trained through codecs is worth without them: exported folders in plain transformers, beside their runs.

A GPT of four layers over node processes, all cuts compressed both ways. Each row is one way to end: dense all along,
4-bit codecs to the end, with the last tenth of the steps dense, low-rank cuts exported as part of the model, and the
same annealed away in a second job of a tenth of the steps. ``val_loss`` is the run's own, links dense; ``exported``:
the folder loaded by transformers, over the same rows.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parents[1] / "examples" / "data" / "shakespeare.txt"
FOUR_BITS = {"forward": "hadamard", "backward": "tangent(hadamard)", "links": "all"}
NARROW = {"forward": "int4", "backward": "tangent(int4)", "links": "all"}


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks endings", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    last = max(1, args.steps // 10)
    cuts = {"rank": args.rank, "cuts": args.nodes - 1, "kind": "learned"}
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        rows = [
            _row("dense", args, root, args.steps, {}),
            _row("4 bits to the end", args, root, args.steps, FOUR_BITS),
            _row("4 bits, the last tenth dense", args, root, args.steps, {**FOUR_BITS, "dense_last": 0.1}),
            _row("low-rank cuts, exported with the model", args, root, args.steps, NARROW, bottleneck=cuts),
        ]
        first = _row("low-rank cuts, nine tenths", args, root, args.steps - last, NARROW, bottleneck=cuts)
        anneal = {**cuts, "anneal": last * 2}  # two microbatches a step
        again = {"source": str(root / first["name"]), "bottleneck": anneal}
        rows.append(_row("low-rank cuts, annealed away", args, root, last, FOUR_BITS, **again))
    for row in rows:
        row["exported_minus_dense"] = row["exported"] - rows[0]["exported"]
    return {"runs": rows, "steps": args.steps}


def _row(name: str, args: argparse.Namespace, root: Path, steps: int, codecs: Any, **model: Any) -> dict[str, Any]:
    import fusionllm
    from fusionllm.api.config import build_config

    fresh = {
        "source": "gpt2",
        "config": {
            "n_layer": 4, "n_head": 4, "n_embd": args.width, "n_positions": 64, "vocab_size": 256, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
        },
    }  # fmt: skip
    config = build_config(
        {
            "run": {"root": str(root / "runs"), "seed": args.seed},
            "model": {**fresh, **model} if "source" not in model else {"init": "pretrained", **model},
            "data": {"source": str(TEXT), "tokenizer": "bytes", "seq_len": 64, "val_fraction": 0.05},
            "train": {"steps": steps, "global_batch": 8, "microbatch_size": 4, "eval_batches": 48},
            "optimizer": {"name": "adamw", "lr": 1e-3, "schedule": "constant", "warmup_steps": min(30, steps // 3)},
            "cluster": {"nodes": args.nodes, "threads": 1, "device": "cpu"},
            "compression": codecs,
            "output": {"sinks": [], "plot": False},
        }
    )
    result = fusionllm.train(config=config)
    folder = fusionllm.export(result.run_dir, root / name)
    summary = result.summary
    row = {
        "name": name, "val_loss": summary.val_loss, "val_coded_loss": summary.val_coded_loss,
        "exported": _loss_of(folder, config),
    }  # fmt: skip
    print(row, flush=True)
    return row


def _loss_of(folder: Path, config: Any) -> float:
    """Of the folder in plain transformers, over the run's validation rows."""
    import torch
    from transformers import AutoModelForCausalLM

    from fusionllm.store.dataset import open_dataset

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    data = open_dataset(config.data, seed=config.run.seed, base_dir=Path.cwd(), obj=None)
    batches = list(data.val_batches(config.train.microbatch_size, config.train.eval_batches))
    with torch.no_grad():
        losses = [float(model(**{k: torch.from_numpy(a) for k, a in batch.items()}).loss) for batch in batches]
    return sum(losses) / len(losses)


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'ending, ' + str(result['steps']) + ' steps':40} {'val':>8} {'coded':>8} {'exported':>8} {'to dense':>8}"
    ]
    for row in result["runs"]:
        losses = [row[key] for key in ("val_loss", "val_coded_loss", "exported")]
        words = " ".join(" " * 8 if loss is None else f"{loss:8.4f}" for loss in losses)
        lines.append(f"{row['name']:40} {words} {row['exported_minus_dense']:+8.4f}")
    return "\n".join(lines)
