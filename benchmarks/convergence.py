"""What codecs cost in loss: a GPT in four stages, every cut compressed both ways, against the same run dense.

Same model, text, order of batches and steps; only the codecs differ. Each run is a record: its validation loss through
the codecs and without them, the true ratio of bytes, the size of the hidden state. A copy of the pipeline trains the
last tenth of the steps dense: ``val_loss_annealed`` is its loss without codecs, what an export would have. Records are
kept in benchmarks/records/convergence.jsonl and any of them is made again by ``--method NAME --seed S``; without
``--method`` the records on file are summed up.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from fusionllm.schedule.ratios import LinkLoad, adatopk_paper
from fusionllm.units import parse_bandwidth_bytes_per_s

if TYPE_CHECKING:
    from benchmarks.coded import CodedPipeline

RECORDS = Path(__file__).parent / "records" / "convergence.jsonl"
TEXT = Path(__file__).parents[1] / "examples" / "data" / "shakespeare.txt"
#: The links of four stages on the two labs of examples/scenarios, for the paper's rule.
_TWO_LABS = ("1 Gbps", "8 Mbps", "1 Gbps")


def _adatopk(ratio: float) -> str:
    """The paper's codecs of the three cuts; equal messages, so that their shape is of no account."""
    loads = [
        LinkLoad(shape=(512, 256), dtype="float32", bandwidth_bytes_per_s=parse_bandwidth_bytes_per_s(rate))
        for rate in _TWO_LABS
    ]
    return " | ".join(map(str, adatopk_paper(loads, ratio)))


#: name -> (forward, backward), each one codec or one per cut.
METHODS = {
    "dense": ("identity", "identity"),
    "topk-paper-10": ("topk-paper:ratio=10", "topk-paper:ratio=10"),
    "topk-paper-100": ("topk-paper:ratio=100", "topk-paper:ratio=100"),
    "adatopk-paper": (_adatopk(100), _adatopk(100)),
    "topk-row-10": ("topk:ratio=10,scope=row", "tangent(topk:ratio=10,scope=row)"),
    "int8": ("int8", "int8"),
    "hadamard-4": ("hadamard", "tangent(hadamard)"),
    "hadamard-4-plain": ("hadamard", "hadamard"),
    "hadamard-4-1": ("hadamard", "tangent(hadamard:bits=1)"),
    "hadamard-2": ("hadamard:bits=2", "tangent(hadamard:bits=2)"),
    "klt-1": ("klt:rate=1", "tangent(klt:rate=1)"),
    "klt-ec-25": ("klt-ec:rate=1.3", "tangent:bits=8(klt-ec:rate=1.1)"),
    "klt-ec-70": ("klt-ec:rate=0.47,refresh=200", "tangent:bits=8(klt-ec:rate=0.36,refresh=200)"),
    "klt-ec-70f": ("klt-ec:rate=0.50,refresh=200", "tangent:bits=8(klt-ec:rate=0.355,refresh=200)"),
}


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks convergence", description=__doc__)
    parser.add_argument("--method", action="append", choices=list(METHODS), help="train; may be given several times")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args(argv)
    for seed in args.seed or [0]:
        for method in args.method or []:
            record = _train(method, seed, args)
            args.records.parent.mkdir(parents=True, exist_ok=True)
            with args.records.open("a") as file:
                file.write(json.dumps(record) + "\n")
    records = [json.loads(line) for line in args.records.read_text().splitlines()] if args.records.exists() else []
    return {"runs": _with_deltas(records)}


def _config(seed: int, args: argparse.Namespace) -> Any:
    from fusionllm.api.config import build_config

    return build_config(
        {
            "run": {"seed": seed},
            "model": {
                "source": "gpt2",
                "config": {
                    "n_layer": args.layers, "n_head": 4, "n_embd": args.width, "n_positions": 64, "vocab_size": 256,
                    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
                },
            },
            "data": {"source": str(TEXT), "tokenizer": "bytes", "seq_len": 64, "val_fraction": 0.05},
            "train": {"steps": args.steps, "global_batch": 8, "microbatch_size": 8},
            "optimizer": {"name": "adamw", "lr": args.lr, "weight_decay": 0.1, "warmup_steps": 50},
            "cluster": {"nodes": 1, "threads": 1},
        }
    )  # fmt: skip


