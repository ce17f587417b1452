"""The embedded default: a broker in a thread and N node processes on this machine. Same code, same sockets.

A node process dies with its owner whatever happens to that: its standard input is a pipe from here and it ends when
that pipe does, which the kernel sees to, after kill -9 too.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fusionllm.api.loop import LoopThread
from fusionllm.broker import Broker
from fusionllm.capture.options import ModelConfig
from fusionllm.errors import FusionError
from fusionllm.node.options import CAN_FORK, PASSIVE_WAITS, Ended, NodeConfig, Nursling
from fusionllm.protocol.messages import Ticket

log = logging.getLogger(__name__)


class LocalCluster:
    """A broker and node processes, from ``start`` to ``close``.

    Args:
        fences: fence of each node.
        log_folder: where each node's log goes, ``node0.log`` and so on; what happens before there is one to
            ``nodes.log``.
        model: its nodes read weights and execute operators as its owner, whose processes they are, says here.
    """

    def __init__(
        self, fences: Sequence[str], log_folder: Path, threads: int, device: str, model: ModelConfig = ModelConfig()
    ) -> None:
        self._fences, self._log_folder, self._threads, self._device = fences, log_folder, threads, device
        self._model = model
        self._nurseries: list[subprocess.Popen[bytes]] = []
        self._loop = LoopThread("broker")
        self._broker = Broker()

    def start(self) -> Ticket:
        """Start everything; returns at once with the ticket, nodes join as they come up."""
        self._loop.start()
        ticket = self._loop.submit(self._broker.start()).result(30)
        self._log_folder.mkdir(parents=True, exist_ok=True)
        nurslings = [self._nursling(index, fence, ticket) for index, fence in enumerate(self._fences)]
        for group in [nurslings] if CAN_FORK else [[one] for one in nurslings]:
            self._nurseries.append(self._start_nursery(group))
        return ticket

    def _nursling(self, index: int, fence: str, ticket: Ticket) -> Nursling:
        name = f"node{index}"
        config = NodeConfig(
            ticket=ticket, name=name, fence=fence, host="127.0.0.1", device=self._device,
            weights_from=self._model.mirrors, allow_ops=self._model.allow_ops, imports=self._model.imports,
        )  # fmt: skip
        return Nursling(config, str(self._log_folder / f"{name}.log"))

    def _start_nursery(self, nurslings: Sequence[Nursling]) -> subprocess.Popen[bytes]:
        threads = str(self._threads)
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        with (self._log_folder / "nodes.log").open("ab") as log_file:
            nursery = subprocess.Popen(
                [sys.executable, "-m", "fusionllm.node.nursery"],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env={**PASSIVE_WAITS, **os.environ, **dict.fromkeys(names, threads)},
                start_new_session=True,  # Ctrl-C goes to the owner alone, which stops in order
            )
        assert nursery.stdin is not None
        with suppress(BrokenPipeError):  # it is gone already: `check` says why
            nursery.stdin.write(msgspec.json.encode(nurslings) + b"\n")
            nursery.stdin.flush()
        return nursery

    def check(self) -> None:
        """Raises FusionError when a node process has died."""
        if all(nursery.poll() is None for nursery in self._nurseries):
            return
        last = _last_line(self._log_folder / "nodes.log")
        try:
            ended = msgspec.json.decode(last, type=Ended)
        except msgspec.MsgspecError:
            raise FusionError(f"the nodes could not be started; the log ends with: {last[:400]}") from None
        last = _last_line(self._log_folder / f"{ended.name}.log")
        raise FusionError(f"{ended.name} {_end_of(ended.code)}; its log ends with: {last[:400]}")

    def close(self) -> None:
        """Stop all of it, the hard way after five seconds."""
        for nursery in self._nurseries:
            if nursery.stdin is not None:
                with suppress(BrokenPipeError):
                    nursery.stdin.close()
        for nursery in self._nurseries:
            try:
                nursery.wait(5)
            except subprocess.TimeoutExpired:
                nursery.kill()
                nursery.wait()
        try:
            self._loop.submit(self._broker.close()).result(5)
        except Exception as error:
            log.debug("closing the broker: %s", error)
        self._loop.close()


def _last_line(path: Path) -> str:
    with suppress(FileNotFoundError):
        lines = path.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "nothing at all"


def _end_of(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
