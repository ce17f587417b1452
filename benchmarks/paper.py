"""The FusionLLM paper's experiment in simulation: placements x codecs on four clusters, two models. No step is run.

The operator graphs are captured from the published shapes (GPT-2 XL, ResNet-101): no weight exists.
Devices compute at assumed shares of their datasheets in half precision, wires carry float32 where they are dense, and
codecs take the time of their memory traffic. The machines and links of the three paper-like clusters are ours, as the
paper's lists are not at hand; the eight cities' delays and rates are those of DT-FM. Top-K at 100 loses far more than
the time it saves shows (docs/codecs.md): its columns compare schedules, not training.

Two comparisons. Like for like, the paper's method (OP-Fence with AdaTopK) over its own baselines: equal-number and
equal-compute with the same Top-K everywhere, the faster of them. And ours over honest ones: our plan with bfloat16 on
every wire, and the best single site and single device.
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import msgspec

from benchmarks import figure_file
from fusionllm.errors import PlanError
from fusionllm.estimate.library import known_rates
from fusionllm.ir.graph import OpGraph
from fusionllm.schedule.coded import Coded, best_coded, ladder_factors, propose, scaled_cuts
from fusionllm.schedule.pipeline import AHEAD
from fusionllm.schedule.placement import BASELINES, Cluster, Workload, find_fences, select_nodes
from fusionllm.schedule.planner import plan_placement
from fusionllm.schedule.workload import StepOptions, build_workload
from fusionllm.sim.cluster import build_cluster, load_cluster
from fusionllm.sim.codecs import speeds_of

CLUSTERS = ("paper-24", "paper-48", "paper-48-homes", "eight-cities")
FOLDER = Path(__file__).parents[1] / "examples" / "clusters"
#: What the columns are called, and the rule of `schedule.ratios` behind each.
CODECS = {"dense": "", "uniform Top-K 100": "uniform-topk", "AdaTopK 100": "adatopk-paper", "deadline": "deadline"}
RATIO = 100.0
OURS = "ours"
#: What coding takes on the library's devices.
SPEEDS = speeds_of(known_rates())
#: A plan this near to ours counts as winning, as it needs less of the world.
NEAR = 1.02


class Model(NamedTuple):
    """A graph, the rows of a microbatch and the microbatches of a step."""

    graph: OpGraph
    microbatch_size: int
    num_microbatches: int


def capture_models(names: list[str]) -> dict[str, Model]:
    """Capture without weights. Takes about half a minute each."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, ResNetConfig, ResNetForImageClassification

    from fusionllm.capture.empty import without_weights
    from fusionllm.capture.export import capture_module

    def gpt2_xl() -> Model:
        config = AutoConfig.for_model("gpt2", n_embd=1600, n_layer=48, n_head=25, use_cache=False)
        factory: Any = AutoModelForCausalLM
        with without_weights():
            module = factory.from_config(config, attn_implementation="sdpa")
        tokens = torch.zeros(2, 1024, dtype=torch.int64)
        return Model(capture_module(module, {"input_ids": tokens, "labels": tokens}).graph, 1, 64)

    def resnet_101() -> Model:
        with without_weights():
            module = ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3], num_labels=1000))
        images, labels = torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.int64)
        return Model(capture_module(module, {"pixel_values": images, "labels": labels}).graph, 32, 32)

    makers = {"gpt2-xl": gpt2_xl, "resnet-101": resnet_101}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: makers[name]() for name in names}


def workloads(model: Model) -> tuple[Workload, Workload]:
    """With float32 and with bfloat16 on the wire; computed and stashed in bfloat16 either way."""
    options = StepOptions(microbatch_size=model.microbatch_size, num_microbatches=model.num_microbatches)
    half = build_workload(model.graph, msgspec.structs.replace(options, pipeline=AHEAD))
    return msgspec.structs.replace(scaled_cuts(half, 2.0), wire_dtype="float32"), half


