"""Forward and backward of a stage on each backend against code written by hand in its framework, 6 layers x 384.

Torch: the eager model of Hugging Face. JAX: GPT-2 and Llama of `benchmarks.plain_jax` in two compiled functions, a
forward and a backward, as a stage of a pipeline needs them; beside it one function that is not cut, which no pipeline
can use (``fused``). Both sides have the same weights, alternate, and give the same loss; ratios are those of medians of
process CPU time with one thread. Dropout: what one GPT-2 step costs more with our masks, and with torch's own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.overhead import MODELS


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks backend-speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--vocab", type=int, default=8192)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"  # XLA's threads too, see compute.jax.backend
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": args.rounds}
    for name in MODELS:
        stage, captured, model, inputs = _made(name, args.vocab)
        torch_calls = {"torch_hand": _eager(model, inputs), "torch": _stage_call(stage("torch"), captured, inputs)}
        arrays = {n: t.numpy() for n, t in inputs.items()}
        calls = {**torch_calls, "jax": _stage_call(stage("jax"), captured, arrays), **_by_hand(name, captured, arrays)}
        losses = {what: float(call()) for what, call in calls.items()}
        assert max(losses.values()) - min(losses.values()) < 1e-4 * max(losses.values()), losses
        result |= {f"{name}_{what}_s": value for what, value in _times(calls, args.rounds).items()}
        for what, hand in (("torch", "torch_hand"), ("jax", "jax_hand"), ("jax_fused", "jax_fused_hand")):
            result[f"ratio_{what}_{name}"] = _ratio(result, name, what.removesuffix("_fused"), hand)
    for what in ("torch", "jax", "jax_fused"):
        result[f"ratio_{what}"] = max(result[f"ratio_{what}_{name}"] for name in MODELS)
    result |= _dropout(args.rounds, args.vocab)
    torch.set_num_threads(before)
    return result


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{name:6} torch {result[f'{name}_torch_s'] * 1e3:6.1f} ms, by hand {result[f'{name}_torch_hand_s'] * 1e3:6.1f}"
        f" ({result[f'ratio_torch_{name}']:.3f})   jax {result[f'{name}_jax_s'] * 1e3:6.1f} ms, by hand "
        f"{result[f'{name}_jax_hand_s'] * 1e3:6.1f} ({result[f'ratio_jax_{name}']:.3f}), in one function "
        f"{result[f'{name}_jax_fused_hand_s'] * 1e3:6.1f} ({result[f'ratio_jax_fused_{name}']:.3f})"
        for name in MODELS
    ]
    return "\n".join(
        [
            *lines,
            f"dropout in a GPT-2 step: {result['dropout_s'] * 1e3:.1f} ms ({result['dropout_plain_s'] * 1e3:.1f} ms "
            f"without numba), torch's own {result['dropout_torch_s'] * 1e3:.1f} ms; the step "
            f"{result['gpt2_torch_hand_s'] * 1e3:.1f} ms",
        ]
    )


def _ratio(result: Mapping[str, float], name: str, ours: str, theirs: str) -> float:
    return result[f"{name}_{ours}_s"] / result[f"{name}_{theirs}_s"]


def _times(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each call, all alternating."""
    times: dict[str, list[float]] = {what: [] for what in calls}
    for index in range(rounds):
        for what in list(calls)[:: 1 if index % 2 else -1]:
            started = time.process_time()
            float(calls[what]())
            times[what].append(time.process_time() - started)
    return {what: median(own) for what, own in times.items()}


def _made(name: str, vocab: int) -> tuple[Any, ...]:
    import torch

    from fusionllm.capture.export import capture_module
    from fusionllm.capture.sources import ModelConfig, resolve_model
    from fusionllm.compute import ComputeOptions, OptimConfig
    from fusionllm.compute.stage import Stage

    config = ModelConfig(source=name, config={**MODELS[name], "vocab_size": vocab})
    model = resolve_model(config, base_dir=Path.cwd(), seed=0).module
    tokens = torch.randint(vocab, (4, 128), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "labels": tokens}
    captured = capture_module(model, inputs)
    return lambda b: Stage(b, captured.graph, ComputeOptions(), OptimConfig(), 1), captured, model, inputs


