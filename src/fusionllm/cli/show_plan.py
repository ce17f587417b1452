"""What `fusionllm plan` reads and prints: a graph, its plan on a cluster, what a change of the cluster would do.

A graph that is captured already needs no torch; a run's TOML is captured first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from fusionllm.errors import GraphError, UserError
from fusionllm.estimate.memory import OPTIMIZER_COPIES
from fusionllm.ir.graph import MAX_GRAPH_BYTES, OpGraph, decode_graph
from fusionllm.schedule.placement import Workload
from fusionllm.schedule.workload import StepOptions, build_workload
from fusionllm.sim.advice import advise
from fusionllm.sim.cluster import ClusterSpec, build_cluster, device_rates, unmeasured_devices
from fusionllm.sim.codecs import CodedReport, plan_codecs
from fusionllm.sim.study import Study, best_plan, study
from fusionllm.units import format_bandwidth, format_duration, format_num_bytes

#: Columns where there is no terminal to fit: nothing is cut off in a file or a pipe.
_WIDE = 200


def read_graph(path: Path) -> OpGraph:
    """A captured graph from a file or folder, or the capture of a run. Raises UserError, GraphError, CaptureError."""
    if path.suffix == ".toml":
        from fusionllm.api.config import load_config
        from fusionllm.api.prepare import prepare

        return prepare(load_config(path), path.parent.resolve()).captured.graph
    file = path / "graph.json" if path.is_dir() else path
    try:
        if file.stat().st_size > MAX_GRAPH_BYTES:
            raise UserError(f"{file} is larger than {MAX_GRAPH_BYTES >> 20} MiB, the limit of a graph")
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error}") from None
    if data.lstrip()[:1] == b"{":
        return decode_graph(data)
    from fusionllm.ir.text import parse_graph

    try:
        return parse_graph(data.decode(errors="replace"))
    except GraphError as error:
        raise UserError(f"{file} is no graph ({error}); `fusionllm graph RUN.toml --text` writes one") from None


def step_options(path: Path, **given: Any) -> StepOptions:
    """What a step is: as given, else as a run's TOML says, else `StepOptions`' own. Raises UserError.

    A run in float16, or with weights in bfloat16, counts as bfloat16; an optimizer of which the memory is not known as
    adamw.
    """
    own: dict[str, Any] = {}
    if path.suffix == ".toml":
        from fusionllm.api.config import load_config

        config = load_config(path)
        own = {
            "microbatch_size": config.train.microbatch_size, "num_microbatches": config.num_microbatches,
            "pipeline": config.train.pipeline,
            "precision": "float32" if config.train.precision == "float32" else "bfloat16",
            "optimizer": config.optimizer.name if config.optimizer.name in OPTIMIZER_COPIES else "adamw",
        }  # fmt: skip
    return StepOptions(**(own | {key: value for key, value in given.items() if value is not None}))


def warn_unmeasured(spec: ClusterSpec, precision: str) -> None:
    """To stderr: devices whose float32 rates stand in for those of the precision."""
    for name in unmeasured_devices(spec, precision):
        print(
            f"note: device {name} has no rates in {precision}, counted with those in float32; "
            "measure it (fusionllm calibrate) or plan with --precision float32",
            file=sys.stderr,
        )


class Output(NamedTuple):
    """What to print and draw: JSON, a picture, whether to look for helpful changes, codecs by a rule."""

    as_json: bool = False
    svg: Path | None = None
    advice: bool = True
    codecs: str = ""
    ratio: float = 100.0


def show_plan(
    graph: OpGraph, specs: dict[str, ClusterSpec], options: StepOptions, device_model: str, output: Output
) -> None:
    """Plan on each cluster, the first unchanged, and print. Raises PlanError when the first has no plan."""
    warn_unmeasured(specs[""], options.precision)
    rates = device_rates(specs[""], options.precision)

    def rebuild(size: int, count: int) -> Workload:
        changed = msgspec.structs.replace(options, microbatch_size=size, num_microbatches=count)
        return build_workload(graph, changed, rates)

    def smaller() -> Iterator[tuple[str, Callable[[], Workload]]]:
        size, count = options.microbatch_size, options.num_microbatches
        while size % 2 == 0:
            size, count = size // 2, count * 2
            yield f"microbatches of {size}, {count} a step", partial(rebuild, size, count)

    workload = rebuild(options.microbatch_size, options.num_microbatches)
    clusters = {text: build_cluster(spec, options.precision, device_model) for text, spec in specs.items()}
    best = best_plan(workload, clusters[""], smaller())
    studies = {text: study(workload, cluster, best if not text else None) for text, cluster in clusters.items()}
    if output.advice:
        found = studies[""]
        memory = [(stage.memory_bytes, stage.limit_bytes) for stage in found.stages]
        advice = advise(
            workload, clusters[""], best.placement, found.step_s, memory, options.microbatch_size, rebuild
        )  # fmt: skip
        studies[""] = msgspec.structs.replace(found, advice=advice)
    if output.codecs:
        coded = plan_codecs(workload, clusters[""], output.codecs, output.ratio, rates)
        studies[""] = msgspec.structs.replace(studies[""], coded=coded)
    if output.svg is not None:
        from fusionllm.cli.draw_plan import draw_plan

        draw_plan(output.svg, clusters[""], best, studies[""])
    _print_all(studies, output.as_json)


def _print_all(studies: dict[str, Study], as_json: bool) -> None:
    if as_json:
        changed = {text: msgspec.to_builtins(found) for text, found in studies.items() if text}
        print(json.dumps({**msgspec.to_builtins(studies[""]), "what_if": changed}))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    print_study(console, studies[""])
    for text, found in studies.items():
        if text:
            step_s, before_s = found.step_s, studies[""].step_s
            console.print(f"what if {text}: {format_seconds(step_s)} a step, {before_s / step_s:.2f} times as fast")


def print_study(console: Console, found: Study) -> None:
    """Fences, stages, comparison and the nodes left out, for people."""
    fences = ", ".join(f"{name} ({len(nodes)})" for name, nodes in found.fences.items())
    console.print(f"fences: {fences}")
    table = Table(title=f"{format_seconds(found.step_s)} a step, predicted; {found.num_microbatches} microbatches")
    for column in ("stage", "node", "fence", "device", "operators", "compute", "memory", "in flight", "to the next"):
        table.add_column(column)
    for k, stage in enumerate(found.stages):
        link = found.links[k] if k < len(found.links) else None
        to_next = (
            f"{format_num_bytes(link.num_bytes)} at {format_bandwidth(link.bandwidth_bytes_per_s)}" if link else ""
        )
        memory = f"{format_num_bytes(stage.memory_bytes)} of {format_num_bytes(stage.limit_bytes)}"
        table.add_row(
            str(k), stage.node, stage.fence, stage.device, f"{stage.first_op}-{stage.end_op}",
            format_seconds(stage.compute_s), memory, str(stage.in_flight), to_next,
        )  # fmt: skip
    console.print(table)
    console.print(f"schedule {found.pipeline}; bubble {found.bubble:.0%}; bottleneck: {found.bottleneck}")
    console.print(f"critical path: {found.critical_path}")
    if found.sync_s:
        console.print(f"exchange of tied gradients: {format_seconds(found.sync_s)} of each step")
    for name, value in found.others.items():
        console.print(f"  {name}: {_other(value, found.step_s)}")
    for left in found.left_out:
        console.print(f"left out: {left.count} x {left.device or 'node'} in {left.fence or 'no fence'}: {left.reason}")
    if found.coded is not None:
        _print_codecs(console, found.coded, found.step_s)
    for one in found.advice:
        console.print(
            f"would help: {one.change}: {one.speedup:.2f} x the rows per second, {format_seconds(one.step_s)} a step"
        )


def _print_codecs(console: Console, coded: CodedReport, step_s: float) -> None:
    gain = f"{format_seconds(coded.step_s)} a step, {step_s / coded.step_s:.2f} x as fast"
    console.print(f"with codecs by the rule {coded.rule}: {gain}")
    for a, b, (out, back) in zip(coded.nodes, coded.nodes[1:], coded.codecs):
        console.print(f"  {a} to {b}: {out} forward, {back} backward")


def _other(value: Any, step_s: float) -> str:
    if isinstance(value, str):
        return f"no plan: {value}"
    ratio = value / step_s
    words = f"{ratio:.2f} x faster" if ratio >= 1 else f"{1 / ratio:.2f} x slower"
    return f"{format_seconds(value)}, ours is {words}"


def format_seconds(value: float) -> str:
    """``83.1 ms`` or ``2.5 s``."""
    return f"{value * 1e3:.1f} ms" if value < 0.1 else format_duration(value)
