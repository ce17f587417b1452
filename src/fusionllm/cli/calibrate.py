"""`fusionllm calibrate`: what this machine really does, as a device that cluster files can name.

The command; `compute.calibrate` measures and `sim.devices` writes, imported when they are needed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from fusionllm.errors import UserError


def calibrate(
    name: Annotated[str, typer.Option(help="What nodes will call it; default: what the device calls itself.")] = "",
    backend: Annotated[str, typer.Option(help="Framework to compute with: auto, torch, jax or tinygrad.")] = "auto",
    device: Annotated[str, typer.Option(help="What to measure: auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    append: Annotated[
        Path | None,
        typer.Option(metavar="CLUSTER.toml", help="A cluster file to write it into.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the device as JSON.")] = False,
) -> None:
    """Measure this machine for some seconds; prints a [[device]] for a cluster file, whose nodes then name it.

    Examples:

      fusionllm calibrate --name desk --append my.toml

      fusionllm calibrate --device cuda:1 --json
    """
    from fusionllm.cli.main import _guard

    def work() -> None:
        import msgspec

        from fusionllm.compute import calibrate as measure
        from fusionllm.compute import choose_backend, warm_up
        from fusionllm.node.options import PASSIVE_WAITS
        from fusionllm.sim.cluster import append_device, check_name, load_cluster
        from fusionllm.sim.devices import device_block, measured_device

        for key, value in PASSIVE_WAITS.items():
            os.environ.setdefault(key, value)
        if name:
            check_name(name, "a device")
        if append is not None and name in {known.name for known in load_cluster(append).device}:
            raise UserError(f"{append} has a device {name!r} already; take another --name, or take that one out")
        framework = choose_backend(backend)
        ready = warm_up(framework, device)
        precisions: list[str] = [name for name in ("float32", "bfloat16") if name in ready.dtypes]
        profiles = {precision: measure(framework, ready.device, precision) for precision in precisions}
        own = re.sub(r"[^\w.+ -]+", "", profiles["float32"].device).strip()[:64]
        measured = measured_device(name or own, profiles)
        if append is not None:
            append_device(append, measured)
        typer.echo(json.dumps(msgspec.to_builtins(measured)) if as_json else device_block(measured), nl=as_json)

    _guard(work)
