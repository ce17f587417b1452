"""How good and how fast the planner is: against the oracle, against the baselines, and on large clusters.

Instances are random and seeded: unequal speeds, every direction of every link its own rate, memory that binds. The
large runs plan GPT-2 XL's operator graph, captured from its published shape on the meta device, with no download.
Numpy is held to one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import msgspec
import numpy as np

from benchmarks.paper import capture_models, workloads
from fusionllm.errors import PlanError
from fusionllm.ir.cuts import Cut
from fusionllm.schedule.placement import BASELINES, Cluster, NodeModel, Workload, replay_placement
from fusionllm.schedule.planner import place_exhaustive, plan_placement


def random_workload(rng: np.random.Generator, num_ops: int, pipeline: str) -> Workload:
    """A chain of unequal operators; one of each about costs a FLOP, a megabyte to cross, a byte to keep."""
    return Workload(
        cuts=tuple(Cut(i + 1, ("v",), int(b)) for i, b in enumerate(rng.lognormal(0, 0.5, num_ops - 1) * 1e6)),
        flops=tuple(rng.lognormal(0, 0.4, num_ops).tolist()),
        state_bytes=tuple((2 * rng.lognormal(0, 0.3, num_ops)).tolist()),
        stash_bytes=tuple(rng.lognormal(0, 0.3, num_ops).tolist()),
        num_microbatches=int(rng.choice([4, 8, 16])),
        pipeline=pipeline,
    )


def random_instance(
    rng: np.random.Generator,
    num_nodes: int,
    num_ops: int,
    num_sites: int = 0,
    pipeline: str = "1f1b",
    room: float = 1.0,
) -> tuple[Workload, Cluster]:
    """Nodes whose speeds differ up to 8 times, rates up to 50 times, memory .8 to 6 times an equal share,
    times ``room``.

    With sites: equal links inside a site, twenty times as fast as the slowest between sites, and four kinds of nodes.
    """
    workload = random_workload(rng, num_ops, pipeline)
    site = rng.integers(0, num_sites, num_nodes) if num_sites else np.arange(num_nodes)
    speeds = np.exp(rng.uniform(0, np.log(8), num_nodes))
    share = room * (sum(workload.state_bytes) + 2 * sum(workload.stash_bytes)) / num_nodes
    memory = share * np.exp(rng.uniform(np.log(0.8), np.log(6), num_nodes))
    if num_sites:
        kind = rng.integers(0, 4, num_nodes)
        speeds, memory = np.array([1.0, 2.0, 4.0, 8.0])[kind], share * np.array([1.0, 2.0, 4.0, 4.0])[kind]
    # seconds of an equal share of a microbatch on the mean node; the slowest link takes as long for one crossing
    work_s = 3 * sum(workload.flops) / speeds.mean() / num_nodes
    slowest = float(np.mean([cut.num_bytes for cut in workload.cuts])) / work_s
    apart = np.exp(rng.uniform(0, np.log(50), (num_nodes, num_nodes)))
    between = np.exp(rng.uniform(0, np.log(20), (max(num_sites, 1),) * 2))
    rates = np.where(site[:, None] == site[None, :], 50.0, between[site][:, site]) if num_sites else apart
    latency = float(rng.uniform(0, 0.5) * work_s)
    nodes = tuple(
        NodeModel(name=f"n{i}", flops_per_s=float(speeds[i]), memory_bytes=float(memory[i]),
                  site=f"site{site[i]}" if num_sites else "")
        for i in range(num_nodes)
    )  # fmt: skip
    rows = tuple(tuple(float(rate) for rate in row) for row in rates * slowest)
    return workload, Cluster(nodes=nodes, bandwidth_bytes_per_s=rows, latency_s=((latency,) * num_nodes,) * num_nodes)


def small(count: int, seed: int, pipeline: str = "1f1b") -> list[float]:
    """Step time over the oracle's, one number per feasible instance of 3 to 6 nodes and 8 to 12 operators."""
    rng = np.random.default_rng(seed)
    ratios: list[float] = []
    while len(ratios) < count:
        workload, cluster = random_instance(rng, int(rng.integers(3, 7)), int(rng.integers(8, 13)), pipeline=pipeline)
        try:
            oracle = place_exhaustive(workload, cluster)
        except PlanError:
            continue
        ratios.append(plan_placement(workload, cluster)[0].step_s / oracle.step_s)
    return ratios


def large(count: int, seed: int) -> list[dict[str, float]]:
    """Step time of each baseline over ours, per instance of 8 to 48 nodes; those that do not fit are left out."""
    rng = np.random.default_rng(seed)
    speedups: list[dict[str, float]] = []
    while len(speedups) < count:
        num_nodes = int(rng.integers(8, 49))
        num_sites = int(rng.choice([0, 2, 4, 6]))
        workload, cluster = random_instance(rng, num_nodes, int(rng.integers(num_nodes, 97)), num_sites, room=num_nodes)
        try:
            ours = plan_placement(workload, cluster)[0].step_s
        except PlanError:
            continue
        speedups.append({})
        for name, place in BASELINES.items():
            with contextlib.suppress(PlanError):
                step_s = replay_placement(workload, cluster, place(workload, cluster)).step_s
                speedups[-1][name] = step_s / ours
    return speedups


