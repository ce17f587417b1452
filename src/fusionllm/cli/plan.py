"""`fusionllm plan`: who would run what on a cluster, how long a step takes, and what would change it.

The command; `cli.show_plan` does the work and is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import typer

from fusionllm.errors import UserError, known_names
from fusionllm.estimate.memory import OPTIMIZER_COPIES
from fusionllm.schedule.pipeline import PIPELINES, SIMULATED, check_pipeline

PRECISIONS = ("bfloat16", "float32")
DEVICE_MODELS = ("rates", "lambda")

# what a step is, where a run does not say it
MicrobatchSize = Annotated[
    int | None, typer.Option(min=1, max=1 << 20, help="Rows of a microbatch; default: the run's, else 1.")
]
NumMicrobatches = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Microbatches of a step; default: the run's, else 16.")
]
Pipeline = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join((*PIPELINES, *SIMULATED))}; default: the run's, else 1f1b-ahead."),
]
Precision = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(PRECISIONS)}; default: the run's, else bfloat16.")
]
Optimizer = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(OPTIMIZER_COPIES)}; default: the run's, else adamw.")
]


def check_words(given: Iterable[tuple[str, str, Collection[str]]]) -> None:
    """Flags, what they were given, what is known. Raises UserError."""
    for name, word, known in given:
        if word not in known:
            raise UserError(f"{name} is {word!r}; {known_names(word, known)}")


def plan(
    graph_or_run: Annotated[
        Path,
        typer.Argument(
            metavar="GRAPH|RUN.toml",
            help="A captured graph (opdag JSON or text, or a folder with graph.json), or a run's configuration.",
            show_default=False,
        ),
    ],
    cluster: Annotated[Path, typer.Option(metavar="CLUSTER.toml", help="The machines.", show_default=False)],
    microbatch_size: MicrobatchSize = None,
    num_microbatches: NumMicrobatches = None,
    pipeline: Pipeline = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    device_model: Annotated[str, typer.Option(help="rates per kind of operator, or the paper's lambda.")] = "rates",
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="A change: 'link a-b=1Gbps', 'add 2x RTX 4090 in fence home', 'without home'."),
    ] = None,
    codecs: Annotated[
        str, typer.Option(metavar="RULE", help="Plan with codecs too: deadline, uniform-topk or adatopk-paper.")
    ] = "",
    ratio: Annotated[float, typer.Option(help="Of the rules for Top-K.")] = 100.0,
    advice: Annotated[bool, typer.Option(help="Plan again under single changes and say which help most.")] = True,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the step and the cluster.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plans as JSON.")] = False,
) -> None:
    """Plan a model on a cluster, predicted from rates: stages, step time against the baselines, who is left out.

    Examples:

      fusionllm graph gpt2 --text > gpt2.opdag && fusionllm plan gpt2.opdag --cluster examples/clusters/one-lab.toml

      fusionllm plan gpt2.opdag --cluster my.toml --what-if "link home-lab=1Gbps" --what-if "without home"
    """
    from fusionllm.cli.main import _guard

    def work() -> None:
        from fusionllm.cli.show_plan import Output, read_graph, show_plan, step_options
        from fusionllm.sim.cluster import load_cluster
        from fusionllm.sim.codecs import check_rule
        from fusionllm.sim.what_if import change

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
        check_rule(codecs, ratio)
        if svg is not None and (svg.suffix.lower() != ".svg" or not svg.parent.is_dir()):
            raise UserError(f"--svg is {svg}; give a file that ends in .svg, in a folder that is there")
        specs = {"": spec, **{text: change(spec, text) for text in what_if or ()}}
        show_plan(read_graph(graph_or_run), specs, options, device_model, Output(as_json, svg, advice, codecs, ratio))

    _guard(work)
