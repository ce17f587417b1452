"""`fusionllm testbed up | run | down`: a wide-area network on this machine, from a scenario file.

The sub-application; the room `testbed` does the work and is imported when it is needed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fusionllm.testbed import Testbed

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="A wide-area network on this machine, for measurements and tests. Needs root and Linux.",
)

ScenarioPath = Annotated[Path, typer.Argument(metavar="SCENARIO.toml", help="Hosts and links.", show_default=False)]
Name = Annotated[str, typer.Option(help="Of the testbed; default: the scenario's.")]


@app.command()
def up(
    scenario: ScenarioPath,
    name: Name = "",
    throttle: Annotated[bool, typer.Option("--throttle", help="Set the hosts' shares of a core at once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print hosts and addresses as JSON.")] = False,
) -> None:
    """Make the hosts and links of SCENARIO and leave them up.

    Example:

      fusionllm testbed up examples/scenarios/two-labs.toml
    """
    from fusionllm.cli.main import _guard

    def work() -> None:
        from fusionllm.cli.progress import program
        from fusionllm.testbed import Testbed, load_scenario

        spec = load_scenario(scenario)
        bed = Testbed(spec, name or spec.name, stay=True)
        bed.start()
        if throttle:
            try:
                bed.throttle()
            except BaseException:  # what was refused leaves nothing up
                bed.close()
                raise
        if as_json:
            print(json.dumps({"name": bed.name, "hosts": {host.name: bed.address(host.name) for host in spec.host}}))
            return
        for host in spec.host:
            share = f", {host.cpu:g} of a core{'' if throttle else ' with --throttle'}" * bool(host.cpu)
            print(f"{host.name:12} {bed.address(host.name):15} fence {host.fence}{share}")
        named = f" --name {name}" * bool(name)
        print(f"next: {program()} testbed run{named} {scenario} {spec.host[0].name} COMMAND")

    _guard(work)


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    scenario: ScenarioPath,
    host: Annotated[str, typer.Argument(help="Where to run it.", show_default=False)],
    name: Name = "",
) -> None:
    """Run a command on a host: all words after the host's name. Without a testbed that is up, make one for that time.

    Examples:

      fusionllm testbed run examples/scenarios/two-labs.toml a0 ip -brief address

      fusionllm testbed run --name mine examples/scenarios/two-labs.toml a0 fusionllm join TICKET --name a0
    """
    from fusionllm.cli.main import _guard

    def work() -> None:
        from fusionllm.errors import UserError

        if not context.args:
            raise UserError(f"no command to run on {host}; write it after the host's name, options before the scenario")
        bed, ours = _find(scenario, name)
        try:
            code = bed.popen(host, context.args).wait()
        finally:
            if ours:
                bed.close()
        raise typer.Exit(code if code >= 0 else 128 - code)

    _guard(work)


@app.command()
def down(scenario: ScenarioPath, name: Name = "") -> None:
    """Take the testbed of SCENARIO down, with every process on its hosts.

    Example:

      fusionllm testbed down examples/scenarios/two-labs.toml
    """
    from fusionllm.cli.main import _guard

    def work() -> None:
        from fusionllm.testbed import Testbed, load_scenario

        spec = load_scenario(scenario)
        Testbed.attach(spec, name or spec.name).close()

    _guard(work)


def _find(scenario: Path, name: str) -> tuple[Testbed, bool]:
    """The testbed that is up, or a new one; and whether it is ours to close."""
    from fusionllm.errors import UserError
    from fusionllm.testbed import Testbed, load_scenario

    spec = load_scenario(scenario)
    try:
        return Testbed.attach(spec, name or spec.name), False
    except UserError:
        bed = Testbed(spec, name or f"{spec.name[:14]}-{os.getpid()}")
    bed.start()
    return bed, True