def _stage_call(stage: Any, captured: Any, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    from fusionllm.compute import load_backend

    back = load_backend("torch")
    for name, tensor in captured.tensors.items():
        stage.load(name, tensor if not hasattr(inputs["labels"], "ctypes") else _array(back, tensor))
    loss = captured.graph.outputs[0]

    def call() -> Any:
        stage.drop_gradients()
        value = stage.forward(0, 0, inputs)[loss]
        stage.backward(0, 0, {}, 1.0)
        stage.grad_square_sum()  # waits for the gradients
        return value

    return call


def _array(back: Any, tensor: Any) -> Any:
    from fusionllm.compute import load_backend
    from fusionllm.compute.stage import dtype_name

    return load_backend("jax").from_buffer(bytearray(back.to_bytes(tensor)), dtype_name(tensor), tuple(tensor.shape))


def _eager(model: Any, inputs: Mapping[str, Any]) -> Callable[[], Any]:
    import torch

    def call() -> Any:
        model.zero_grad(set_to_none=True)
        loss = model(**inputs).loss
        loss.backward()
        sum(float(torch.linalg.vector_norm(p.grad, dtype=torch.float64)) for p in model.parameters())
        return loss.detach()

    return call


def _by_hand(name: str, captured: Any, arrays: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    from benchmarks.plain_jax import LOSSES

    shape = {"num_layers": 6, "num_heads": 6}
    weights = {n: jnp.array(captured.tensors[n].numpy()) for n in captured.graph.params}
    tokens = arrays["labels"]
    forward = jax.jit(lambda w, t: jax.vjp(lambda w: LOSSES[name](w, t, **shape), w))
    backward = jax.jit(lambda reverse, seed: reverse(seed)[0])
    fused = jax.jit(lambda w, t: jax.value_and_grad(lambda w: LOSSES[name](w, t, **shape))(w))
    norm = jax.jit(lambda grads: sum(jnp.sum(jnp.square(g.astype(jnp.float64))) for g in grads.values()))

    def split() -> Any:
        loss, reverse = forward(weights, tokens)
        float(norm(backward(reverse, jnp.float32(1.0))))
        return loss

    def whole() -> Any:
        loss, grads = fused(weights, tokens)
        float(norm(grads))
        return loss

    return {"jax_hand": split, "jax_fused_hand": whole}


def _dropout(rounds: int, vocab: int) -> dict[str, float]:
    """Seconds of all masks of one GPT-2 step (13 of the residual stream, 6 of attention), drawn and applied."""
    import torch

    from fusionllm.compute.ops_torch import dropout
    from fusionllm.compute.philox_torch import torch_mask

    places = [torch.randn(4, 128, 384)] * 13 + [torch.randn(4, 6, 128, 128)] * 6
    cpu = torch.device("cpu")

    def ours() -> float:
        return sum(float(dropout(x, 0.1, index).sum()) for index, x in enumerate(places))

    def without_numba() -> float:
        masks = (torch_mask(index, x.numel(), 0.1, cpu).reshape(x.shape) for index, x in enumerate(places))
        return sum(float((x * mask / 0.9).sum()) for x, mask in zip(places, masks))

    def theirs() -> float:
        return sum(float(torch.nn.functional.dropout(x, 0.1).sum()) for x in places)

    def none() -> float:
        return sum(float(x.sum()) for x in places)

    calls = {"dropout": ours, "dropout_plain": without_numba, "dropout_torch": theirs, "none": none}
    for call in calls.values():
        call()
    found = _times(calls, rounds)
    return {f"{what}_s": found[what] - found["none"] for what in calls if what != "none"}
