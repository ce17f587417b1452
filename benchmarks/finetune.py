"""A pretrained language model fine-tuned on Shakespeare over node processes, against the same run in one process.

``--model FOLDER``: a Hugging Face folder with weights and tokenizer, such as HuggingFaceTB/SmolLM2-135M-Instruct. The
held-out loss before, after, and after the same steps of a plain PyTorch loop; the exported folder is loaded and writes.

``--forward CODEC --backward CODEC``: instead of nodes, the stages in one process with every cut compressed both ways
(`benchmarks.coded`), against the same plain loop; the record goes to benchmarks/records/finetune.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

GIB = 1 << 30
TEXT = Path(__file__).parents[1] / "examples" / "data" / "shakespeare.txt"
RECORDS = Path(__file__).parent / "records" / "finetune.jsonl"


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks finetune", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder with weights")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--text", type=Path, default=TEXT, help="the text to train on; its last part is held out")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--forward", help="codec of all cuts' activations")
    parser.add_argument("--backward", help="of their gradients; default: identity")
    parser.add_argument("--records", type=Path, default=RECORDS)
    args = parser.parse_args(argv)
    if args.forward or args.backward:
        record = _through_codecs(args)
        args.records.parent.mkdir(parents=True, exist_ok=True)
        with args.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record
    import fusionllm

    with tempfile.TemporaryDirectory() as root:
        config = _config(args, root)
        watch = _NodeMemory()
        with watch:
            result = fusionllm.train(config=config)
        folder = fusionllm.export(result.run_dir, Path(root) / "exported")
        sample = _write(folder)
        before, after, losses = _plain(config)
    return {
        "loss_before": before,
        "loss_after": result.summary.val_loss,
        "loss_after_single_process": after,
        "abs_diff_single_process": abs(result.summary.val_loss - after),
        "max_abs_train_loss_diff": max(abs(a - b) for a, b in zip(result.losses, losses, strict=True)),
        "peak_rss_gib_per_node": [round(n / GIB, 2) for n in watch.peaks],
        "tokens_per_s": result.summary.tokens_per_s,
        "steps": args.steps,
        "sample": sample,
    }


def table(result: dict[str, Any]) -> str:
    if "finetune_delta" in result:
        return (
            f"held-out loss {result['loss_before']:.4f} -> {result['loss_dense']:.4f} dense, "
            f"{result['loss_coded']:.4f} ({result['finetune_delta']:+.4f}) through {result['cuts']} cuts at "
            f"{result['true_ratio']:.2f}x, {result['loss_codecs_off']:.4f} with the codecs off"
        )
    return (
        f"held-out loss {result['loss_before']:.4f} -> {result['loss_after']:.4f} after {result['steps']} steps, one "
        f"process {result['loss_after_single_process']:.4f}; nodes {result['peak_rss_gib_per_node']} GiB\n"
        f"the exported folder writes: {result['sample']!r}"
    )


def _config(args: argparse.Namespace, root: str) -> Any:
    from fusionllm.api.config import build_config

    return build_config(
        {
            "run": {"root": root, "base_dir": str(Path.cwd())},
            "model": {"source": str(args.model.resolve()), "init": "pretrained"},
            "data": {
                "source": str(args.text.resolve()), "tokenizer": str(args.model.resolve() / "tokenizer.json"),
                "seq_len": 128,
            },
            "train": {
                "steps": args.steps, "global_batch": 4, "microbatch_size": 1, "precision": args.precision,
                "eval_batches": 24,
            },
            "optimizer": {"name": "adamw", "lr": 1e-4, "schedule": "constant"},
            "cluster": {"nodes": args.nodes, "device": "cpu"},
            "output": {"sinks": [], "plot": False},
        }
    )  # fmt: skip


def _through_codecs(args: argparse.Namespace) -> dict[str, Any]:
    """One record: losses of the run through codecs and of the dense one, and the true ratio of bytes."""
    from benchmarks.coded import open_pipeline, train_steps

    codecs = {"forward": args.forward or "identity", "backward": args.backward or "identity"}
    config = _config(args, "")
    train = config.train
    pipeline, data = open_pipeline(config, args.nodes, **codecs)
    losses = []
    for loss in train_steps(pipeline, data, train):
        losses.append(loss)
        print(f"step {len(losses)}: loss {loss:.4f}", flush=True)
    sent, dense_sent = pipeline.bytes_sent()
    val = list(data.val_batches(train.microbatch_size, train.eval_batches))
    coded, off = pipeline.mean_loss(val, coded=True), pipeline.mean_loss(val, coded=False)
    num_cuts = len(pipeline.stages) - 1
    del pipeline  # two gigabytes and more, before the next model is built
    before, dense, dense_losses = _plain(config)
    return {
        "model": args.model.name, **codecs, "cuts": num_cuts, "steps": train.steps,
        "rows": train.global_batch, "seq_len": config.data.seq_len, "lr": config.optimizer.lr,
        "true_ratio": dense_sent / sent, "loss_before": before, "loss_dense": dense, "loss_coded": coded,
        "loss_codecs_off": off, "finetune_delta": coded - dense, "finetune_delta_codecs_off": off - dense,
        "train_losses": losses, "train_losses_dense": dense_losses,
    }  # fmt: skip


class _NodeMemory:
    """Peak resident memory of each child process while it lives."""

    def __init__(self) -> None:
        self._peaks: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _NodeMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peaks(self) -> list[int]:
        return list(self._peaks.values())

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            for child in psutil.Process().children():
                try:
                    self._peaks[child.pid] = max(self._peaks.get(child.pid, 0), child.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue


def _plain(config: Any) -> tuple[float, float, list[float]]:
    """(held-out loss before, after, training losses) of a plain loop over the eager model with the same options."""
    import torch

    from benchmarks.plain import plain_optimizer
    from fusionllm.api.prepare import open_model

    _, data, source = open_model(config, Path.cwd())
    model = source.module
    optimizer = plain_optimizer(config.optimizer, model)
    low = config.train.precision == "bfloat16"

    def loss_of(batch: Any) -> torch.Tensor:
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=low, cache_enabled=False):
            loss: torch.Tensor = model(**inputs).loss
        return loss

    def held_out() -> float:
        batches = list(data.val_batches(config.train.microbatch_size, config.train.eval_batches))
        with torch.no_grad():
            return sum(loss_of(batch).item() for batch in batches) / len(batches)

    before, losses = held_out(), []
    for step in range(config.train.steps):
        batches = data.microbatches(step, global_batch=4, microbatch_size=1)
        total = 0.0
        for batch in batches:
            loss = loss_of(batch) / len(batches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return before, held_out(), losses


def _write(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("First Citizen:\n", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(out[0]))
