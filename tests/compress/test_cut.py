"""A cut in one process: dense changes nothing, the adjoint is exact, lossy training goes on."""

from __future__ import annotations

import torch
from torch import nn

from fusionllm.compress import Cut
from fusionllm.ir.codec import IDENTITY, adjoint_codec, parse_codec, wire_num_bytes

SHAPE = (16, 32)


def model() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 4))


def losses(cut: Cut | None, steps: int) -> list[float]:
    first, second = model()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    seen = []
    for _ in range(steps):
        h = first(x)
        loss = nn.functional.cross_entropy(second(h if cut is None else cut(h)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_a_dense_cut_changes_no_bit_and_counts_its_bytes() -> None:
    cut = Cut(IDENTITY, IDENTITY, SHAPE, "float32")
    assert losses(cut, 5) == losses(None, 5)
    assert cut.forward.num_bytes == cut.backward.num_bytes == 5 * wire_num_bytes(IDENTITY, SHAPE, "float32")
    assert cut.forward.num_messages == 5


def test_the_gradient_comes_back_on_the_forward_mask() -> None:
    forward = parse_codec("topk:ratio=4,values=float32")
    backward = adjoint_codec(forward)
    assert backward is not None
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    y = Cut(forward, backward, SHAPE, "float32")(x)
    (y * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(y != 0, weight, torch.zeros(())))


def test_training_goes_on_through_lossy_cuts() -> None:
    dense = losses(None, 60)
    for forward, backward in (
        ("outlier", "tangent(hadamard)"),
        ("klt:rate=4", "tangent:centre=1(klt:rate=4)"),
        ("hadamard:bits=2", "tangent:centre=1(hadamard:bits=2)"),
    ):
        lossy = losses(Cut(parse_codec(forward), parse_codec(backward), SHAPE, "float32"), 60)
        assert lossy[-1] < dense[0] - 0.5 * (dense[0] - dense[-1])
