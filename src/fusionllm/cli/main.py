"""The command line: `fusionllm train | broker | join | graph | calibrate | plan | simulate | export | testbed`.

The roof: parses, calls the api, prints.

Heavy imports happen inside the commands, so that `--help` and `--version` answer at once and broker needs no torch.
Exit codes: 0 done, 1 the run failed, 2 something given was wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fusionllm import __version__
from fusionllm.cli import testbed
from fusionllm.cli.calibrate import calibrate
from fusionllm.cli.plan import plan
from fusionllm.cli.simulate import simulate
from fusionllm.errors import FusionError

app = typer.Typer(
    name="fusionllm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train any PyTorch model across scattered, unequal machines joined by slow links.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"fusionllm {__version__}")
        raise typer.Exit


app.command()(plan)
app.command()(simulate)
app.command()(calibrate)
app.add_typer(testbed.app, name="testbed")


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train any PyTorch model across scattered, unequal machines joined by slow links."""


@app.command()
def train(
    run_toml: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's configuration.", show_default=False)],
    nodes: Annotated[int | None, typer.Option(help="Stages, one per node; as cluster.nodes.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; as run.name.")] = None,
    broker: Annotated[str | None, typer.Option(help="Join ticket of a broker; none: nodes on this machine.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint of the run.")] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the TOML.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines, the summary last.")] = False,
) -> None:
    """Train a model as RUN.toml says; results go to runs/NAME.

    Examples:

      fusionllm train examples/quickstart.toml

      fusionllm train my.toml --nodes 4 --set train.steps=200 --set optimizer.lr=1e-3

      fusionllm train my.toml --broker fusion1:HOST:PORT:...:...
    """
    overrides = list(sets or [])
    for key, value in (("cluster.nodes", nodes), ("run.name", name), ("cluster.broker", broker)):
        if value is not None:
            overrides.append(f"{key}={json.dumps(value)}")
    if resume:
        overrides.append("run.resume=true")

    def work() -> None:
        from fusionllm.api import load_config
        from fusionllm.api import train as train_verb
        from fusionllm.cli.progress import JsonReporter, LiveReporter
        from fusionllm.telemetry.log import configure_logging

        config = load_config(run_toml, overrides)
        configure_logging("owner", "warning")
        starting = "capturing the model" if config.cluster.broker else "starting nodes, capturing the model"
        with JsonReporter() if as_json else LiveReporter(config.train.steps, starting) as reporter:
            result = train_verb(config=run_toml, overrides=tuple(overrides), progress=reporter)
        reporter.finish(result)
        if result.stopped_early:
            raise typer.Exit(130)

    _guard(work)


