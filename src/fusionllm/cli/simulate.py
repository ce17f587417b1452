"""`fusionllm simulate`: many steps of a plan in a world with jitter, drift and nodes that leave, under a virtual clock.

The command; `sim.campaign` does the work and is imported when it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fusionllm.cli.plan import (
    DEVICE_MODELS,
    PRECISIONS,
    MicrobatchSize,
    NumMicrobatches,
    Optimizer,
    Pipeline,
    Precision,
    check_words,
)
from fusionllm.estimate.memory import OPTIMIZER_COPIES
from fusionllm.schedule.pipeline import check_pipeline

if TYPE_CHECKING:
    from fusionllm.sim.campaign import Campaign

#: Happenings shown to people, the first and the last ones.
SHOWN = 20


def simulate(
    graph_or_run: Annotated[
        Path,
        typer.Argument(
            metavar="GRAPH|RUN.toml", help="A captured graph, or a run's configuration.", show_default=False
        ),
    ],
    cluster: Annotated[Path, typer.Option(metavar="CLUSTER.toml", help="The machines.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Steps to simulate.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Everything random is a function of it.")] = 0,
    jitter: Annotated[float, typer.Option(help="Of every computation and transfer; 0.05 is about 5 %.")] = 0.05,
    drift: Annotated[float, typer.Option(help="Of rates between sites; speeds of nodes drift half as much.")] = 0.2,
    drift_time: Annotated[str, typer.Option(help="What drift forgets over.")] = "10 min",
    loss_every: Annotated[str, typer.Option(help="Mean virtual time until a node is lost; 0: never.")] = "0",
    back: Annotated[str, typer.Option(help="Mean time until a lost node is back; 0: never.")] = "10 min",
    detect: Annotated[str, typer.Option(help="From a loss until the others know.")] = "10 s",
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps; a loss takes the job back to the last.")] = 50,
    replan_every: Annotated[
        int, typer.Option(min=0, help="Steps after which a new plan is tried; 0: after losses.")
    ] = 0,
    microbatch_size: MicrobatchSize = None,
    num_microbatches: NumMicrobatches = None,
    pipeline: Pipeline = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    device_model: Annotated[str, typer.Option(help="rates per kind of operator, or the paper's lambda.")] = "rates",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Simulate many steps of a plan: how much slower than planned, and what losses of nodes cost.

    Examples:

      fusionllm simulate gpt2.opdag --cluster examples/clusters/two-universities.toml --steps 500 --seed 1

      fusionllm simulate gpt2.opdag --cluster my.toml --steps 2000 --loss-every "10 min" --back "1 min"
    """
    from fusionllm.cli.main import _guard

    def work() -> None:
        import json

        import msgspec

        from fusionllm.cli.show_plan import read_graph, step_options, warn_unmeasured
        from fusionllm.schedule.workload import build_workload
        from fusionllm.sim.campaign import simulate as run
        from fusionllm.sim.cluster import build_cluster, device_rates, load_cluster
        from fusionllm.sim.world import WorldOptions, check_world
        from fusionllm.units import parse_duration_s

        spec = load_cluster(cluster)
        options = step_options(
            graph_or_run, microbatch_size=microbatch_size, num_microbatches=num_microbatches, pipeline=pipeline,
            precision=precision, optimizer=optimizer,
        )  # fmt: skip
        check_words(
            (
                ("--precision", options.precision, PRECISIONS),
                ("--device-model", device_model, DEVICE_MODELS),
                ("--optimizer", options.optimizer, OPTIMIZER_COPIES),
            )
        )
        check_pipeline(options.pipeline)
        world = WorldOptions(
            jitter=jitter, drift=drift, drift_s=parse_duration_s(drift_time),
            loss_every_s=parse_duration_s(loss_every), back_s=parse_duration_s(back),
            detect_s=parse_duration_s(detect), checkpoint_every=checkpoint_every, replan_every=replan_every,
        )  # fmt: skip
        check_world(world)
        warn_unmeasured(spec, options.precision)
        workload = build_workload(read_graph(graph_or_run), options, device_rates(spec, options.precision))
        found = run(workload, build_cluster(spec, options.precision, device_model), steps, seed, world)
        if as_json:
            print(json.dumps({**msgspec.to_builtins(found), "slowdown": found.slowdown}))
        else:
            _print(found)

    _guard(work)


def _print(found: Campaign) -> None:
    from rich.console import Console

    from fusionllm.cli.show_plan import format_seconds
    from fusionllm.units import format_duration

    console = Console(highlight=False, soft_wrap=True)
    ordered = sorted(found.step_s)
    median, slow = (format_seconds(ordered[int(part * (len(ordered) - 1))]) for part in (0.5, 0.95))
    console.print(
        f"{len(ordered)} steps in {format_duration(found.clock_s)} of virtual time, {found.slowdown:.2f} times what "
        f"the first plan promised ({format_seconds(found.predicted_step_s)} a step)"
    )
    console.print(f"a step: median {median}, 95 % below {slow}")
    console.print(
        f"{found.losses} losses, {found.plans} plans, {found.redone} steps done again, "
        f"{format_duration(found.idle_s)} without progress"
    )
    shown = found.happenings
    if len(shown) > SHOWN:
        shown = (*shown[: SHOWN // 2], *shown[-SHOWN // 2 :])
        console.print(f"{len(found.happenings)} happenings, the first and last {SHOWN // 2}:")
    for one in shown:
        console.print(f"  {format_duration(one.clock_s)} step {one.step}: {one.what}")
