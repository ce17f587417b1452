"""Training over a wide-area network, ours beside what a user would run instead, on the same emulated links.

The same model, data, order, optimizer, microbatches and number of steps for all rows; `wan_peer` has the others,
`wan_runs` starts and measures, `wan_limit` says how fast a step could be. Needs root (docs/testbed.md).

    python -m benchmarks wan --scenario two-labs --methods torch-bf16,ours-bf16 --json

With ``--records FILE`` every row is appended there when it is measured, and the result is of all rows of the file that
were taken with the same settings; ``--methods ''`` measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks import above_zero, at_least, figure_file
from benchmarks.convergence import METHODS as METHOD_CODECS
from benchmarks.wan_figure import draw
from benchmarks.wan_limit import Crossing, Limit, Stage, step_limit
from benchmarks.wan_meter import Work
from benchmarks.wan_modelled import MODELS, equal_works
from benchmarks.wan_recorded import DEFAULT, ensure_recorded
from benchmarks.wan_runs import SETTLE_STEPS, Bed, Measured, MethodFailed, OurCluster, run_peer
from fusionllm.errors import UserError, known_names
from fusionllm.testbed import Scenario, build_scenario, load_scenario, why_unavailable
from fusionllm.testbed.cgroups import PERIOD_US
from fusionllm.testbed.scenario import Host

ROOT = Path(__file__).parents[1]
SCENARIOS = ROOT / "examples" / "scenarios"
#: Of the model that is really trained.
HEADS = 6
CAST = {"forward": "cast", "backward": "cast"}
#: method -> changes of a run's tables. "peer" rows are `wan_peer`'s modes.
OURS: dict[str, dict[str, dict[str, Any]]] = {
    "ours-dense": {"cluster": {"partition": "equal-number"}},
    "ours-bf16": {"cluster": {"partition": "equal-number"}, "compression": CAST},
    "ours-paper": {"cluster": {"partition": "op-fence"}, "compression": {"rule": "adatopk-paper", "ratio": 100.0}},
    "ours-hadamard": {
        "cluster": {"partition": "equal-number"},
        "compression": {"forward": "hadamard", "backward": "tangent(hadamard)"},
    },
    "ours-klt": {
        "cluster": {"partition": "equal-number"},
        "compression": {"forward": "klt", "backward": "tangent(hadamard:bits=1)"},
    },
    "ours-codec": {"cluster": {"partition": "equal-number"}},  # and --forward, --backward
    "ours-default": {"cluster": {"partition": "dp"}, "compression": {"rule": "deadline"}},
}
#: The same on one site alone, for emulated compute: the planner on the fence whose devices are the fastest together.
SITE: dict[str, dict[str, Any]] = {"one-site": {"cluster": {"partition": "dp"}}}
PEERS: dict[str, dict[str, Any]] = {
    "torch-fp32": {"mode": "pipeline", "boundary": "float32"},
    "torch-bf16": {"mode": "pipeline", "boundary": "bfloat16"},
    "one-host": {"mode": "one-host"},
    "diloco-20": {"mode": "diloco", "inner": 20},
    "diloco-50": {"mode": "diloco", "inner": 50},
}
METHODS = (*PEERS, *OURS, *SITE)
#: Codecs of ours-codec: the smallest whose loss `benchmarks convergence` shows.
SMALL = METHOD_CODECS["klt-ec-70f"]
#: What rows must have in common to be compared; each is an argument.
SETTINGS = (
    "scenario",
    "bandwidth",
    "pipeline",
    "steps",
    "microbatches",
    "layers",
    "width",
    "seed",
    "model",
    "tokens",
    "unlimited",
    "precision",
)


def run_config(args: argparse.Namespace, root: str) -> dict[str, Any]:
    """The run that all methods do: a GPT-2 of 16 M parameters, hand-cut friendly (nothing tied)."""
    data = ROOT / "examples" / "data"
    return {
        "run": {"root": root, "seed": args.seed},
        "model": {
            "source": "gpt2",
            "config": {
                "n_layer": args.layers, "n_head": HEADS, "n_embd": args.width, "n_positions": 128, "vocab_size": 2048,
                "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
            },
        },
        "data": {"source": str(data / "shakespeare.txt"), "tokenizer": str(data / "tokenizer.json"), "seq_len": 128},
        "train": {
            "steps": args.warm + SETTLE_STEPS + args.steps, "global_batch": 4 * args.microbatches,
            "microbatch_size": 4, "pipeline": args.pipeline, "precision": args.precision, "eval_batches": 8,
        },
        "optimizer": {"name": "adamw", "lr": 1e-3, "schedule": "constant"},
        "cluster": {"threads": 1},
        "output": {"sinks": [], "plot": False},
    }  # fmt: skip


def modelled_config(args: argparse.Namespace, root: str) -> dict[str, Any]:
    """The same for emulated compute: a large model that nobody holds, one row per microbatch, losses mean nothing."""
    data = ROOT / "examples" / "data"
    source, config = MODELS[args.model]
    return {
        "run": {"root": root, "seed": args.seed},
        "model": {"source": source, "config": config, "lazy": True},
        "data": {"source": str(data / "shakespeare.txt"), "tokenizer": "bytes", "seq_len": args.tokens},
        "train": {
            "steps": args.warm + SETTLE_STEPS + args.steps, "global_batch": args.microbatches, "microbatch_size": 1,
            "pipeline": args.pipeline, "eval_batches": 1,
        },
        "optimizer": {"name": "adamw", "lr": 1e-3, "schedule": "constant"},
        "cluster": {"threads": 1},
        "output": {"sinks": [], "plot": False},
    }  # fmt: skip


def padded_config(args: argparse.Namespace, root: str) -> dict[str, Any]:
    """And for torch's pipeline: thin stages with the boundary of that model."""
    config = MODELS[args.model][1]
    width = config.get("n_embd") or config["hidden_size"]
    source = {"source": f"python:benchmarks.wan_padded:thin_{width}"}
    return modelled_config(args, root) | {"model": source}


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks wan", description=__doc__)
    parser.add_argument("--scenario", default="two-labs", help="a name of examples/scenarios, or a file")
    parser.add_argument("--bandwidth", default="", help="of all links between fences, instead of the scenario's")
    parser.add_argument(
        "--methods", default="torch-bf16,ours-bf16", help=f"all, none (''), or some of {', '.join(METHODS)}"
    )
    parser.add_argument("--rounds", type=at_least(1), default=1)
    parser.add_argument("--steps", type=at_least(1), default=6, help="timed steps")
    parser.add_argument(
        "--warm", type=at_least(1), default=2, help="steps before limits are set: codecs find their basis"
    )
    parser.add_argument("--microbatches", type=at_least(1), default=8)
    parser.add_argument("--layers", type=at_least(1), default=8)
    parser.add_argument("--width", type=at_least(HEADS), default=384, help=f"a multiple of its {HEADS} heads")
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        help="that all rows compute in (bfloat16), not of emulated compute",
    )
    parser.add_argument("--pipeline", default="1f1b-ahead", help="of our rows; torch's are 1F1B")
    parser.add_argument("--timeout", type=above_zero, default=1800.0, help="seconds for one method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forward", default=SMALL[0], help="codec of activations of ours-codec")
    parser.add_argument("--backward", default=SMALL[1], help="codec of gradients of ours-codec")
    parser.add_argument("--records", type=Path, help="a file of JSON lines: append rows, sum up what is there")
    parser.add_argument("--model", default="", choices=["", *MODELS], help="of emulated compute")
    parser.add_argument(
        "--tokens", type=at_least(0), default=0, help="a microbatch, of emulated compute; default: 1024"
    )
    parser.add_argument(
        "--stretch", type=above_zero, default=1.0, help="of emulated compute: all times so many times longer"
    )
    parser.add_argument("--unlimited", action="store_true", help="no shares and rates are set: for losses, not speeds")
    parser.add_argument("--target", type=float, default=0.0, help="training loss, a mean of 10 steps, to be timed to")
    parser.add_argument("--activation", type=Path, default=DEFAULT, help="recording that is sent, see wan-record")
    parser.add_argument("--missing", action="store_true", help="only methods of which --records has no row yet")
    parser.add_argument("--figure", type=figure_file, help="a file for the picture, e.g. wan.png")
    args = parser.parse_args(argv)
    if args.width % HEADS:
        parser.error(f"argument --width: {args.width} is no multiple of {HEADS}, the heads of the model")
    methods = list(METHODS) if args.methods == "all" else [name for name in args.methods.split(",") if name]
    if unknown := [name for name in methods if name not in METHODS]:
        raise SystemExit(f"no method {unknown[0]!r}; {known_names(unknown[0], METHODS)}")
    if methods and (reason := why_unavailable()):
        return {"skipped": f"no wide-area network can be made here: {reason}", "runs": []}
    scenario = find_scenario(args.scenario, args.bandwidth)
    args.emulated, args.nodes = scenario.emulates_compute, len(scenario.nodes)
    if args.emulated:
        args.model, args.tokens = args.model or "gpt2-xl-boundary", args.tokens or 1024
    args.precision = "" if args.emulated else args.precision or "bfloat16"
    settings = {key: getattr(args, key) for key in SETTINGS}
    records = read_records(args.records, settings) if args.records else []
    if args.missing:
        there = {record["method"] for record in records if "failed" not in record}
        methods = [name for name in methods if name not in there]
    first = 1 + max((record["round"] for record in records), default=0)
    if methods:
        with tempfile.TemporaryDirectory() as folder, Bed(scenario, args.stretch) as bed:
            bed.unlimited, bed.warm_steps = args.unlimited, args.warm
            if args.emulated:
                bed.works = equal_works(args.model, args.tokens, args.nodes)
                bed.activation = str(ensure_recorded(args.activation).resolve())
            for index in range(first, first + args.rounds):
                part = Path(folder, f"round{index}")
                part.mkdir()
                for row in run_round(bed, part, methods, args):
                    taken = {"round": index, "load": os.getloadavg()[0], "stretch": args.stretch, "warm": args.warm}
                    records.append(settings | taken | row)
                    if args.records:
                        append_record(args.records, records[-1])
    result = settings | {
        "rounds": len({record["round"] for record in records}), "emulated_compute": args.emulated,
        "load": os.getloadavg()[0], "runs": medians(records),
    }  # fmt: skip
    if args.figure:
        draw(result, args.figure)
    return result


