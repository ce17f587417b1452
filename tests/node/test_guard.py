"""The quality guard: what it looks at, and when it gives a link up."""

from __future__ import annotations

import torch

from fusionllm.ir.codec import IDENTITY
from fusionllm.node.codecs import StageCodecs
from fusionllm.node.guard import EVERY, FIRST, STRIKES, Guard
from fusionllm.protocol.messages import LinkChoice, LinkCodecs

WAY = ("activation", 1, "topk:ratio=50")


def test_it_looks_at_the_first_messages_and_then_at_one_in_a_while():
    guard = Guard()
    looked = [guard.wants(WAY) for _ in range(3 * EVERY)]
    assert [k for k, wanted in enumerate(looked) if wanted] == [*range(FIRST), EVERY, 2 * EVERY]


def test_an_error_that_runs_away_makes_its_way_dense_and_no_other():
    guard = Guard()
    for _ in range(FIRST):
        guard.note(WAY, 0.02)
    for _ in range(STRIKES - 1):
        guard.note(WAY, 0.5)
    guard.note(WAY, 0.03)  # once within bounds: counted from the start again
    for _ in range(STRIKES - 1):
        guard.note(WAY, 0.5)
    assert not guard.is_dense(WAY)
    guard.note(WAY, float("nan"))
    assert guard.is_dense(WAY) and not guard.is_dense(("activation", 1, "int8"))


def test_a_codec_that_always_loses_much_is_left_alone():
    guard = Guard()
    for _ in range(50):
        guard.note(WAY, 0.9)
    assert not guard.is_dense(WAY)


def test_messages_turn_dense_when_a_tensor_outgrows_its_codec():
    """Top-K keeps all of a sparse tensor, and hardly anything of the dense one it becomes."""
    codecs = StageCodecs({1: LinkChoice(("topk:ratio=50",), ())})
    generator = torch.Generator().manual_seed(0)
    sent = []
    for step in range((STRIKES + 2) * EVERY):
        x = torch.randn(8, 100, generator=generator)
        if step < EVERY:
            x = x * (torch.arange(800).reshape(8, 100) % 100 == 0)
        sent.append(codecs.encode("activation", 1, step, 0, "h", x, LinkCodecs("topk:ratio=50", "identity"))[0])
        codecs.finish(step)
    assert sent[0] == "topk:ratio=50" and sent[-1] == str(IDENTITY)
    assert sent.index(str(IDENTITY)) == STRIKES * EVERY + 1
    assert codecs.guard.errors[WAY[:2]] > 0.5
