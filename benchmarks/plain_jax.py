"""GPT-2 and Llama as a JAX user writes them by hand, to compare the JAX backend with. Weights by Hugging Face name.

Shapes: B rows, T tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Weights = Mapping[str, Any]


def _loss(logits_BTV: Any, tokens_BT: Any) -> Any:
    logs = jax.nn.log_softmax(logits_BTV[:, :-1])
    return -jnp.take_along_axis(logs, tokens_BT[:, 1:, None], -1).mean()


def _heads(x_BTD: Any, num_heads: int) -> Any:
    return x_BTD.reshape(*x_BTD.shape[:2], num_heads, -1).swapaxes(1, 2)


def _attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of [B, H, T, D/H], back to [B, T, D]."""
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    out = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)
    return out.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def _layer_norm(x: Any, w: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * w + b


def gpt2_loss(w: Weights, tokens_BT: Any, num_layers: int, num_heads: int) -> Any:
    x = w["transformer.wte.weight"][tokens_BT] + w["transformer.wpe.weight"][: tokens_BT.shape[1]]
    for i in range(num_layers):
        p = {n: w[f"transformer.h.{i}.{n}"] for n in _GPT2}
        y = _layer_norm(x, p["ln_1.weight"], p["ln_1.bias"])
        q, k, v = jnp.split(y @ p["attn.c_attn.weight"] + p["attn.c_attn.bias"], 3, -1)
        y = _attend(*(_heads(t, num_heads) for t in (q, k, v)))
        x = x + y @ p["attn.c_proj.weight"] + p["attn.c_proj.bias"]
        y = _layer_norm(x, p["ln_2.weight"], p["ln_2.bias"])
        y = jax.nn.gelu(y @ p["mlp.c_fc.weight"] + p["mlp.c_fc.bias"])
        x = x + y @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"]
    x = _layer_norm(x, w["transformer.ln_f.weight"], w["transformer.ln_f.bias"])
    return _loss(x @ w["transformer.wte.weight"].T, tokens_BT)


_GPT2 = [
    f"{part}.{kind}" for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
]  # fmt: skip


def _rms_norm(x: Any, w: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * w


def _turn(x: Any) -> Any:
    """Rotary positions of [B, H, T, D/H]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[2], dtype=x.dtype)[:, None] / 10000.0 ** (jnp.arange(half, dtype=x.dtype) / half)
    cos, sin = (jnp.concatenate([f(angle)] * 2, -1) for f in (jnp.cos, jnp.sin))
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def llama_loss(w: Weights, tokens_BT: Any, num_layers: int, num_heads: int) -> Any:
    x = w["model.embed_tokens.weight"][tokens_BT]
    for i in range(num_layers):
        p = f"model.layers.{i}."
        y = _rms_norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (_heads(y @ w[f"{p}self_attn.{n}_proj.weight"].T, num_heads) for n in "qkv")
        x = x + _attend(_turn(q), _turn(k), v) @ w[p + "self_attn.o_proj.weight"].T
        y = _rms_norm(x, w[p + "post_attention_layernorm.weight"])
        gate, up = (y @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (jax.nn.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return _loss(_rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T, tokens_BT)


LOSSES: dict[str, Callable[..., Any]] = {"gpt2": gpt2_loss, "llama": llama_loss}
