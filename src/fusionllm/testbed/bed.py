"""A testbed: a wide-area network on this machine, with hosts that run real programs over real sockets.

    with Testbed(load_scenario(path)) as bed:
        server = bed.popen("a0", ["python", "server.py"])
        bed.set_link("a0", "b0", rate_bytes_per_s=1e6, delay_s=0.025)

It is taken down when the block ends; after a crash of this process by the emulator, and after one of that at the next
start of any testbed. Needs root and /dev/net/tun; `why_unavailable` says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from fusionllm.errors import UserError, known_names
from fusionllm.testbed import namespaces
from fusionllm.testbed.cgroups import Groups
from fusionllm.testbed.emulator import DEVICE
from fusionllm.testbed.network import Network, build_network, paced_settings
from fusionllm.testbed.pipe import PipeSpec, PipeStats
from fusionllm.testbed.scenario import NAME, Scenario
from fusionllm.units import MIB, parse_num_bytes

BUFFER_BYTES = 32 * MIB  # 4 MiB, the usual limit, caps one connection at 500 Mbps over 50 ms
_READY_S = 30.0
_DOWN_S = 20.0
_CONTROL_S = 10.0


class _Answer(msgspec.Struct):
    error: str = ""
    pipes: dict[str, PipeSpec] = {}
    stats: dict[str, PipeStats] = {}


def why_unavailable() -> str:
    """Why no testbed can be made here, in a sentence; empty when one can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces and control groups need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun; load the tun module (modprobe tun), or give the container that device"
    return "" if shutil.which("ip") else "the command ip is missing; install iproute2"