def find_scenario(name: str, bandwidth: str) -> Scenario:
    """A shipped scenario or a file; with the rate of what lies between fences replaced. Raises SystemExit."""
    path = Path(name) if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    if not path.exists():
        known = known_names(name, sorted(p.stem for p in SCENARIOS.glob("*.toml")))
        raise SystemExit(f"no scenario {name!r}; {known}, or a file that ends in .toml")
    try:
        tree = msgspec.to_builtins(load_scenario(path))
        if bandwidth:
            for link in (*tree["link"], tree["otherwise"]):
                link["bandwidth"] = bandwidth
        return build_scenario(tree)
    except UserError as error:
        raise SystemExit(f"{path}: {error}") from None


def append_record(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_records(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The file's rows that were taken with these settings; none without a file. Raises SystemExit."""
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        try:
            record = json.loads(line)
            record["method"], record["round"] = str(record["method"]), int(record["round"])
            record.get("failed") or float(record["step_s"])
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            raise SystemExit(f"{path}, line {number} is no row of this benchmark; remove it") from None
        if all(record.get(key) == value for key, value in settings.items()):
            found.append(record)
    return found


def run_round(bed: Bed, folder: Path, methods: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of every method; one that fails gives a row with its reason."""
    config = (modelled_config if args.emulated else run_config)(args, str(folder / "runs"))
    config["cluster"]["nodes"] = len(bed.scenario.nodes)
    for name in methods:
        if name in PEERS:
            yield attempt(name, bed, args, partial(peer_measured, bed, folder, name, config, args))
    for cluster_of, group in ((OURS, bed.scenario.nodes), (SITE, best_site(bed))):
        names = [name for name in methods if name in cluster_of]
        left = list(names)
        try:
            codes = any("compression" in cluster_of[name] or name == "ours-codec" for name in names)
            with OurCluster(bed, folder, group, codes) if names else nullcontext() as cluster:
                for name in names:
                    tables = merge(config | {"cluster": config["cluster"] | {"nodes": len(group)}}, cluster_of[name])
                    if name == "ours-codec":
                        tables["compression"] = {"forward": args.forward, "backward": args.backward}
                    yield attempt(name, bed, args, partial(cluster.train, name, tables, args.timeout))
                    left.remove(name)
        except (MethodFailed, UserError) as error:
            yield from (failed(name, str(error)) for name in left)


def best_site(bed: Bed) -> list[Host]:
    """The nodes of the fence whose devices are the fastest together; of all fences, where compute is real."""
    if not bed.works:
        return bed.scenario.nodes
    sites: dict[str, list[Host]] = {}
    for host in bed.scenario.nodes:
        sites.setdefault(host.fence, []).append(host)
    return max(sites.values(), key=lambda hosts: sum(bed.modelled(host).rates.matmul for host in hosts))


def peer_measured(bed: Bed, folder: Path, name: str, config: dict[str, Any], args: argparse.Namespace) -> Measured:
    mode = PEERS[name]["mode"]
    if args.emulated and mode != "pipeline":
        raise MethodFailed(f"{name} is not modelled: no such device holds the model with its optimizer")
    own = folder / name
    own.mkdir()
    if args.emulated:
        config = padded_config(args, str(folder / "runs"))
    return run_peer(bed, own, mode, PEERS[name] | {"config": config}, args.timeout)


def merge(config: dict[str, Any], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return config | {table: config.get(table, {}) | values for table, values in changes.items()}


def attempt(name: str, bed: Bed, args: argparse.Namespace, measure: Any) -> dict[str, Any]:
    """A row of the table. Prints it at once: a round takes many minutes."""
    try:
        row = make_row(name, bed, args, measure())
    except (MethodFailed, UserError) as error:
        row = failed(name, str(error))
    print(json.dumps(row), flush=True)
    return row


def failed(name: str, reason: str) -> dict[str, Any]:
    return {"method": name, "failed": reason}


def make_row(name: str, bed: Bed, args: argparse.Namespace, measured: Measured) -> dict[str, Any]:
    tokens = args.microbatches * (args.tokens if args.emulated else 4 * 128)
    step_s = median(measured.step_s)
    row: dict[str, Any] = {"method": name}
    slow = {pipe: n for pipe, n in measured.num_bytes.items() if bed.network.pipes[pipe].rate_bytes_per_s}
    between = [f"{a.name}>{b.name}" for a in bed.network.hosts for b in bed.network.hosts if a.fence != b.fence]
    crossed = sum(measured.num_bytes.get(pipe, 0.0) for pipe in between)
    if name.startswith("diloco"):
        inner = PEERS[name]["inner"]
        inner_s, exchange_s = measured.result.get("inner_s", step_s), measured.result["seconds"]
        step_s = inner_s + exchange_s / inner
        row |= {"composed": True, "exchange_s": exchange_s}
    else:
        limit = limit_of(bed, measured, args.microbatches)
        row |= {"limit_step_s": limit.seconds / bed.stretch, "bottleneck": limit.bottleneck}
        rates = {pipe: bed.network.pipes[pipe].rate_bytes_per_s for pipe in slow}
        use = max((n / rates[pipe] / step_s for pipe, n in slow.items()), default=0.0)
        row |= {"bottleneck_link_utilisation": use, "bytes": crossed}
    predicted_s = measured.result.get("extra", {}).get("predicted_step_s")
    step_s /= bed.stretch
    return row | {
        "tokens_per_s": tokens / step_s, "step_s": step_s, "steps_s": [s / bed.stretch for s in measured.step_s],
        "predicted_step_s": predicted_s and predicted_s / bed.stretch,
        "plan": measured.plan, "stages": measured.stages,
        "seconds_to_target": seconds_to(args.target, measured.losses, step_s), "target_loss": args.target or None,
        "val_loss": None if args.emulated else measured.result.get("val_loss"),
        "losses": measured.losses, "dropped": measured.dropped,
        "cpu_s": measured.cpu_s,
    }  # fmt: skip


def seconds_to(target: float, losses: list[float], step_s: float) -> float | None:
    """Seconds of the steps until the mean training loss of ten of them is ``target``; None when it never was."""
    for end in range(10, len(losses) + 1):
        if target and sum(losses[end - 10 : end]) / 10 <= target:
            return end * step_s
    return None


def limit_of(bed: Bed, measured: Measured, num_microbatches: int) -> Limit:
    """The limit of a step, from the processor time and bytes that the method itself used."""
    hosts = {host.name: host for host in bed.scenario.nodes}
    order = measured.stages
    stages = []
    for name in order:
        work = measured.work.get(name, Work())
        if bed.works:
            stages.append(Stage(work.forward_s, work.backward_s, work.step_s, work.step_s))
            continue
        share = hosts[name].cpu or len(os.sched_getaffinity(0))
        times_s = work.forward_s, work.backward_s, work.step_s, measured.cpu_s[name]
        stages.append(Stage(*times_s, share, PERIOD_US * 1e-6))
    ways: list[list[Crossing]] = [[], []]
    for index, (a, b) in enumerate(zip(order, order[1:])):
        for side, (source, target) in enumerate(((a, b), (b, a))):
            network, pair = bed.network, f"{source}>{target}"
            route = network.route(network.host(source), network.host(target))
            rates = {pipe: network.pipes[pipe].rate_bytes_per_s for pipe in route}
            shaped = {pipe: rate for pipe, rate in rates.items() if rate}
            delay_s = network.pipes[pair].delay_s
            ways[side].append(Crossing(index, measured.num_bytes.get(pair, 0.0), delay_s, shaped))
    return step_limit(stages, ways[0], ways[1], num_microbatches)


def medians(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of each method, and stretch of emulated compute, over its rounds."""
    rounds: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for record in records:
        rounds.setdefault((record["method"], record.get("stretch", 1.0)), []).append(record)
    return [middle(name, rows) for (name, _), rows in rounds.items()]


def middle(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The round of median speed; a method that failed in the last one is reported as failed."""
    if not rows or "failed" in rows[-1]:
        return rows[-1] if rows else failed(name, "not run")
    rows = [row for row in rows if "failed" not in row]
    ordered = sorted(rows, key=lambda row: row["step_s"])
    return ordered[len(ordered) // 2] | {"rounds_step_s": [row["step_s"] for row in rows]}


def table(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"wan skipped: {result['skipped']}"
    title = f"{result['scenario']} {result['bandwidth']}".strip()
    emulated = ", compute emulated: losses mean nothing" * result.get("emulated_compute", False)
    lines = [
        f"{title}, {result['rounds']} rounds of {result['steps']} steps{emulated}",
        f"{'method':14}{'tokens/s':>9}{'step s':>9}{'limit s':>9}{'of limit':>9}{'link use':>9}{'MB':>8}"
        f"{'predicted':>10}{'val loss':>10}  bottleneck",
    ]
    for row in result["runs"]:
        if "failed" in row:
            lines.append(f"{row['method']:14} failed: {row['failed']}")
            continue
        limit, use, sent = row.get("limit_step_s"), row.get("bottleneck_link_utilisation"), row.get("bytes")
        lines.append(
            f"{row['method']:14}{row['tokens_per_s']:9.0f}{row['step_s']:9.2f}"
            + (f"{limit:9.2f}{limit / row['step_s']:9.0%}{use:9.0%}{sent / 1e6:8.2f}" if limit else " " * 35)
            + (f"{row['predicted_step_s']:10.2f}" if row["predicted_step_s"] else " " * 10)
            + (f"{row['val_loss']:10.4f}" if row["val_loss"] is not None else " " * 10)
            + f"  {row.get('bottleneck', 'composed of inner steps and one exchange')}"
        )
    good = {row["method"]: row["tokens_per_s"] for row in result["runs"] if "failed" not in row}
    if "one-host" in good and good["one-host"] >= max(good.values()):
        lines.append("one host alone is fastest here: the links are too slow for a model that fits one host")
    return "\n".join(lines)
