"""What a node is told when it starts. Plain data: imports no framework."""

from __future__ import annotations

import sys

import msgspec

from fusionllm.protocol import messages as m

#: Whether one nursery can make many nodes here: a loaded framework survives a fork.
CAN_FORK = sys.platform == "linux"


#: Threads of a framework sleep while they wait for each other. By default they spin, and where others want the cores
#: too, be it a second node, every operator then takes its turn of all of them: 20 times slower, measured.
PASSIVE_WAITS = {"OMP_WAIT_POLICY": "PASSIVE"}


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a node joins.

    Attributes:
        host: where to listen for tensors. advertise: its name for others; empty: as the broker sees it.
        backend: a framework's name, or ``auto`` for the best that is installed.
        device: ``auto``, a kind such as ``cuda``, or one such as ``cuda:1``.
        threads: the most that may compute on a CPU; 0: as many as there are cores.
        weights_from: folders of safetensors, and addresses under which weights may be read; of no others.
        allow_ops: operators of libraries of its own that this machine executes, as ``mylib.scan.default``.
        imports: Python modules that register those.
    """

    ticket: m.Ticket
    name: str = ""
    fence: str = ""
    host: str = "0.0.0.0"
    port: int = 0
    advertise: str = ""
    backend: str = "auto"
    device: str = "auto"
    threads: int = 0
    weights_from: tuple[str, ...] = ()
    allow_ops: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


class Nursling(msgspec.Struct, frozen=True):
    """A node of this machine to be: how it joins, and the file its log goes to."""

    config: NodeConfig
    log: str


class Ended(msgspec.Struct, frozen=True):
    """The last line of a nursery: which node ended first, and its exit code, negative for a signal."""

    name: str
    code: int