def compare(full: Workload, half: Workload, cluster: Cluster) -> dict[str, Any]:
    """All cells of one model on one cluster, and the keys of the results table."""
    classic = msgspec.structs.replace(full, pipeline="1f1b")
    cells: dict[str, dict[str, float | None]] = {}
    for method, place in BASELINES.items():
        placements = [place(classic, cluster)]
        cells[method] = {title: _step_s(placements, rule, classic, cluster) for title, rule in CODECS.items()}
    factors = sorted({*ladder_factors(full), 12 / 4 / RATIO}, reverse=True)
    pool = propose(full, cluster, factors)
    found = {title: _best(pool, rule, full, cluster) for title, rule in CODECS.items()}
    cells[OURS] = {title: coded.step_s for title, coded in found.items()}
    ours, plain = found["deadline"], plan_placement(half, cluster)[0]
    result: dict[str, Any] = {
        "step_s": cells,
        "bf16_plan_s": plain.step_s,
        "bf16_stages": len(plain.placement.nodes),
        "stages": len(ours.placement.nodes),
        "sites": sorted({cluster.nodes[i].site for i in ours.placement.nodes}),
        "codecs": sorted({str(spec) for pair in ours.codecs for spec in pair}),
        "single_site": _best_of(half, cluster, find_fences(cluster)),
        "single_device": _best_of(half, cluster, [[i] for i in range(len(cluster.nodes))]),
    }
    result["speedup_paper_method_untied"] = _untied(classic, cluster) if classic.tied else None
    return result | _keys(result)


def _untied(workload: Workload, cluster: Cluster) -> float | None:
    """The paper's method over its baselines if the output layer had weights of its own: nothing is exchanged."""
    free = msgspec.structs.replace(workload, tied=())
    plain = [
        _step_s([BASELINES[m](free, cluster)], "uniform-topk", free, cluster) for m in ("equal-number", "equal-compute")
    ]
    method = _step_s([BASELINES["op-fence"](free, cluster)], "adatopk-paper", free, cluster)
    return _over(min((s for s in plain if s is not None), default=None), method)


def _best(pool: list[Any], rule: str, workload: Workload, cluster: Cluster) -> Coded:
    return best_coded(pool, rule, workload, cluster, ratio=RATIO, coding=SPEEDS)


def _step_s(placements: list[Any], rule: str, workload: Workload, cluster: Cluster) -> float | None:
    try:
        return _best(placements, rule, workload, cluster).step_s
    except PlanError:
        return None


def _best_of(workload: Workload, cluster: Cluster, groups: list[list[int]]) -> dict[str, Any]:
    """The fastest of several parts of a cluster by itself, with bfloat16 on its wires."""
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for group in groups:
        nodes = [cluster.nodes[i] for i in group]
        key = tuple((n.device, n.memory_bytes) for n in nodes) + ((nodes[0].site,) if len(group) > 1 else ())
        if key in seen:
            continue
        try:
            best = plan_placement(workload, select_nodes(cluster, group))[0]
        except PlanError:
            continue
        seen[key] = {
            "name": nodes[0].device if len(group) == 1 else nodes[0].site,
            "step_s": best.step_s,
            "stages": len(best.placement.nodes),
        }
    return min(seen.values(), key=lambda one: float(one["step_s"]), default={"name": "", "step_s": None, "stages": 0})


def _keys(result: dict[str, Any]) -> dict[str, Any]:
    cells, ours_s = result["step_s"], result["step_s"][OURS]["deadline"]
    uniform = [s for m in ("equal-number", "equal-compute") if (s := cells[m]["uniform Top-K 100"]) is not None]
    dense = [s for m in ("equal-number", "equal-compute") if (s := cells[m]["dense"]) is not None]
    paper_s, fence_s = cells["op-fence"]["AdaTopK 100"], cells["op-fence"]["dense"]
    site_s, device_s = result["single_site"]["step_s"], result["single_device"]["step_s"]
    winner = "several sites"
    if len(result["sites"]) == 1 or (site_s is not None and site_s <= ours_s * NEAR):
        winner = f"one site ({result['single_site']['name']})"
    if result["stages"] == 1 or (device_s is not None and device_s <= ours_s * NEAR):
        winner = f"one device ({result['single_device']['name']})"
    return {
        "speedup_paper_method": _over(min(uniform, default=None), paper_s),
        "speedup_op_fence_dense": _over(min(dense, default=None), fence_s),
        "speedup_ours": _over(min(uniform, default=None), ours_s),
        "speedup_ours_over_bf16_plan": _over(result["bf16_plan_s"], ours_s),
        "best_single_site": site_s,
        "speedup_ours_over_single_site": _over(site_s, ours_s),
        "winner": winner,
    }


def _over(slower_s: float | None, faster_s: float | None) -> float | None:
    return None if slower_s is None or not faster_s else slower_s / faster_s


