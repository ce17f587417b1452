"""The wide-area network: one process that holds a TUN of every host and carries each packet through its pipes.

Run as ``python -m fusionllm.testbed.emulator FOLDER`` with ``FOLDER/network.json``. It answers on ``FOLDER/control``,
one JSON line per connection. When its standard input ends, because whoever started it is gone, or at SIGTERM, it takes
the whole testbed down: processes in the namespaces, namespaces, control groups.

No bridge, no veth, no tc: the TUN devices let the kernel hand over whole TCP segments (IFF_VNET_HDR), so that a
gigabit costs a fifth of a core.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fusionllm.errors import UserError
from fusionllm.testbed import namespaces
from fusionllm.testbed.cgroups import EMULATOR
from fusionllm.testbed.nat import Nat
from fusionllm.testbed.network import HostAddress, Network
from fusionllm.testbed.pipe import VNET_BYTES, Pipe, PipeSpec, charged_bytes

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04 | 0x20 | 0x40  # checksum, TCP over IPv4 and IPv6, UDP over IPv4 and IPv6
_CLONE_NEWNET = 0x40000000
_MAX_PACKET_BYTES = 70_000
_BURST = 32  # packets read from one host before the others have their turn
_GRAIN_S = 30e-6
_CONTROL_S = 1.0
_NICENESS = -15  # a late emulator would be a slow network
DEVICE = "wan0"


def open_tun(namespace: str, offload: bool) -> int:
    """A TUN named wan0 in a namespace; returns its descriptor. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    other = os.open(f"{namespaces.FOLDER}/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(other, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", VNET_BYTES))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS if offload else 0)
        return fd
    finally:
        libc.setns(own, _CLONE_NEWNET)
        os.close(own)
        os.close(other)


class Emulator:
    """Carries packets between the hosts of a network until told to stop."""

    def __init__(self, network: Network, control: socket.socket, stdin: int | None) -> None:
        self._pipes = {name: Pipe(spec) for name, spec in network.pipes.items()}
        self._control, self._stdin = control, stdin
        self._stopping = False
        self._fds: dict[int, HostAddress] = {}
        self._nats: dict[int, Nat] = {}
        self._targets: dict[tuple[int, bytes], tuple[int, Sequence[Pipe]]] = {}
        fds = {host.name: open_tun(host.namespace, network.offload) for host in network.hosts}
        for source in network.hosts:
            self._fds[fds[source.name]] = source
            if source.nat:
                self._nats[fds[source.name]] = Nat(source.nat, random.random)
            for target in network.hosts:
                if source != target:
                    route = [self._pipes[name] for name in network.route(source, target)]
                    key = fds[source.name], socket.inet_aton(target.address)
                    self._targets[key] = fds[target.name], route
        # (time, number, target, pipes still ahead, packet, charged bytes)
        self._heap: list[tuple[float, int, int, Sequence[Pipe], bytes, int]] = []
        self._number = 0

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> None:
        watched = [*self._fds, self._control.fileno(), *([self._stdin] if self._stdin is not None else [])]
        while not self._stopping:
            timeout = max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else 1.0
            for fd in select.select(watched, [], [], timeout)[0]:
                if fd in self._fds:
                    self._read(fd)
                elif fd == self._stdin:
                    self._stopping = not os.read(fd, 4096)
                else:
                    self._answer()
            self._deliver(time.monotonic() + _GRAIN_S)

    def _read(self, fd: int) -> None:
        for _ in range(_BURST):
            try:
                packet = os.read(fd, _MAX_PACKET_BYTES)
            except OSError:  # nothing more; or the host's device is down
                return
            if packet[VNET_BYTES] >> 4 != 4:
                continue
            found = self._targets.get((fd, packet[VNET_BYTES + 16 : VNET_BYTES + 20]))
            if found is not None:
                if fd in self._nats:
                    packet = self._nats[fd].outbound(packet)
                self._pass(time.monotonic(), found[0], found[1], packet, charged_bytes(packet))

    def _pass(self, now_s: float, target: int, pipes: Sequence[Pipe], packet: bytes, num_bytes: int) -> None:
        """Into the first of ``pipes``; what comes out goes on at its own time, so that pipes serve in order."""
        if pipes:
            arrival_s = pipes[0].admit(now_s, num_bytes, random.random())
            if arrival_s is None:
                return
            now_s = arrival_s
        self._number += 1
        heapq.heappush(self._heap, (now_s, self._number, target, pipes[1:], packet, num_bytes))

    def _deliver(self, now_s: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            at_s, _, target, pipes, packet, num_bytes = heapq.heappop(heap)
            if pipes:
                self._pass(at_s, target, pipes, packet, num_bytes)
                continue
            if target in self._nats:
                known = self._nats[target].inbound(packet)
                if known is None:
                    continue
                packet = known
            with contextlib.suppress(OSError):  # the host's device is down
                os.write(target, packet)

    # control

    def _answer(self) -> None:
        connection, _ = self._control.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_CONTROL_S)
            with connection.makefile("rb") as lines:
                answer = self._handle(lines.readline(1 << 20))
            connection.sendall(msgspec.json.encode(answer) + b"\n")

    def _handle(self, line: bytes) -> dict[str, Any]:
        try:
            request = msgspec.json.decode(line, type=dict[str, PipeSpec])
        except msgspec.DecodeError as error:
            return {"error": f"not a request: {error}"}
        if unknown := [name for name in request if name not in self._pipes]:
            return {"error": f"no pipe {unknown[0][:80]!r}"}
        for name, spec in request.items():
            self._pipes[name].change(spec)
        return {"pipes": {name: pipe.spec for name, pipe in self._pipes.items()}, "stats": self._counters()}

    def _counters(self) -> dict[str, Any]:
        stats = {name: pipe.stats for name, pipe in self._pipes.items()}
        return {name: counted for name, counted in stats.items() if counted.num_packets or counted.num_dropped}


def main(argv: Sequence[str]) -> int:
    """``FOLDER [--stay]``: with --stay the end of standard input means nothing."""
    folder = Path(argv[0])
    state = namespaces.read_state(folder)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for group in state.groups:
            if Path(group).name == EMULATOR:
                Path(group, "cgroup.procs").write_text(str(os.getpid()))
        control.bind(str(folder / "control"))
        control.listen(8)
        emulator = Emulator(state.network, control, None if "--stay" in argv else 0)
    except OSError as error:
        print(json.dumps({"error": f"cannot open the testbed's devices: {error}"}), flush=True)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: emulator.stop())
    print("{}", flush=True)
    try:
        emulator.run()
    finally:
        with contextlib.suppress(UserError):
            namespaces.remove(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