@app.command()
def broker(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 7654,
    advertise: Annotated[str | None, typer.Option(help="Host name written into the ticket.")] = None,
    token_hours: Annotated[float, typer.Option(help="Hours for which the join ticket is good.")] = 24.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ticket as JSON.")] = False,
) -> None:
    """Run a broker; prints the join ticket that nodes and owners use. Needs no torch.

    Example:

      fusionllm broker --advertise my.host.org
    """

    def work() -> None:
        import asyncio
        import socket

        from fusionllm.broker import Broker
        from fusionllm.errors import UserError
        from fusionllm.protocol.messages import HOST
        from fusionllm.telemetry.log import configure_logging

        configure_logging("broker")
        if not 0 < token_hours <= 24 * 365:
            raise UserError(f"--token-hours is {token_hours}; it must lie above 0 and be at most a year")
        shown = advertise or (host if host not in ("0.0.0.0", "::") else socket.gethostname())

        if HOST.fullmatch(shown) is None:
            raise UserError(f"host {shown!r} cannot stand in a ticket; give a host name or address with --advertise")

        async def serve() -> None:
            server = Broker(host, port, advertise=shown, token_hours=token_hours)
            ticket = await server.start()
            line = json.dumps({"ticket": str(ticket)}) if as_json else f"fusionllm join {ticket}"
            print(line, flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                await server.close()

        asyncio.run(serve())

    _guard(work)


@app.command()
def join(
    ticket: Annotated[
        str,
        typer.Argument(
            help="The ticket that `fusionllm broker` printed.", envvar="FUSIONLLM_TICKET", show_default=False
        ),
    ],
    name: Annotated[str, typer.Option(help="Name of this machine; default: host name and a random part.")] = "",
    fence: Annotated[str, typer.Option(help="Name of the site, for nodes that are near each other.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on for tensors.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on for tensors; 0 for any.")] = 0,
    advertise: Annotated[str, typer.Option(help="Host name others reach this machine under.")] = "",
    backend: Annotated[str, typer.Option(help="Framework to compute with: auto, torch, jax or tinygrad.")] = "auto",
    device: Annotated[
        str, typer.Option(help="What to compute on: auto, cpu, cuda, cuda:1, mps, xpu; jax: cpu, gpu, tpu.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Threads that may compute on a CPU; 0: one per core.")] = 0,
    weights_from: Annotated[
        list[str] | None,
        typer.Option(
            "--weights-from", metavar="PLACE", help="A folder of safetensors, or an address to read weights under."
        ),
    ] = None,
    allow_op: Annotated[
        list[str] | None,
        typer.Option("--allow-op", metavar="NAME", help="An operator of yours to execute: mylib.scan.default."),
    ] = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", metavar="MODULE", help="The Python module that registers it.")
    ] = None,
) -> None:
    """Lend this machine: run stages for the broker of TICKET until Ctrl-C. Only listed operators are executed.

    Examples:

      fusionllm join fusion1:HOST:PORT:FINGERPRINT:TOKEN --fence lab1 --device cuda:0

      fusionllm join fusion1:HOST:PORT:FINGERPRINT:TOKEN --weights-from https://huggingface.co

      fusionllm join fusion1:HOST:PORT:FINGERPRINT:TOKEN --import mylib --allow-op mylib.scan.default
    """

    def work() -> None:
        from fusionllm.node.options import PASSIVE_WAITS, NodeConfig
        from fusionllm.protocol.messages import parse_ticket
        from fusionllm.telemetry.log import configure_logging

        for key, value in PASSIVE_WAITS.items():
            os.environ.setdefault(key, value)
        config = NodeConfig(
            ticket=parse_ticket(ticket),
            name=name,
            fence=fence,
            host=host,
            port=port,
            advertise=advertise,
            backend=backend,
            device=device,
            threads=threads,
            weights_from=tuple(weights_from or ()),
            allow_ops=tuple(allow_op or ()),
            imports=tuple(imports or ()),
        )
        from fusionllm.node.agent import NodeAgent  # the ticket is read: now for the framework
        from fusionllm.node.loop import run_loop

        agent = NodeAgent(config)
        configure_logging(agent.name)
        run_loop(agent.run())

    _guard(work)


@app.command()
def graph(
    model: Annotated[
        str,
        typer.Argument(
            help="gpt2, llama, a Hugging Face folder or config.json, or python:module:function, or a run's TOML."
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, max=1 << 20, help="Rows, for bytes and FLOPs.")] = 1,
    seq_len: Annotated[int, typer.Option(min=2, max=1 << 20, help="Tokens per row, for language models.")] = 128,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of the model's config.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    dot: Annotated[bool, typer.Option("--dot", help="Print the graph in Graphviz's language.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Print the graph in its own text form.")] = False,
) -> None:
    """Show a model as an OP-DAG: operators, parameters, FLOPs, and what would cross at the best cuts.

    Examples:

      fusionllm graph gpt2 --set n_layer=4

      fusionllm graph examples/quickstart.toml --dot | dot -Tsvg > graph.svg
    """

    def work() -> None:
        from fusionllm.cli.graph import show_graph

        show_graph(
            model, batch, seq_len, list(sets or []), "json" if as_json else "dot" if dot else "text" if text else ""
        )

    _guard(work)


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's folder, e.g. runs/quickstart.", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder to write.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default: the latest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a run's checkpoint as a Hugging Face folder that from_pretrained loads.

    Example:

      fusionllm export runs/quickstart my-model
    """

    def work() -> None:
        from fusionllm.api import export as export_verb
        from fusionllm.telemetry.log import configure_logging

        configure_logging("export", "warning")
        out = export_verb(run, folder, step=step)
        print(
            json.dumps({"folder": str(out)})
            if as_json
            else f"wrote {out}; load it with AutoModelForCausalLM.from_pretrained({str(out)!r})"
        )

    _guard(work)


def _guard(work: Callable[[], None]) -> None:
    """Run a command; errors of ours become one sentence and an exit code, Ctrl-C becomes 130."""
    try:
        work()
    except FusionError as error:
        _stop(str(error), error.exit_code)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(1) from None


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def main(argv: list[str] | None = None) -> Any:
    """Entry point."""
    return app(args=argv, prog_name="fusionllm")


if __name__ == "__main__":
    main()
