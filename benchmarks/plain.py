"""The same run as a plain PyTorch loop over the eager model: what the product is compared with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch


def plain_steps(config: Any, base_dir: Path) -> Iterator[tuple[float, float]]:
    """(loss, tokens per second) of each step of a run of ``RunConfig``, in one process, with torch's own threads."""
    from fusionllm.api.prepare import open_model
    from fusionllm.compute import learning_rate
    from fusionllm.compute.reference import CounterDropout

    config, data, source = open_model(config, base_dir)
    model, o = source.module, config.optimizer
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
        if o.name == "adamw"
        else torch.optim.SGD(model.parameters(), lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay)
    )
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