class Testbed:
    """The hosts of a scenario, from ``start`` to ``close``; also a context manager.

    Hosts start without limits of processor time, so that programs load fast; ``throttle`` sets them.

    Args:
        name: of the testbed; default: the scenario's and this process's id.
        stay: keep it when this process ends, until somebody attaches to it and closes it.
    """

    __test__ = False  # no test, whatever pytest thinks of its name

    def __init__(self, scenario: Scenario, name: str = "", *, stay: bool = False) -> None:
        self.scenario, self.name = scenario, name or f"{scenario.name}-{os.getpid()}"
        if NAME.fullmatch(self.name) is None and name:
            raise UserError(f"the name {name[:80]!r}: use 1 to 24 small letters, digits, dots and dashes")
        self.network: Network = build_network(scenario, self.name)
        self._folder, self._stay = namespaces.BEDS / self.name, stay
        self._groups = Groups(self.name, [host.name for host in scenario.host])
        self._emulator: subprocess.Popen[bytes] | None = None

    @classmethod
    def attach(cls, scenario: Scenario, name: str) -> Testbed:
        """The running testbed of that name. Raises UserError when there is none, or it is of another scenario."""
        bed = cls(scenario, name, stay=True)
        state = namespaces.read_state(bed._folder)
        if [(h.name, h.address) for h in state.network.hosts] != [(h.name, h.address) for h in bed.network.hosts]:
            raise UserError(f"the testbed {name!r} that is up has other hosts than this scenario")
        return bed

    def __enter__(self) -> Testbed:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Make everything. Raises UserError; then nothing is left."""
        if reason := why_unavailable():
            settings = " ".join(f"--set {shlex.quote(setting)}" for setting in paced_settings(self.scenario))
            raise UserError(
                f"no testbed can be made here: {reason}. A run paces the links of its own nodes without one: "
                f"fusionllm train RUN.toml {settings}"
            )
        namespaces.BEDS.mkdir(mode=0o700, exist_ok=True)
        namespaces.remove_stale()
        try:
            self._folder.mkdir()
        except FileExistsError:
            raise UserError(
                f"a testbed {self.name!r} is up already; take it down (fusionllm testbed down SCENARIO.toml "
                f"--name {self.name}), or choose another name"
            ) from None
        state = namespaces.State(
            network=self.network, groups=self._groups.folders, maker=namespaces.process(os.getpid())
        )
        namespaces.write_state(self._folder, state)
        try:
            self._groups.create()
            self._limit_memory()
            namespaces.create(self.network)
            self._emulator = self._start_emulator()
            emulator = namespaces.process(self._emulator.pid)
            namespaces.write_state(self._folder, msgspec.structs.replace(state, emulator=emulator))
            self._wait_ready(self._emulator)
            namespaces.connect(self.network, DEVICE, self.scenario.congestion, BUFFER_BYTES)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take everything down, processes of the hosts first."""
        if self._emulator is not None:
            if self._emulator.stdin is not None:
                self._emulator.stdin.close()
            else:
                self._emulator.terminate()
            try:
                self._emulator.wait(_DOWN_S)
            except subprocess.TimeoutExpired:
                self._emulator.kill()
                self._emulator.wait()
            if self._emulator.stdout is not None:
                self._emulator.stdout.close()
            self._emulator = None
        elif (emulator := self._running()) is not None:
            os.kill(emulator.pid, signal.SIGTERM)
            deadline_s = time.monotonic() + _DOWN_S
            while emulator.alive and time.monotonic() < deadline_s:
                time.sleep(0.05)
        with contextlib.suppress(UserError):
            namespaces.remove(self._folder)

    def _running(self) -> namespaces.Process | None:
        try:
            emulator = namespaces.read_state(self._folder).emulator
        except UserError:
            return None
        return emulator if emulator is not None and emulator.alive else None

    # programs

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """The command line that runs ``words`` on a host, within its limits."""
        script = 'for file in $1; do echo $$ > "$file" || exit 125; done; shift; exec "$@"'
        entrances = " ".join(self.entrances(host))
        return ["sh", "-c", script, "sh", entrances, "ip", "netns", "exec", self.network.host(host).namespace, *words]

    def entrances(self, host: str) -> list[str]:
        """Files that a process writes its id into to be limited with a host."""
        self._check_host(host)
        return self._groups.entrances(host)

    def popen(self, host: str, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host; ``options`` are those of subprocess.Popen."""
        return subprocess.Popen(self.command(host, words), **options)

    def address(self, host: str) -> str:
        """A host's IPv4 address."""
        self._check_host(host)
        return self.network.host(host).address

    def _check_host(self, host: str) -> None:
        known = [h.name for h in self.scenario.host]
        if host not in known:
            raise UserError(f"no host {host[:80]!r}; {known_names(host, known)}")

    # limits

    def throttle(self, on: bool = True) -> None:
        """Set the hosts' shares of a core, or lift them.

        While they are set, hosts go before the machine's other programs, or they would not get what they may use.
        Raises UserError when the shares add up to more than there is.
        """
        shares = {host.name: host.cpu for host in self.scenario.host if host.cpu}
        cores = len(os.sched_getaffinity(0))
        if sum(shares.values()) > cores:
            raise UserError(
                f"the hosts' cpu adds up to {sum(shares.values()):g} cores, this machine has {cores}: "
                "hosts would take from each other; lower them"
            )
        for host, share in shares.items():
            self._groups.set_cpu(host, share if on else 0.0)
        self._groups.favour(on)

    def set_cpu(self, host: str, cores: float) -> None:
        """Let a host use ``cores`` from now on, 0 for all."""
        self._check_host(host)
        self._groups.set_cpu(host, cores)

    def cpu_seconds(self, host: str) -> float:
        """Processor time that a host's programs have used so far."""
        self._check_host(host)
        return self._groups.cpu_seconds(host)

    def _limit_memory(self) -> None:
        for host in self.scenario.host:
            if host.memory:
                self._groups.set_memory(host.name, parse_num_bytes(host.memory))

    # the network

    def set_pipe(self, name: str, **changes: Any) -> None:
        """Change a pipe (``a>b``, ``NAME:up``, ``NAME:down``) from now on: any field of `PipeSpec`."""
        self.set_pipes({name: changes})

    def set_link(self, a: str, b: str, **changes: Any) -> None:
        """Change both directions between two hosts."""
        self.set_pipes({f"{a}>{b}": changes, f"{b}>{a}": changes})

    def set_pipes(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Change several pipes at once. Raises UserError for an unknown pipe, field or value."""
        pipes = self.pipes()
        specs = {}
        for name, fields in changes.items():
            if name not in pipes:
                raise UserError(f"no pipe {name[:80]!r}; {known_names(name, sorted(pipes))}")
            try:
                specs[name] = msgspec.convert(msgspec.structs.asdict(pipes[name]) | dict(fields), PipeSpec, strict=True)
            except msgspec.ValidationError as error:
                raise UserError(f"pipe {name}: {error}") from None
        self._ask(specs)

    def open_rates(self, on: bool = True) -> None:
        """Lift every limit of rate, delays stay; off: as the scenario has it. For what is not to be measured."""
        wanted = self.network.pipes
        self._ask({n: msgspec.structs.replace(s, rate_bytes_per_s=0.0) if on else s for n, s in wanted.items()})

    def pipes(self) -> dict[str, PipeSpec]:
        """The pipes as they are now."""
        return self._ask({}).pipes

    def stats(self) -> dict[str, PipeStats]:
        """Counters of every pipe that something went through."""
        return self._ask({}).stats

    def _ask(self, specs: dict[str, PipeSpec]) -> _Answer:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_CONTROL_S)
                connection.connect(str(self._folder / "control"))
                connection.sendall(msgspec.json.encode(specs) + b"\n")
                with connection.makefile("rb") as lines:
                    answer = msgspec.json.decode(lines.read(), type=_Answer)
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(f"the emulator of testbed {self.name!r} does not answer: {error}") from None
        if answer.error:
            raise UserError(answer.error)
        return answer

    # the emulator

    def _start_emulator(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "fusionllm.testbed.emulator", str(self._folder)]
        log = (self._folder / "emulator.log").open("wb")
        with log:  # a session of its own: Ctrl-C is for this process, which then takes it down in order
            return subprocess.Popen(
                [*words, "--stay"] if self._stay else words,
                stdin=subprocess.DEVNULL if self._stay else subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _wait_ready(self, emulator: subprocess.Popen[bytes]) -> None:
        assert emulator.stdout is not None
        ready = select.select([emulator.stdout], [], [], _READY_S)[0]
        line = emulator.stdout.readline() if ready else b""
        try:
            problem = json.loads(line).get("error", "")
        except ValueError:
            log = (self._folder / "emulator.log").read_text(errors="replace").strip()
            problem = f"the emulator did not start: {log[-500:] or f'no word within {_READY_S:.0f} s'}"
        if problem:
            raise UserError(problem)