def gpt2_xl() -> Workload:
    """GPT-2 XL as `benchmarks.paper` captures it, in numbers; in a process of its own, so its memory is not ours."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return msgspec.msgpack.decode(pool.submit(_captured).result(), type=Workload)


def _captured() -> bytes:
    return msgspec.msgpack.encode(workloads(capture_models(["gpt2-xl"])["gpt2-xl"])[1])


def synthetic_cluster(num_nodes: int, seed: int) -> Cluster:
    """Sites of 4 to 16 GPUs of one kind each; 1 to 10 Gbps inside, 8 Mbps to 1 Gbps between, by distance."""
    rng = np.random.default_rng(seed)
    kinds = ((53.8e12 * 0.45, 11e9), (71e12 * 0.55, 24e9), (165.2e12 * 0.45, 24e9), (312e12 * 0.45, 40e9))
    site: list[int] = []
    while len(site) < num_nodes:
        site += [len(set(site))] * int(min(rng.integers(4, 17), num_nodes - len(site)))
    at, count = np.array(site), max(site) + 1
    kind, place = rng.integers(0, 4, count), rng.uniform(0, 1, (count, 2))
    distance = np.sqrt(((place[:, None] - place[None, :]) ** 2).sum(axis=2))
    uplink = rng.choice([50, 100, 200, 500, 1000], count)
    mbps = np.maximum(8, np.minimum(uplink[:, None], uplink[None, :]) * np.exp(-distance) * rng.uniform(0.6, 1))
    np.fill_diagonal(mbps, rng.choice([1000, 2500, 10000], count))
    latency = 0.003 + 0.1 * distance
    np.fill_diagonal(latency, 0.0002)
    devices = [kinds[kind[s]] for s in site]
    nodes = tuple(
        NodeModel(name=f"n{i}", flops_per_s=flops, memory_bytes=memory * 0.92 - 1e9, site=f"s{s}")
        for i, (s, (flops, memory, *_)) in enumerate(zip(site, devices))
    )
    rates, delays = (mbps * 1e6 / 8 * 0.9)[at][:, at], latency[at][:, at]
    return Cluster(
        nodes=nodes,
        bandwidth_bytes_per_s=tuple(map(tuple, rates.tolist())),
        latency_s=tuple(map(tuple, delays.tolist())),
    )


def timed_plan(workload: Workload, num_nodes: int) -> tuple[float, float]:
    """Seconds to plan on a synthetic cluster, and seconds of a step of the plan."""
    cluster = synthetic_cluster(num_nodes, seed=0)
    started_s = time.perf_counter()
    best = plan_placement(workload, cluster)[0]
    return time.perf_counter() - started_s, best.step_s


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks planner", description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1000, help="of the largest cluster")
    args = parser.parse_args(argv)
    ratios = small(args.instances, args.seed)
    speedups = large(args.instances, args.seed)
    workload = gpt2_xl()
    plan48_s, step48_s = timed_plan(workload, 48)
    plan1000_s, step1000_s = timed_plan(workload, args.nodes)
    return {
        "worst_ratio": max(ratios),
        "median_ratio": median(ratios),
        "slower_than_baseline": sum(s < 1 - 1e-9 for one in speedups for s in one.values()),
        "median_speedup_over_op_fence": median(s["op-fence"] for s in speedups if "op-fence" in s),
        "op_fence_fits": sum("op-fence" in s for s in speedups),
        "plan48_seconds": plan48_s,
        "step48_s": step48_s,
        "plan1000_seconds": plan1000_s,
        "step1000_s": step1000_s,
        "nodes": args.nodes,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "instances": args.instances,
        "operators": len(workload.flops),
        "seed": args.seed,
    }


def table(result: dict[str, Any]) -> str:
    return (
        f"{result['instances']} small instances: ours over the oracle, median {result['median_ratio']:.4f}, "
        f"worst {result['worst_ratio']:.4f}\n"
        f"{result['instances']} large ones: slower than a baseline {result['slower_than_baseline']} times, "
        f"{result['median_speedup_over_op_fence']:.2f} times as fast as OP-Fence in the median "
        f"(which fits in {result['op_fence_fits']})\n"
        f"GPT-2 XL, {result['operators']} operators: 48 nodes in {result['plan48_seconds']:.1f} s, "
        f"{result['nodes']} nodes in {result['plan1000_seconds']:.1f} s, {result['rss_gib']:.2f} GiB"
    )
