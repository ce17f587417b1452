"""The same run as a plain PyTorch loop over the eager model: what the product is compared with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch


def plain_optimizer(o: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Torch's own for an ``OptimConfig`` of adamw or sgd; adamw's weight decay is for matrices outside embeddings."""
    if o.name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=o.lr, momentum=o.momentum or 0.0, weight_decay=o.weight_decay)
    tables = {id(child.weight) for child in model.modules() if isinstance(child, torch.nn.Embedding)}
    decayed = [p for p in model.parameters() if p.dim() > 1 and id(p) not in tables]
    kept = [p for p in model.parameters() if p.dim() <= 1 or id(p) in tables]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas or (0.9, 0.95), eps=o.eps or 1e-8)


def plain_steps(config: Any, base_dir: Path) -> Iterator[tuple[float, float]]:
    """(loss, tokens per second) of each step of a run of ``RunConfig``, in one process, with torch's own threads."""
    from fusionllm.api.prepare import open_model
    from fusionllm.compute import learning_rate
    from fusionllm.compute.reference import CounterDropout

    config, data, source = open_model(config, base_dir)
    model, o = source.module, config.optimizer
    optimizer = plain_optimizer(o, model)
    for step in range(config.train.steps):
        started = time.perf_counter()
        batches = data.microbatches(
            step, global_batch=config.train.global_batch, microbatch_size=config.train.microbatch_size
        )
        rows = sum(len(batch["labels"]) for batch in batches)
        total = 0.0
        for index, batch in enumerate(batches):
            weight = len(batch["labels"]) / rows
            inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
            with CounterDropout(config.run.seed, step, index) if "pdrop" in str(config.model.config) else nullcontext():
                loss = model(**inputs).loss
            (loss * weight).backward()
            total += loss.item() * weight
        if o.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step, config.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        yield total, rows * config.data.seq_len / (time.perf_counter() - started)
