"""What only the JAX backend has: torch's formulas written out, the same random bits in a compiled function."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from tests.kits.torch_faced import TorchFaced

from fusionllm.capture.export import capture_module
from fusionllm.compute import ComputeOptions, OptimConfig, load_backend, philox
from fusionllm.compute.jax.optim import RULES, JaxOptimizer
from fusionllm.compute.jax.random import keep_mask
from fusionllm.compute.torch_backend import TorchOptimizer
from fusionllm.errors import UserError

load_backend("jax")
SHAPES = {"w": (3, 4), "b": (4,)}
VARIANTS = [
    *((name, {}) for name in RULES),
    ("adamw", {"amsgrad": True}),
    ("adam", {"maximize": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"momentum": 0.9, "dampening": 0.3}),
    ("rmsprop", {"centered": True, "momentum": 0.9}),
    ("adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for n, shape in SHAPES.items()}


def as_jax(tensors: dict[str, torch.Tensor]) -> dict[str, jax.Array]:
    back = load_backend("jax")
    data = {n: bytearray(load_backend("torch").to_bytes(t)) for n, t in tensors.items()}
    types = {n: str(t.dtype).removeprefix("torch.") for n, t in tensors.items()}
    return {n: jax.numpy.array(back.from_buffer(data[n], types[n], tuple(t.shape))) for n, t in tensors.items()}


def close(ours: dict[str, jax.Array], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(np.asarray(ours[name], np.float64), tensor.double().numpy(), tolerance, tolerance)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_an_optimizer_is_torchs_and_its_state_may_move(name, options):
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.1, options=options)
    theirs = numbers(0)
    ours = as_jax(theirs)
    one, two = JaxOptimizer(config, ours), TorchOptimizer(config, theirs)
    for step in range(4):
        if step == 2:  # the state moves there and back
            state = {k: t.clone() for k, t in two.state().items()}
            one, two = JaxOptimizer(config, ours), TorchOptimizer(config, theirs)
            one.load(as_jax(state))
            two.load(state)
        gradients = numbers(step + 1)
        ours = one.step(ours, as_jax(gradients), 0.1 / (step + 1), 0.7)
        theirs = two.step(theirs, {n: g.clone() for n, g in gradients.items()}, 0.1 / (step + 1), 0.7)
        close(ours, theirs, 1e-12)
    close(one.state(), two.state(), 1e-12)


def test_short_weights_have_a_master():
    config, theirs = OptimConfig(name="adamw", lr=1e-4), numbers(0, torch.bfloat16)
    ours = as_jax(theirs)
    one, two = JaxOptimizer(config, ours), TorchOptimizer(config, theirs)
    for step in range(5):
        gradients = numbers(step + 1, torch.bfloat16)
        ours = one.step(ours, as_jax(gradients), 1e-4, 1.0)
        theirs = two.step(theirs, {n: g.clone() for n, g in gradients.items()}, 1e-4, 1.0)
    close(one.state(), two.state(), 1e-6)
    close(ours, theirs, 0)


def test_an_optimizer_it_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"no optimizer 'rprop'; .*known: sgd"):
        JaxOptimizer(OptimConfig(name="rprop"), as_jax(numbers(0)))


@pytest.mark.parametrize("count", [0, 1, 4, 5, 1003])
def test_masks_are_the_references(count):
    key = philox.seed_of(3, 1, 4, 1)
    words = np.array([key & 0xFFFFFFFF, key >> 32], np.uint32)
    mask = jax.jit(lambda k: keep_mask(k, (count,), 0.3, 2))(words)
    assert np.array_equal(mask, philox.keep_mask(key, count, 0.3, 2))


class Drops(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.25).sum(1).mean()


def test_dropout_drops_the_same_elements_on_torch_and_jax():
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), Drops()), torch.randn(8, 64)
    captured = capture_module(model, {"input": x})
    totals = []
    for backend in ("torch", "jax"):
        options = ComputeOptions(seed=5)
        stage = TorchFaced(backend, captured.graph, options, OptimConfig(name="sgd", lr=1.0, schedule="constant"), 1)
        stage.load("0.weight", torch.eye(64))
        stage.forward(3, 2, {"input": x})
        stage.backward(3, 2, {}, 1.0)
        stage.update(0, 0.0)
        totals.append(stage.state()[0]["0.weight"])
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-5, atol=1e-6)


def test_autocast_computes_in_bfloat16_and_keeps_float32_weights():
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), Drops().eval()), torch.randn(8, 64)
    captured = capture_module(model, {"input": x})
    stage = TorchFaced("jax", captured.graph, ComputeOptions(precision="bfloat16"), OptimConfig(), 1)
    stage.load("0.weight", captured.tensors["0.weight"])
    loss = stage.forward(0, 0, {"input": x}, train=False)[captured.graph.outputs[0]]
    exact = (x @ captured.tensors["0.weight"].T).sum(1).mean()
    assert loss.dtype == torch.float32 and 1e-7 < abs(loss - exact) < 0.05 * (1 + abs(exact))
    assert stage.state()[0]["0.weight"].dtype == torch.float32
