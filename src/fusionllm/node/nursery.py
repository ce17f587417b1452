"""Starts the nodes of one machine: loads the framework once, then forks a process for each.

Local runs only (`api.local`). Four nodes so take the time and the memory of one import. Where a loaded framework
cannot be forked safely (anything but Linux) each node gets a nursery of its own, which becomes the node. The nodes are
told to this process as one line on standard input; when that pipe ends, with its owner, whatever happened to it, all of
them end.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from fusionllm.errors import FusionError
from fusionllm.node.agent import NodeAgent
from fusionllm.node.loop import run_loop
from fusionllm.node.options import Ended, Nursling
from fusionllm.telemetry.log import configure_logging


def main() -> NoReturn:
    """Read the nodes, make them, wait for the first to end."""
    nurslings = msgspec.json.decode(_read_line(), type=list[Nursling])
    if len(nurslings) == 1:
        code = _live(nurslings[0])
        _report(nurslings[0].config.name, code)
    from fusionllm.compute import warm_up

    warm_up(nurslings[0].config.backend, "cpu")  # no other device: none survives a fork
    gc.collect()
    gc.freeze()  # what is loaded stays shared between the processes
    names = _fork_all(nurslings)
    _end_with_owner()
    pid, status = os.wait()
    _report(names[pid], os.waitstatus_to_exitcode(status))


def _fork_all(nurslings: Sequence[Nursling]) -> dict[int, str]:
    names: dict[int, str] = {}
    for nursling in nurslings:
        pid = os.fork()
        if pid == 0:
            os._exit(_live(nursling))
        names[pid] = nursling.config.name
    return names


def _live(nursling: Nursling) -> int:
    """Be the node. Returns its exit code."""
    log = os.open(nursling.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    output = os.dup(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _end_with_owner()
    try:
        configure_logging(nursling.config.name)
        run_loop(NodeAgent(nursling.config).run())
        code = 0
    except FusionError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os.dup2(output, 1)
    return code


def _report(name: str, code: int) -> NoReturn:
    os.write(1, msgspec.json.encode(Ended(name, code)) + b"\n")
    os._exit(1)  # at once: the owner waits for it to learn why


def _read_line() -> bytes:
    """One line of standard input, unbuffered: what follows is for whoever waits for its end."""
    line = b""
    while not line.endswith(b"\n"):
        got = os.read(0, 1 << 16)
        if not got:
            raise SystemExit(0)
        line += got
    return line


def _end_with_owner() -> None:
    """End this process as soon as its standard input ends, without another word."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(0)

    threading.Thread(target=watch, name="owner-pipe", daemon=True).start()


if __name__ == "__main__":
    main()
