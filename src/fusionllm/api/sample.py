"""A text sample of a trained language model, for people to see that it learned something."""

from __future__ import annotations

from typing import Any

import torch

from fusionllm.store.dataset import Dataset


def continue_text(module: Any, dataset: Dataset, prompt: str, num_tokens: int, seed: int = 0) -> str:
    """Continue ``prompt`` by ``num_tokens`` sampled tokens; the prompt included. Empty for a model that cannot."""
    if not hasattr(module, "generate") or not dataset.vocab_size:
        return ""
    config: Any = module.config
    context: int = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 30
    ids = dataset.encode(prompt)[: max(1, context - num_tokens)]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        out = module.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=min(num_tokens, max(1, context - len(ids))),
            do_sample=True,
            top_k=50,
            temperature=0.8,
            pad_token_id=0,
        )
    return dataset.decode(out[0].tolist())
