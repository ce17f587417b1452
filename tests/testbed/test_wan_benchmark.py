"""The wide-area benchmark's arithmetic: the limit of a step, and that the hand-cut model is the model."""

from __future__ import annotations

import argparse
import time

import pytest
import torch
from benchmarks import wan, wan_padded
from benchmarks.wan_figure import draw
from benchmarks.wan_limit import Crossing, step_limit
from benchmarks.wan_peer import HandCut, Peer, next_token_loss

from fusionllm.testbed import why_unavailable


def crossings(num_stages: int, num_bytes: float, rate: float, delay_s: float = 0.0) -> list[Crossing]:
    return [Crossing(k, num_bytes, delay_s, {f"{k}": rate} if rate else {}) for k in range(num_stages - 1)]


def test_without_links_the_limit_is_the_flush_of_the_pipeline():
    free = crossings(4, 1e6, 0)
    limit = step_limit([8.0] * 4, free, free, 8)
    assert limit.seconds == pytest.approx(8 + 3) and limit.bottleneck == "stage 3"  # (M + S - 1) / M
    assert step_limit([8.0], [], [], 8).seconds == 8


def test_a_slow_link_is_the_limit_with_what_comes_before_and_after_it():
    """One crossing, two stages of 1 s in 4 microbatches (f = 1/12, b = 1/6), 8 s of bytes each way, 0.1 s of delay."""
    forward = [Crossing(0, 8.0, 0.1, {"there": 1.0})]
    backward = [Crossing(0, 8.0, 0.1, {"back": 1.0})]
    limit = step_limit([1.0, 1.0], forward, backward, 4)
    f, b, c = 1 / 12, 1 / 6, 2.1
    assert limit.seconds == pytest.approx(f + 8 + 0.1 + f + b + c + b)
    shared = step_limit([1.0, 1.0], [Crossing(0, 8.0, 0.1, {"both": 1.0})], [Crossing(0, 8.0, 0.1, {"both": 1.0})], 4)
    assert shared.bottleneck == "both" and shared.seconds == pytest.approx(f + 16 + 0.1 + b)


def test_more_bytes_or_work_never_lower_the_limit():
    few = step_limit([1.0, 2.0, 1.0], crossings(3, 1e6, 1e6, 0.01), crossings(3, 1e6, 1e6, 0.01), 8)
    for compute, there, back in (([1.0, 2.5, 1.0], 1e6, 1e6), ([1.0, 2.0, 1.0], 2e6, 1e6), ([1.0, 2.0, 1.0], 1e6, 2e6)):
        more = step_limit(compute, crossings(3, there, 1e6, 0.01), crossings(3, back, 1e6, 0.01), 8)
        assert more.seconds > few.seconds


def test_the_model_cut_by_hand_is_the_model():
    args = argparse.Namespace(seed=1, layers=4, width=48, steps=1, microbatches=4, pipeline="1f1b", emulated=False)
    config = wan.run_config(args, "runs")
    config["train"]["precision"] = "float32"
    peer = Peer({"config": config, "addresses": [""] * 2}, 0)
    batch = peer.batches(0)[0]
    x = batch["input_ids"]
    for rank in range(2):
        x = HandCut(peer.model, rank, 2, torch.float32, "float32")(x)
    assert next_token_loss(x, batch["labels"]).item() == pytest.approx(peer.model(**batch).loss.item(), rel=1e-6)


def test_the_padded_model_cut_by_hand_is_the_model_and_takes_its_time():
    torch.manual_seed(0)
    model, ids = wan_padded.Thin(), torch.randint(0, wan_padded.VOCAB, (1, 64))
    started = time.perf_counter()
    x = ids
    for rank in range(4):
        x = wan_padded.PaddedCut(model, rank, 4, torch.float32, (0.05, 0.1))(x)
    loss = next_token_loss(x, ids)
    assert loss.item() == pytest.approx(model(ids, ids).item(), rel=1e-6)
    assert time.perf_counter() - started >= 0.2
    started = time.perf_counter()
    loss.backward()
    assert time.perf_counter() - started >= 0.4
    assert model.parts[0].weight.grad is not None


def test_our_padded_backend_takes_its_time_too(monkeypatch):
    class Inner:
        place = forward = backward = staticmethod(lambda x: x)

    monkeypatch.setattr(wan_padded.PaddedProgram, "forward_s", 0.05)
    monkeypatch.setattr(wan_padded.PaddedProgram, "backward_s", 0.1)
    program = wan_padded.PaddedProgram(Inner())
    started = time.perf_counter()
    assert (program.forward(1), program.backward(2), program.place(3)) == (1, 2, 3)
    assert time.perf_counter() - started >= 0.15
    assert isinstance(wan_padded.PaddedBackend(), wan_padded.TorchBackend)


def test_scenarios_are_found_by_name_and_their_rate_can_be_replaced():
    assert {link.bandwidth for link in wan.find_scenario("two-labs", "20 Mbps").link} == {"20 Mbps"}
    with pytest.raises(SystemExit, match="known: campus"):
        wan.find_scenario("two-lab", "")
    with pytest.raises(SystemExit, match="unknown rate unit"):
        wan.find_scenario("two-labs", "20")
    with pytest.raises(SystemExit, match="no method 'tor'"):
        wan.run(["--methods", "tor"])


def test_a_row_that_failed_is_reported_with_its_reason():
    row = wan.middle("ours", [{"method": "ours", "step_s": 1.0}, wan.failed("ours", "no route")])
    result = {"scenario": "lan", "bandwidth": "", "rounds": 2, "steps": 3, "runs": [row]}
    assert "failed: no route" in wan.table(result)


def test_the_picture(tmp_path):
    good = {"method": "ours-bf16", "tokens_per_s": 600.0, "step_s": 6.0, "limit_step_s": 5.0}
    result = {"scenario": "lan", "bandwidth": "", "runs": [good, good | {"limit_step_s": None}, wan.failed("x", "y")]}
    draw(result, tmp_path / "wan.png")
    assert (tmp_path / "wan.png").stat().st_size > 5000


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")
@pytest.mark.timeout(600)
def test_all_methods_train_the_same_model_over_real_links():
    """The whole benchmark, small: real nodes, a broker and torch's ranks in namespaces; limits set and lifted."""
    methods = "torch-bf16,diloco-20,ours-bf16,ours-default"
    small = ["--layers", "4", "--width", "48", "--microbatches", "4", "--steps", "2"]
    result = wan.run(["--scenario", "two-labs", "--bandwidth", "40 Mbps", "--methods", methods, *small])
    rows = {row["method"]: row for row in result["runs"]}
    assert not [row for row in rows.values() if "failed" in row]
    assert rows["ours-bf16"]["val_loss"] == pytest.approx(rows["torch-bf16"]["val_loss"], rel=1e-3)
    assert rows["ours-bf16"]["bytes"] == pytest.approx(rows["torch-bf16"]["bytes"], rel=0.2)
    assert rows["ours-default"]["predicted_step_s"] > 0 and set(rows["ours-default"]["stages"]) <= {
        "a0",
        "a1",
        "b0",
        "b1",
    }
    assert rows["torch-bf16"]["limit_step_s"] > 0 and rows["torch-bf16"]["bottleneck"]
    assert rows["diloco-20"]["exchange_s"] > 0.1
