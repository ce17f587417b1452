"""An eager model with the same randomness as a captured graph: the reference that split runs are compared with.

Dropout calls of the eager model are met in the order of the graph's rng indices, so counting them gives the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fusionllm.compute.ops_torch import attention, dropout
from fusionllm.compute.philox import seed_of

_DROPOUTS = (F.dropout, torch.dropout)
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class CounterDropout(TorchFunctionMode):
    """Within it, dropout is that of microbatch ``microbatch_index`` of ``step`` in a run with ``seed``."""

    def __init__(self, seed: int, step: int, microbatch_index: int) -> None:
        super().__init__()
        self._where = (seed, step, microbatch_index)
        self._count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            if training and p > 0:
                return dropout(args[0] if args else kwargs["input"], p, self._next())
        given = dict(zip(_ATTENTION, args)) | kwargs if func is F.scaled_dot_product_attention else {}
        if given.get("dropout_p", 0.0) > 0:
            mask, p, causal = given.get("attn_mask"), given["dropout_p"], given.get("is_causal", False)
            query, key, value = given["query"], given["key"], given["value"]
            return attention(query, key, value, mask, p, causal, given.get("scale"), self._next())
        return func(*args, **kwargs)

    def _next(self) -> int:
        self._count += 1
        return seed_of(*self._where, self._count - 1)
