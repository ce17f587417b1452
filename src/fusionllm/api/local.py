"""The embedded default: a broker in a thread and N node processes on this machine. Same code, same sockets.

A node process dies with its parent whatever happens to it: its standard input is a pipe from here and it ends when
that pipe does, which the kernel sees to, after kill -9 too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fusionllm.api.loop import LoopThread
from fusionllm.broker import Broker
from fusionllm.errors import FusionError
from fusionllm.protocol.messages import Ticket

log = logging.getLogger(__name__)
TICKET_VARIABLE = "FUSIONLLM_TICKET"


class LocalCluster:
    """A broker and node processes, from ``start`` to ``close``.

    Args:
        fences: fence of each node.
        log_folder: where each node's log goes, ``node0.log`` and so on.
    """

    def __init__(self, fences: Sequence[str], log_folder: Path, threads: int, device: str) -> None:
        self._fences, self._log_folder, self._threads, self._device = fences, log_folder, threads, device
        self._processes: list[subprocess.Popen[bytes]] = []
        self._loop = LoopThread("broker")
        self._broker = Broker()
        self._starting: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self) -> Ticket:
        """Start everything; returns at once with the ticket, nodes join as they come up."""
        self._loop.start()
        ticket = self._loop.submit(self._broker.start()).result(30)
        self._log_folder.mkdir(parents=True, exist_ok=True)
        self._starting = self._loop.submit(self._start_nodes(ticket))
        return ticket

    async def _start_nodes(self, ticket: Ticket) -> None:
        """A few at a time: they all load the same libraries, and one core is the owner's, who captures meanwhile."""
        at_once = max(1, (os.cpu_count() or 1) - 1)
        for index, fence in enumerate(self._fences):
            while index - self._broker.num_nodes >= at_once:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            self._processes.append(self._start_node(index, fence, ticket))

    def _start_node(self, index: int, fence: str, ticket: Ticket) -> subprocess.Popen[bytes]:
        threads = str(self._threads)
        environment = {
            **os.environ, TICKET_VARIABLE: str(ticket), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "fusionllm.cli.main", "join", "--parent-pipe",
            "--name", f"node{index}", "--fence", fence, "--host", "127.0.0.1", "--device", self._device,
        ]  # fmt: skip
        with (self._log_folder / f"node{index}.log").open("ab") as log_file:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the owner alone, which stops in order
            )

    def check(self) -> None:
        """Raises FusionError when a node process has died."""
        if self._starting.done():
            self._starting.result()
        for index, process in enumerate(self._processes):
            if (code := process.poll()) is not None:
                path = self._log_folder / f"node{index}.log"
                lines = path.read_text(errors="replace").strip().splitlines()
                last = lines[-1] if lines else "nothing at all"
                raise FusionError(f"node{index} {_end_of(code)}; its log ends with: {last[:400]}")

    def close(self) -> None:
        """Stop all of it, the hard way after five seconds."""
        if self._loop.running:
            self._starting.cancel()
            self._loop.submit(asyncio.sleep(0)).result(5)  # the loop has seen it: no process is added any more
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        try:
            self._loop.submit(self._broker.close()).result(5)
        except Exception as error:
            log.debug("closing the broker: %s", error)
        self._loop.close()


def _end_of(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
