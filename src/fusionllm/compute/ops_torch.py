"""Torch handlers of the listed operators. Nothing outside `ir.ops.OPS` can be reached from here.

An ``aten.*`` operator is torch's own overload of that name, called with the arguments bound by our names; a few need a
handler: what draws random numbers, what updates statistics in place, what makes tensors (the device is ours to say).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F

from fusionllm.compute.backend import Context
from fusionllm.compute.philox import seed_of
from fusionllm.compute.philox_torch import keep_mask
from fusionllm.compute.sizes import SIZES
from fusionllm.errors import GraphError
from fusionllm.ir.ops import OPS


def dropout(x: torch.Tensor, p: float, seed: int, stream: int = 0) -> torch.Tensor:
    """Zero elements with probability ``p`` and scale the rest by 1 / (1 - p); a pure function of ``seed``."""
    return x * keep_mask(seed, x.shape, p, x.device, stream) / (1 - p)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float, causal: bool,
    scale: float | None, seed: int,
) -> torch.Tensor:  # fmt: skip
    """Scaled dot product attention written out, with dropout of the probabilities as a function of ``seed``."""
    if key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-1, -2) * (scale if scale is not None else query.shape[-1] ** -0.5)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return dropout(scores.softmax(-1), p, seed) @ value


_drop = dropout  # a name that no operator's argument has


def _dropout_handler(context: Context, rng: int, x: torch.Tensor, p: float) -> torch.Tensor:
    if not context.train:
        return x
    return dropout(x, p, seed_of(context.seed, context.step, context.microbatch_index, rng))


def _attention_handler(
    context: Context, rng: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if dropout_p > 0.0 and context.train:
        seed = seed_of(context.seed, context.step, context.microbatch_index, rng)
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, seed)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=True
        )
    return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer of torch, layer by layer where it drops in between: torch's own would draw from the process."""

    def run(
        context: Context, rng: int, input: torch.Tensor, hx: Any, params: list[torch.Tensor], has_biases: bool,
        num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        if not (dropout > 0 and train and context.train and num_layers > 1):
            return tuple(function(input, hx, params, has_biases, num_layers, 0.0, train, bidirectional, batch_first))
        seed = seed_of(context.seed, context.step, context.microbatch_index, rng)
        states = hx if isinstance(hx, (list, tuple)) else [hx]
        width, size = (2 if bidirectional else 1), len(params) // num_layers
        ends = []
        for layer in range(num_layers):
            if layer:
                input = _drop(input, dropout, seed, layer)
            own = [state[layer * width : (layer + 1) * width] for state in states]
            weights = params[layer * size : (layer + 1) * size]
            first = own if isinstance(hx, (list, tuple)) else own[0]
            input, *last = function(input, first, weights, has_biases, 1, 0.0, train, bidirectional, batch_first)
            ends.append(last)
        return (input, *(torch.cat(parts) for parts in zip(*ends)))

    return run


def _batch_norm(
    input: torch.Tensor, weight: Any, bias: Any, running_mean: torch.Tensor, running_var: torch.Tensor, training: bool,
    momentum: float, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    mean, var = running_mean.clone(), running_var.clone()
    return F.batch_norm(input, mean, var, weight, bias, training, momentum, eps), None, None, mean, var


def _batch_norm_fixed(
    input: torch.Tensor, weight: Any, bias: Any, running_mean: torch.Tensor, running_var: torch.Tensor, momentum: float,
    eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    """By the statistics held; torch's own form has no derivative."""
    return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps), None, None


def _copy(self: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """``self`` overwritten by ``src``; torch's own functional form has no derivative."""
    return src.to(self.dtype).expand(self.shape).clone()


#: Handlers that want the context and the rng index before their arguments.
RANDOM: dict[str, Callable[..., Any]] = {
    "ir.dropout": _dropout_handler,
    "aten.scaled_dot_product_attention.default": _attention_handler,
    "aten.gru.input": _recurrent(torch.ops.aten.gru.input),
    "aten.lstm.input": _recurrent(torch.ops.aten.lstm.input),
}
#: Handlers called with our argument names.
PLAIN: dict[str, Callable[..., Any]] = {
    "ir.cast": lambda x, dtype: x.to(dtype),
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_fixed,
    "aten.copy.default": _copy,
    **SIZES,
}
#: Operators that make a tensor out of nothing, and so must be told the device.
FACTORIES = frozenset(
    f"aten.{name}"
    for name in (
        "arange.default",
        "arange.start",
        "arange.start_step",
        "zeros.default",
        "ones.default",
        "full.default",
        "scalar_tensor.default",
    )
)


def resolve(name: str, allow_ops: Collection[str] = ()) -> tuple[Callable[..., Any], tuple[str, ...] | None]:
    """The callable of an operator, and for torch's own the names of its positional arguments in torch's order.

    Args:
        allow_ops: operators this node allows beyond the list, as `ir.ops.allowed_ops` gives them.

    Raises:
        GraphError: not listed, or this torch has no such operator.
    """
    if name not in OPS and name not in allow_ops:
        raise GraphError(f"operator {name!r} is not in the allow-list; this node executes listed operators only")
    if name in PLAIN:
        return PLAIN[name], OPS[name].args if name.startswith("sym.") else None
    namespace, base, overload = name.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), base, None), overload, None)
    if not isinstance(function, torch._ops.OpOverload):
        way = "upgrade torch on this node" if name in OPS else "import the module that registers it on this node"
        raise GraphError(f"torch {torch.__version__} has no operator {name!r} here; {way}")
    return function, tuple(a.name for a in function._schema.arguments if not a.kwarg_only)


def has_operator(name: str) -> bool:
    """Whether this torch has a listed operator."""
    try:
        return bool(name in RANDOM or resolve(name))
    except GraphError:
        return False
