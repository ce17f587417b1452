"""The wide-area benchmark's arithmetic: the limit of a step, and that the hand-cut model is the model."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from random import Random

import numpy as np
import pytest
import torch
from benchmarks import wan, wan_goodput, wan_modelled, wan_padded, wan_recorded, wan_report, wan_runs
from benchmarks.__main__ import all_failed
from benchmarks.wan_figure import draw
from benchmarks.wan_limit import Crossing, Stage, step_limit
from benchmarks.wan_meter import BACKWARD, FORWARD, Meter, Work, read_work
from benchmarks.wan_peer import HandCut, Peer, next_token_loss

from fusionllm.capture.export import capture_module
from fusionllm.errors import UserError
from fusionllm.estimate.device import fit_rates
from fusionllm.estimate.library import DEVICES
from fusionllm.estimate.work import graph_work
from fusionllm.ir.cluster import check_node_profile
from fusionllm.ir.cuts import split_graph
from fusionllm.schedule.partition import partition_graph
from fusionllm.sim.devices import find_device
from fusionllm.testbed import PipeSpec, why_unavailable
from fusionllm.testbed.scenario import Host

IDS = torch.zeros(2, 32, dtype=torch.int64)


def crossings(num_stages: int, num_bytes: float, rate: float, delay_s: float = 0.0) -> list[Crossing]:
    return [Crossing(k, num_bytes, delay_s, {f"{k}": rate} if rate else {}) for k in range(num_stages - 1)]


def devices(*seconds: float, num_microbatches: int, **more: float) -> list[Stage]:
    """Stages that take so many seconds of a step, a third of it forward, and nothing else unless said."""
    return [Stage(s / 3 / num_microbatches, s / 1.5 / num_microbatches, s, **more) for s in seconds]


def test_without_links_the_limit_is_the_flush_of_the_pipeline():
    free = crossings(4, 1e6, 0)
    limit = step_limit(devices(8, 8, 8, 8, num_microbatches=8), free, free, 8)
    assert limit.seconds == pytest.approx(8 + 3) and limit.bottleneck == "stage 3"  # (M + S - 1) / M
    assert step_limit([Stage(all_s=8.0)], [], [], 8).seconds == 8


def test_a_slow_link_is_the_limit_with_what_comes_before_and_after_it():
    """One crossing, two stages of 1 s in 4 microbatches (f = 1/12, b = 1/6), 8 s of bytes each way, 0.1 s of delay."""
    forward = [Crossing(0, 8.0, 0.1, {"there": 1.0})]
    backward = [Crossing(0, 8.0, 0.1, {"back": 1.0})]
    limit = step_limit(devices(1, 1, num_microbatches=4), forward, backward, 4)
    f, b, c = 1 / 12, 1 / 6, 2.1
    assert limit.seconds == pytest.approx(f + 8 + 0.1 + f + b + c + b)
    both = [Crossing(0, 8.0, 0.1, {"both": 1.0})]
    shared = step_limit(devices(1, 1, num_microbatches=4), both, both, 4)
    assert shared.bottleneck == "both" and shared.seconds == pytest.approx(f + 16 + 0.1 + b)


def test_more_bytes_or_work_never_lower_the_limit():
    few = step_limit(
        devices(1, 2, 1, num_microbatches=8), crossings(3, 1e6, 1e6, 0.01), crossings(3, 1e6, 1e6, 0.01), 8
    )
    for middle, there, back in ((2.5, 1e6, 1e6), (2, 2e6, 1e6), (2, 1e6, 2e6)):
        stages = devices(1, middle, 1, num_microbatches=8)
        more = step_limit(stages, crossings(3, there, 1e6, 0.01), crossings(3, back, 1e6, 0.01), 8)
        assert more.seconds > few.seconds


def test_work_beside_forwards_and_backwards_may_hide_in_fill_and_drain():
    free = crossings(4, 1e6, 0)
    hidden = step_limit(devices(8, 8, 8, 8, num_microbatches=8, all_s=10.5), free, free, 8)
    assert hidden.seconds == pytest.approx(11)
    assert step_limit(devices(8, 8, 8, 8, num_microbatches=8, all_s=12), free, free, 8).seconds == 12


def test_a_quota_lets_a_little_work_run_at_full_speed():
    """A quarter of a core in periods of 20 ms: 5 ms at the end of one and at the beginning of the next, then waits."""
    stage = Stage(share=0.25, period_s=0.02)
    for work_ms, least_ms in ((0, 0), (5, 5), (10, 10), (11, 26), (15, 30), (16, 46), (1000, 198 * 20 + 10)):
        assert stage.fastest_s(work_ms / 1e3) == pytest.approx(least_ms / 1e3)
    assert Stage(share=0.25).fastest_s(1) == 4 and Stage(share=2, period_s=0.02).fastest_s(1) == 1
    free, tiny = crossings(2, 1e6, 0), {"forward_s": 0.001, "backward_s": 0.002, "share": 0.25, "period_s": 0.02}
    limit = step_limit([Stage(work_s=0.024, all_s=0.05, **tiny)] * 2, free, free, 8)
    assert limit.seconds == 0.2  # not 0.2 and 12 ms of fill and drain


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_is_faster_than_the_limit(seed):
    """All forwards, then all backwards, each as soon as what it needs is there and its device and link are free."""
    random = Random(seed)
    size, count = random.randint(1, 5), random.randint(1, 6)
    times = [(random.uniform(0.1, 1), random.uniform(0.1, 2)) for _ in range(size)]
    ways = [[Crossing(k, random.uniform(0, 9), random.random(), {f"{way}{k}": 2.0}) for k in range(size - 1)]
            for way in ("there", "back")]  # fmt: skip
    clock = [0.0] * size
    links = [[0.0] * (size - 1), [0.0] * (size - 1)]
    ready = [0.0] * count
    for way, order in enumerate((range(size), range(size - 1, -1, -1))):
        for position, stage in enumerate(order):
            for index in range(count):
                ready[index] = clock[stage] = max(clock[stage], ready[index]) + times[stage][way]
                if position < size - 1:
                    k = stage if way == 0 else stage - 1
                    crossing = ways[way][k]
                    links[way][k] = max(links[way][k], ready[index]) + crossing.num_bytes / count / 2.0
                    ready[index] = links[way][k] + crossing.delay_s
    stages = [Stage(f, b, count * (f + b), count * (f + b)) for f, b in times]
    limit_s = step_limit(stages, *ways, count).seconds
    assert 0 < limit_s <= max(ready) + 1e-9
    assert limit_s <= min(any_schedule(random, times, ways, count) for _ in range(20)) + 1e-9


def any_schedule(random: Random, times: list[tuple[float, float]], ways: list[list[Crossing]], count: int) -> float:
    """The time of a step when each device and link takes what has come in any order."""
    size = len(times)
    path = [(0, s) for s in range(size)] + [(1, s) for s in reversed(range(size))]
    device, links, done, ready = [0.0] * size, [[0.0] * size, [0.0] * size], [0] * count, [0.0] * count
    while left := [m for m in range(count) if done[m] < len(path)]:
        m = random.choice(left)
        way, stage = path[done[m]]
        ready[m] = device[stage] = max(device[stage], ready[m]) + times[stage][way]
        if (k := stage - way) in range(size - 1):
            links[way][k] = max(links[way][k], ready[m]) + ways[way][k].num_bytes / count / 2.0
            ready[m] = links[way][k] + ways[way][k].delay_s
        done[m] += 1
    return max(ready)


def test_backwards_wait_for_the_first_microbatch_to_come_back():
    """Stage 0 of (f, b) = (1, 1), stage 1 of (0.1, 0.1), 2 s of delay each way, 4 microbatches."""
    stages = [Stage(1, 1, 8, 8), Stage(0.1, 0.1, 0.8, 0.8)]
    delays = [Crossing(0, 0.0, 2.0)]
    limit = step_limit(stages, delays, delays, 4)
    assert limit.bottleneck == "stage 0" and limit.seconds == pytest.approx(1 + 2 + 0.2 + 2 + 4)
    forwards = step_limit([Stage(2, 1, 12, 12), stages[1]], delays, delays, 4)
    assert forwards.seconds == pytest.approx(8 + 2 + 0.2 + 2 + 1)  # the last one goes there and back after all forwards


def test_forwards_and_backwards_are_metered_apart(tmp_path):
    """Of the timed steps alone: the cheapest microbatch and the mean of a step."""
    file = tmp_path / "a0.work"
    meter = Meter(str(file))
    assert meter.around(FORWARD, sum)([2, 3]) == 5 and Meter().around(FORWARD, sum)([1]) == 1
    with pytest.raises(ValueError, match="fewer than 1"):
        read_work(file, 1, 1)
    lines = ["forward 9", "backward 9"] + ["forward 1", "backward 2", "forward 3", "backward 5"] * 2
    file.write_text("\n".join(lines) + "\n")
    assert read_work(file, 2, 2) == Work(1, 2, 11)
    meter.around(BACKWARD, time.sleep)(0.1)
    assert file.read_text().endswith("\n") and read_work(file, 1, 1).backward_s < 0.05  # waiting is no work


def test_the_model_cut_by_hand_is_the_model():
    args = argparse.Namespace(
        seed=1, layers=4, width=48, steps=1, warm=2, microbatches=4, pipeline="1f1b", precision="float32"
    )
    config = wan.run_config(args, "runs")
    peer = Peer({"config": config, "addresses": [""] * 2}, 0)
    batch = peer.batches(0)[0]
    x = batch["input_ids"]
    for rank in range(2):
        x = HandCut(peer.model, rank, 2, torch.float32, "float32")(x)
    assert next_token_loss(x, batch["labels"]).item() == pytest.approx(peer.model(**batch).loss.item(), rel=1e-6)


def test_the_padded_model_cut_by_hand_is_the_model_and_takes_its_time():
    torch.manual_seed(0)
    model, ids = wan_padded.Thin(8, 64), torch.randint(0, wan_padded.VOCAB, (1, 64))
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


def test_a_modelled_stage_takes_its_time_and_sends_what_was_recorded(tmp_path):
    """Of a graph cut in two: no weights, real shapes, seconds of the GPU times the stretch, metered as such."""
    from fusionllm.compute.backend import Context

    graph = capture_module(wan_padded.Thin(2, 64), {"input_ids": IDS, "labels": IDS}).graph
    stages = split_graph(graph, partition_graph(graph, 2, "equal-number", dict.fromkeys(graph.symbols, 2)))
    rows = np.random.default_rng(0).standard_normal((128, 16)).astype(np.float16)
    recorded = wan_recorded.Recorded({"activation": rows, "gradient": -rows})
    works = [graph_work(stage, dict.fromkeys(graph.symbols, 2)) for stage in stages]
    host = Host(name="a0", fence="a", forward="100 ms", backward="200 ms")
    files = [str(tmp_path / name) for name in ("0", "1")]
    modelled = [wan_modelled.model_of(host, works, 2.0, file) for file in files]
    assert sum(wan_modelled.stage_s(work, modelled[0].rates)[0] for work in works) == pytest.approx(0.4, rel=1e-3)
    first, last = (wan_modelled.ModelledProgram(*parts, recorded) for parts in zip(stages, modelled))
    started, context = time.perf_counter(), Context(0, 0, 0, True)
    sent = first.forward({}, {v.id: IDS.numpy() for v in stages[0].inputs}, context, keep=True)
    (value,) = stages[0].send
    assert sent.outs[value].shape == (2, 32, 64) and sent.outs[value].std() > 0.5
    got = last.forward({}, sent.outs | {v.id: IDS.numpy() for v in stages[1].inputs}, context, keep=True)
    assert got.outs[stages[1].outputs[0]].shape == ()
    assert time.perf_counter() - started >= 0.4
    gradients = last.backward(got.kept, {}, 1.0, {})
    assert np.array_equal(gradients[value], -sent.outs[value])  # the gradient of the same tokens
    assert (tmp_path / "1").read_text().split()[::2] == ["forward", "backward"]


def test_a_recording_is_put_together_without_repeating_itself(tmp_path):
    rows = np.random.default_rng(0).standard_normal((512, 16)).astype(np.float16)
    file = tmp_path / "a.npz"
    wan_recorded.save(file, {"activation": rows, "gradient": rows})
    recorded = wan_recorded.load_recorded(file)
    wide = recorded.tensor("activation", (1, 128, 40), 1)
    assert np.linalg.matrix_rank(wide[0]) == 40 and wide[0, :, :16].tolist() == rows[128:256].astype("f4").tolist()
    heads = recorded.tensor("activation", (1, 5, 128, 8), 1)
    assert np.array_equal(heads.swapaxes(1, 2).reshape(1, 128, 40), wide)
    with pytest.raises(ValueError, match="512 tokens, a microbatch 513"):
        recorded.tensor("activation", (513, 8), 0)
    file.write_bytes(b"no zip")
    with pytest.raises(SystemExit, match="no recording"):
        wan_recorded.load_recorded(file)


def test_the_rates_of_a_gpu_come_back_from_its_calibration(monkeypatch):
    host = Host(name="a0", fence="a", gpu="RTX 4090")
    modelled = wan_modelled.model_of(host, [], 4.0)
    monkeypatch.setattr(wan_modelled._Here, "modelled", modelled, raising=False)
    profile = check_node_profile(wan_modelled.calibrate("cpu"))
    fitted, wanted = fit_rates(profile.samples), find_device("RTX 4090", DEVICES).rates("float32")
    assert fitted.matmul == pytest.approx(wanted.matmul / 4, rel=1e-3)
    assert fitted.bytes_per_s == pytest.approx(wanted.bytes_per_s / 4, rel=1e-3)
    assert profile.memory_bytes == find_device("RTX 4090", DEVICES).usable_bytes


def test_modelled_nodes_import_no_torch(tmp_path):
    rows = np.ones((8, 4), np.float16)
    wan_recorded.save(tmp_path / "a.npz", {"activation": rows, "gradient": rows})
    options = {"activation": str(tmp_path / "a.npz"), "codecs": False}
    script = (
        f"import sys; from benchmarks.wan_modelled import prepare; prepare({options!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=wan.ROOT)
    assert done.stdout.strip() == "False"


def test_a_stretched_pipe_is_slower_in_everything_but_its_queue():
    slow = wan_runs.stretched(PipeSpec(rate_bytes_per_s=1e6, delay_s=0.02), 10)
    assert (slow.rate_bytes_per_s, slow.delay_s, slow.queue_bytes) == (1e5, 0.2, 100_000)
    assert wan_runs.stretched(PipeSpec(), 10) == PipeSpec()


def test_the_report_says_how_good_predictions_are_and_who_wins_alone():
    row = {"scenario": "g2", "round": 1, "method": "torch-bf16", "step_s": 4.0, "tokens_per_s": 1.0}
    ours = row | {"method": "ours-default", "step_s": 1.0, "predicted_step_s": 1.1}
    alone = row | {"method": "one-site", "step_s": 0.8, "predicted_step_s": 0.6}
    bad = row | wan.failed("ours-paper", "no route")
    real = ours | {"precision": "float32", "scenario": "lan", "step_s": 2.2}
    by = wan_report.report([row, ours, alone, bad, real])["predictions_by_compute"]
    assert by["emulated"]["pairs"] == 2 and by["float32"] == dict.fromkeys(("median", "worst"), pytest.approx(0.5)) | {
        "pairs": 1
    }
    result = wan_report.report([row, ours, alone, bad])
    board = result["boards"][0]
    assert board["alone_wins"] == "one-site" and board["runs"][1]["speedup"] == 4
    assert result["predictions"] == {"pairs": 2, "median": pytest.approx(0.175), "worst": pytest.approx(0.25)}
    text = wan_report.table(result)
    assert "off by 10%" in text and "failed: no route" in text and "one-site is the fastest" in text
    assert wan.seconds_to(1.5, [2.0] * 10 + [1.0] * 10, 3.0) == 45 and wan.seconds_to(0.5, [1.0] * 20, 1.0) is None


def test_scenarios_are_found_by_name_and_their_rate_can_be_replaced():
    assert {link.bandwidth for link in wan.find_scenario("two-labs", "20 Mbps").link} == {"20 Mbps"}
    with pytest.raises(SystemExit, match=r"did you mean two-labs\? known: campus"):
        wan.find_scenario("two-lab", "")
    with pytest.raises(SystemExit, match="unknown rate unit"):
        wan.find_scenario("two-labs", "20")
    with pytest.raises(SystemExit, match="no method 'tor'"):
        wan.run(["--methods", "tor"])


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--steps", "-1", "-1 is too small; 1 or more"),
        ("--warm", "0", "0 is too small; 1 or more"),
        ("--layers", "-2", "-2 is too small"),
        ("--rounds", "0", "0 is too small"),
        ("--microbatches", "some", "'some'"),
        ("--width", "64", "64 is no multiple of 6, the heads of the model"),
        ("--timeout", "nan", "nan is no number above zero"),
        ("--stretch", "0", "0 is no number above zero"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_network_is_made(option, value, words, capsys):
    with pytest.raises(SystemExit) as refused:
        wan.run([option, value])
    assert refused.value.code == 2 and words in capsys.readouterr().err


def test_a_benchmark_of_which_all_methods_failed_has_failed(tmp_path):
    bad, good = wan.failed("ours", "no route"), {"method": "ours", "step_s": 1.0}
    assert all_failed([bad]) and not all_failed([bad, good]) and not all_failed([]) and not all_failed(None)
    with pytest.raises(SystemExit, match="no such file"):
        wan_report.run([str(tmp_path / "none.jsonl")])


def test_a_row_that_failed_is_reported_with_its_reason():
    row = wan.middle("ours", [{"method": "ours", "step_s": 1.0}, wan.failed("ours", "no route")])
    result = {"scenario": "lan", "bandwidth": "", "rounds": 2, "steps": 3, "runs": [row]}
    assert "failed: no route" in wan.table(result)
    again = wan.middle("ours", [wan.failed("ours", "no route"), {"method": "ours", "step_s": 1.0}])
    assert again["rounds_step_s"] == [1.0]  # measured again, as --missing does

    def broken():
        raise UserError("the emulator does not answer")

    assert wan.attempt("ours", None, None, broken) == wan.failed("ours", "the emulator does not answer")


def test_rows_are_kept_and_summed_up_from_their_file(tmp_path):
    """Rounds of several calls make one table; rows of other settings are left out, what is no row is refused."""
    file, picture = tmp_path / "kept" / "wan.jsonl", tmp_path / "wan.png"
    words = ["--scenario", "two-labs", "--methods", "", "--records", str(file)]
    settings = {name: value for name, value in wan.run(words).items() if name in wan.SETTINGS}
    assert set(settings) == set(wan.SETTINGS) and not file.exists()
    for number, step_s in enumerate((3.0, 1.0, 2.0), 1):
        row = {"method": "ours-bf16", "round": number, "step_s": step_s, "tokens_per_s": 12 / step_s, "val_loss": 6.0}
        row |= {"limit_step_s": 0.5, "bottleneck_link_utilisation": 0.1, "bytes": 1, "predicted_step_s": None}
        wan.append_record(file, settings | row | {"bottleneck": "stage 0"})
    wan.append_record(file, settings | {"round": 1} | wan.failed("torch-bf16", "no route"))
    wan.append_record(file, settings | {"bandwidth": "20 Mbps", "round": 9, "method": "ours-dense", "step_s": 1.0})
    result = wan.run([*words[:3], "ours-bf16", *words[4:], "--missing", "--figure", str(picture)])  # nothing is
    ours, torchs = result["runs"]
    assert (ours["step_s"], ours["rounds_step_s"]) == (2.0, [3.0, 1.0, 2.0]) and result["rounds"] == 3
    assert torchs["failed"] == "no route" and picture.stat().st_size > 5000
    assert "3 rounds" in wan.table(result) and "stage 0" in wan.table(result)
    for text in ("{", "[]", '{"method": "x"}', '{"method": "x", "round": 1}', '{"method": "x", "round": Infinity}'):
        file.write_text(text + "\n")
        with pytest.raises(SystemExit, match="line 1 is no row"):
            wan.run(words)


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


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")
@pytest.mark.timeout(900)
def test_modelled_nodes_are_planned_run_and_timed_over_real_links(tmp_path):
    """GPT-2 XL over four hosts that are not there, twice as slow; the result is of the speed asked for."""
    rows = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float16)
    wan_recorded.save(tmp_path / "a.npz", {"activation": rows, "gradient": rows})
    words = [
        "--scenario",
        "g2",
        "--methods",
        "torch-bf16,ours-default,one-host",
        "--activation",
        str(tmp_path / "a.npz"),
    ]
    result = wan.run([*words, "--tokens", "64", "--microbatches", "4", "--steps", "1", "--stretch", "2"])
    rows_by = {row["method"]: row for row in result["runs"]}
    assert "no such device" in rows_by["one-host"]["failed"] and result["emulated_compute"]
    for name in ("torch-bf16", "ours-default"):
        row = rows_by[name]
        assert (
            row["val_loss"] is None and row["limit_step_s"] >= 4 * 0.12 and row["step_s"] >= row["limit_step_s"] * 0.99
        )
    assert rows_by["ours-default"]["predicted_step_s"] > 0


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")
def test_a_session_uses_the_link_it_has():
    """Real programs on two hosts; half the rate is far below what it reaches, and none is above it."""
    words = ["--links", "two-labs 20 Mbps", "--rounds", "1", "--seconds", "3", "--skip", "1"]
    (row,) = wan_goodput.run(words)["rows"]
    shares = {key: row[key] for key in row if "way" in key}
    assert len(shares) == 4 and all(0.5 < share < 1 for share in shares.values()), shares