def _train(method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.coded import open_pipeline, train_steps

    started = time.perf_counter()
    config = _config(seed, args)
    forward, backward = METHODS[method]
    # as the records were made: weight decay on norms and biases too
    pipeline, data = open_pipeline(config, args.stages, forward, backward, config.optimizer)
    annealed: CodedPipeline | None = None
    first_dense = args.steps - args.steps // 10
    losses, norms = [], []
    for loss in train_steps(pipeline, data, config.train):
        losses.append(loss)
        if method != "dense" and len(losses) == first_dense:
            annealed = copy.deepcopy(pipeline)
        if len(losses) % 100 == 0 or len(losses) == args.steps:
            norms.append(max(pipeline.hidden_rms.values()))
            print(
                f"{method} seed {seed} step {len(losses)}: loss {mean(losses[-100:]):.4f}, rms {norms[-1]:.2f}",
                flush=True,
            )
        if not math.isfinite(loss):
            break
    if annealed is not None:
        for _ in train_steps(annealed, data, config.train, first_dense, first_coded=args.steps):
            pass
    sent, dense = pipeline.bytes_sent()
    val = list(data.val_batches(8, 96))
    coded, off = pipeline.mean_loss(val, coded=True), pipeline.mean_loss(val, coded=False)
    after = off if annealed is None else annealed.mean_loss(val, coded=False)
    return {
        "name": method, "forward": METHODS[method][0], "backward": METHODS[method][1], "seed": seed, "lr": args.lr,
        "steps": len(losses), "layers": args.layers, "width": args.width, "stages": args.stages,
        "true_ratio": dense / sent, "val_loss": coded, "val_loss_codecs_off": off, "val_loss_annealed": after,
        "train_losses": [mean(losses[i : i + 100]) for i in range(0, len(losses), 100)], "hidden_rms": norms,
        "diverged": not math.isfinite(coded) or coded > losses[0], "seconds": time.perf_counter() - started,
    }  # fmt: skip


def _with_deltas(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each record with its loss minus that of the dense run of its seed and size, at dense's best learning rate."""
    dense: dict[tuple[Any, ...], float] = {}
    for r in records:
        if r["name"] == "dense":
            dense[_key(r)] = min(dense.get(_key(r), math.inf), r["val_loss_codecs_off"])
    return [
        {
            **r, "delta": r["val_loss"] - dense.get(_key(r), math.nan),
            "delta_codecs_off": r["val_loss_codecs_off"] - dense.get(_key(r), math.nan),
            "delta_annealed": r.get("val_loss_annealed", math.nan) - dense.get(_key(r), math.nan),
        }
        for r in records
    ]  # fmt: skip


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record[k] for k in ("seed", "steps", "layers", "width", "stages"))


def _known_mean(values: Iterable[float]) -> float:
    """Of those that were measured; early records have no annealed copy."""
    known = [v for v in values if not math.isnan(v)]
    return mean(known) if known else math.nan


def table(result: dict[str, Any]) -> str:
    """Means over the seeds, by method and learning rate."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in result["runs"]:
        groups.setdefault((r["steps"], r["width"], r["name"], r["lr"]), []).append(r)
    lines = [
        f"{'method':17} {'steps':>5} {'width':>5} {'lr':>7} {'seeds':>5} {'true ratio':>10} {'val loss':>9} "
        f"{'minus dense':>11} {'codecs off':>10} {'annealed':>9} {'rms':>6}"
    ]
    for (steps, width, name, lr), rows in sorted(groups.items()):
        lines.append(
            f"{name:17} {steps:5} {width:5} {lr:7.0e} {len(rows):5} {mean(r['true_ratio'] for r in rows):10.1f} "
            f"{mean(r['val_loss'] for r in rows):9.4f} {mean(r['delta'] for r in rows):+11.4f} "
            f"{mean(r['delta_codecs_off'] for r in rows):+10.4f} "
            f"{_known_mean(r['delta_annealed'] for r in rows):+9.4f} {max(max(r['hidden_rms']) for r in rows):6.1f}"
            + ("  diverged" if any(r["diverged"] for r in rows) else "")
        )
    return "\n".join(lines)
