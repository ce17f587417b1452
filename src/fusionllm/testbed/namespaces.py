"""Network namespaces of a testbed, and the record of what was made, from which it is removed whatever happened.

The record lies in ``/run/fusionllm-testbed/NAME/state.json`` and is written before anything is made. Removing kills the
processes in the namespaces, then deletes these and the control groups.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fusionllm.errors import UserError
from fusionllm.testbed.cgroups import remove_groups
from fusionllm.testbed.network import Network

FOLDER = "/run/netns"  # where ip(8) keeps them
BEDS = Path("/run/fusionllm-testbed")
_IP_S = 20.0
_MAKING_S = 60.0
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


class Process(msgspec.Struct, frozen=True):
    """A process that cannot be mistaken for a later one with its id: ``start`` is in ticks since boot."""

    pid: int
    start: int

    @property
    def alive(self) -> bool:
        return _start_of(self.pid) == self.start


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to a testbed. ``maker``: who is making it; ``emulator``: the process that carries its packets."""

    network: Network
    groups: list[str]
    maker: Process
    emulator: Process | None = None


def process(pid: int) -> Process:
    return Process(pid, _start_of(pid))


def _start_of(pid: int) -> int:
    """0 for no such process, or one that has ended and only waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def ip(*words: str) -> str:
    """Run ip(8). Raises UserError with what it said."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=_IP_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot run ip {' '.join(words)}: {error}; install iproute2") from None
    if done.returncode:
        raise UserError(f"ip {' '.join(words)}: {done.stderr.strip()}; are you root?")
    return done.stdout


def write_state(folder: Path, state: State) -> None:
    part = folder / "state.part"
    part.write_bytes(msgspec.json.encode(state))
    part.replace(folder / "state.json")


def read_state(folder: Path) -> State:
    """Raises UserError when there is none."""
    try:
        return msgspec.json.decode((folder / "state.json").read_bytes(), type=State)
    except OSError:
        raise UserError(f"no testbed {folder.name!r} is up") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{folder}/state.json is not a testbed's: {error}") from None


def create(network: Network) -> None:
    """Make the namespaces, each with its loopback up."""
    for host in network.hosts:
        ip("netns", "add", host.namespace)
        ip("-n", host.namespace, "link", "set", "lo", "up")


def connect(network: Network, device: str, congestion: str, buffer_bytes: int) -> None:
    """Give the hosts' devices addresses, and TCP its buffers and congestion control; all read back.

    A namespace inherits its congestion control from nobody that can be relied on, and setting one that the machine
    does not allow fails without a trace; so it is allowed for as long as that takes.
    """
    with _allowed(congestion):
        for host in network.hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/16", "dev", device)
            ip("-n", host.namespace, "link", "set", device, "up")
            for name, value in (
                ("tcp_congestion_control", congestion),
                ("tcp_wmem", f"4096 131072 {buffer_bytes}"),
                ("tcp_rmem", f"4096 131072 {buffer_bytes}"),
            ):
                _sysctl(host.namespace, name, value)


def _sysctl(namespace: str, name: str, value: str) -> None:
    path = f"/proc/sys/net/ipv4/{name}"
    script = 'printf %s "$2" > "$1"; cat "$1"'
    seen = ip("netns", "exec", namespace, "sh", "-c", script, "sh", path, value).split()
    if seen != value.split():
        raise UserError(f"{name} of {namespace} is {' '.join(seen)!r}, not {value!r}: the kernel did not take it")


@contextlib.contextmanager
def _allowed(congestion: str) -> Iterator[None]:
    """Let namespaces choose a congestion control, then put things back; one testbed at a time."""
    if congestion not in _AVAILABLE.read_text().split():
        raise UserError(
            f"this kernel has no congestion control {congestion!r}; it has {_AVAILABLE.read_text().strip()}"
        )
    with (BEDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _ALLOWED.read_text()
        if congestion not in before.split():
            _ALLOWED.write_text(f"{before.strip()} {congestion}")
        try:
            yield
        finally:
            _ALLOWED.write_text(before)


def remove(folder: Path) -> None:
    """Take a testbed down: its processes, namespaces, control groups, record. What is gone already is fine."""
    state = read_state(folder)
    for host in state.network.hosts:
        with contextlib.suppress(UserError):
            for pid in map(int, ip("netns", "pids", host.namespace).split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    remove_groups(state.groups)
    for host in state.network.hosts:
        if Path(FOLDER, host.namespace).exists():
            with contextlib.suppress(UserError):
                ip("netns", "del", host.namespace)
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> list[str]:
    """Take down testbeds whose maker and emulator are both gone. Returns their names."""
    gone = []
    for folder in sorted(BEDS.glob("*/")):
        try:
            state = read_state(folder)
            if state.maker.alive or (state.emulator and state.emulator.alive):
                continue
            remove(folder)
        except UserError:  # being made, or being removed by another, right now; an old one was left so by a crash
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > _MAKING_S:
                    shutil.rmtree(folder)
            continue
        gone.append(folder.name)
    return gone