def draw(result: dict[str, Any], file: Path) -> None:
    """Bars of step times, a panel per model and cluster. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models, methods = result["models"], [*BASELINES, OURS]
    clusters = list(next(iter(models.values())))
    figure = Figure(figsize=(3.2 * len(clusters), 2.9 * len(models)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(models), len(clusters), squeeze=False, sharey="row")
    for row, (model, by_cluster) in enumerate(models.items()):
        for column, cluster in enumerate(clusters):
            panel, one = axes[row][column], by_cluster[cluster]
            for k, title in enumerate(CODECS):
                heights = [one["step_s"][method][title] or 0.0 for method in methods]
                panel.bar([m + 0.2 * (k - 1.5) for m in range(len(methods))], heights, 0.2, label=title)
            panel.axhline(one["bf16_plan_s"], color="black", linewidth=0.8, linestyle="--", label="our plan, bfloat16")
            if one["best_single_site"] is not None:
                panel.axhline(
                    one["best_single_site"], color="black", linewidth=0.8, linestyle=":", label="best single site"
                )
            panel.set_yscale("log")
            panel.set_xticks(range(len(methods)), methods, rotation=25, fontsize=7)
            panel.set_title(f"{model}, {cluster}", fontsize=9)
            panel.grid(axis="y", alpha=0.3)
        axes[row][0].set_ylabel("seconds a step, simulated")
    axes[0][-1].legend(fontsize=6)
    figure.savefig(file)


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks paper", description=__doc__)
    parser.add_argument("--model", action="append", choices=["gpt2-xl", "resnet-101"], help="only this")
    parser.add_argument("--cluster", action="append", choices=CLUSTERS, help="only this")
    parser.add_argument("--figure", type=figure_file, help="draw the step times into this file")
    args = parser.parse_args(argv)
    models = capture_models(args.model or ["gpt2-xl", "resnet-101"])
    found: dict[str, Any] = {}
    for name, model in models.items():
        full, half = workloads(model)
        found[name] = {}
        for cluster in args.cluster or CLUSTERS:
            found[name][cluster] = compare(full, half, build_cluster(load_cluster(FOLDER / f"{cluster}.toml")))
            print(_line(name, cluster, found[name][cluster]), flush=True)
    result = {"models": found, "operators": {name: len(model.graph.ops) for name, model in models.items()}}
    if args.figure:
        draw(result, args.figure)
    return result


def _number(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.3g}"


def _line(model: str, cluster: str, one: dict[str, Any]) -> str:
    rows = [" / ".join(_number(s) for s in one["step_s"][method].values()) for method in (*BASELINES, OURS)]
    return f"| {model}, {cluster} | {' | '.join(rows)} |"


def _comparison(model: str, cluster: str, one: dict[str, Any]) -> str:
    """A row of the second table of docs/planning.md."""
    untied, site, device = one["speedup_paper_method_untied"], one["single_site"], one["single_device"]
    cells = [
        f"{_ratio(one['speedup_paper_method'])}{'' if untied is None else f' ({untied:.2f} untied)'}",
        _ratio(one["speedup_ours"]),
        _number(one["bf16_plan_s"]),
        *(_number(best["step_s"]) + f" ({best['name']})" * (best["step_s"] is not None) for best in (site, device)),
        _ratio(one["speedup_ours_over_bf16_plan"]),
        _ratio(one["speedup_ours_over_single_site"]),
        f"{one['stages']} in {', '.join(one['sites'])}",
        one["winner"],
    ]
    return f"| {model}, {cluster} | {' | '.join(cells)} |"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(result: dict[str, Any]) -> str:
    """Both tables of docs/planning.md."""
    every = [(model, cluster, one) for model, found in result["models"].items() for cluster, one in found.items()]
    titles = (
        "paper's method", "ours over the same baselines", "our plan, bfloat16: s", "best single site: s",
        "best single device: s", "ours over our bfloat16 plan", "over the best site", "ours uses", "wins",
    )  # fmt: skip
    steps = [f"| | {' | '.join((*BASELINES, OURS))} |", "|---|" + "---|" * (len(BASELINES) + 1)]
    steps += [_line(*row) for row in every]
    return "\n".join(
        [*steps, "", f"| | {' | '.join(titles)} |", "|---|" + "---|" * len(titles), *(_comparison(*r) for r in every)]
    )
