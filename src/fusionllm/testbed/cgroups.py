"""Control groups: how much of a core and how much memory a host may use. Kernel interface v1 or v2, whichever is there.

Groups are made below the one this process is in, so that what limits it limits its hosts as well. Knows nothing of
networks. A kernel without a controller gets a sentence that says so, never a host silently without its limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from fusionllm.errors import UserError

PERIOD_US = 20_000  # short, so that a quarter of a core is 5 ms in every 20 and not one long stop in 100
_MIN_QUOTA_US = 1_000  # the kernel's own
_NO_LIMIT_BYTES = (1 << 63) - 4096
_LEAVE_S = 5.0
CONTROLLERS = ("cpu", "memory", "cpuacct")
#: Weight among the machine's other programs, by version: of each host; of a testbed that is measured, and, within any
#: testbed, of its emulator: hosts without a limit would leave it the share of one of them, and the network be late.
_HOST_WEIGHT, _HIGH_WEIGHT = (1024, 100), (65536, 6400)
EMULATOR = "_emulator"  # no host has such a name


class Place(msgspec.Struct, frozen=True):
    """Where groups with a controller can be made. ``version``: of the kernel's interface, 1 or 2."""

    version: int
    folder: str


def find_places(mounts: str | None = None, own: str | None = None) -> dict[str, Place]:
    """Controller -> where its groups go; those that this kernel lacks are missing.

    Args:
        mounts, own: text of /proc/self/mountinfo and /proc/self/cgroup; None to read them.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
        own = Path("/proc/self/cgroup").read_text() if own is None else own
    except OSError:
        return {}
    lines = [line.split(":", 2) for line in own.splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    found: dict[str, Place] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        root, folder = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup":
            for name in set(options.split(",")) & set(CONTROLLERS):
                found[name] = Place(1, _below(folder, root, paths.get(name, "/")))
        elif kind == "cgroup2":
            place = Place(2, _below(folder, root, paths.get("", "/")))
            for name in _offered(Path(folder)) & {"cpu", "memory"}:
                found.setdefault(name, place)
                if name == "cpu":
                    found.setdefault("cpuacct", place)
    return found


def _below(folder: str, root: str, path: str) -> str:
    """Our own group's folder; the mount's when that lies elsewhere, as in a container."""
    inside = os.path.relpath(path, root)
    own = Path(folder) if inside.startswith("..") else Path(folder) / inside
    return str(own if own.is_dir() else folder)


def _offered(folder: Path) -> set[str]:
    try:
        return set((folder / "cgroup.controllers").read_text().split())
    except OSError:
        return set()


class Groups:
    """The groups of a testbed's hosts and of its emulator, one of each per controller.

    Args:
        bed: name of the testbed, part of the groups' names.
    """

    def __init__(self, bed: str, hosts: Iterable[str], places: Mapping[str, Place] | None = None) -> None:
        self._places = find_places() if places is None else places
        self._tops = {name: Path(place.folder) / f"fusionllm-{bed}" for name, place in self._places.items()}
        self._hosts = [*hosts, EMULATOR]

    @property
    def folders(self) -> list[str]:
        """Every folder, inner ones first."""
        tops = sorted(set(map(str, self._tops.values())))
        return [*(f"{top}/{host}" for top in tops for host in self._hosts), *tops]

    def create(self) -> None:
        """Make the groups. Raises UserError when the kernel refuses."""
        try:
            for name, top in self._tops.items():
                if self._places[name].version == 2 and name != "cpuacct":
                    top.mkdir(exist_ok=True)
                    for folder in (top.parent, top):
                        (folder / "cgroup.subtree_control").write_text(f"+{name}")
                for host in self._hosts:
                    (top / host).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make control groups for the hosts: {error}; are you root?") from None
        self.favour(False)
        if "cpu" in self._places:
            self._write_weight(self._tops["cpu"] / EMULATOR, _HIGH_WEIGHT)

    def entrances(self, host: str) -> list[str]:
        """Files that a process writes its id into to be limited with the host."""
        return sorted({str(top / host / "cgroup.procs") for top in self._tops.values()})

    def set_cpu(self, host: str, cores: float) -> None:
        """Let a host use ``cores`` from now on, 0 for all. Raises UserError without a cpu controller."""
        folder, version = self._find("cpu", host, "cpu")
        quota_us = max(_MIN_QUOTA_US, round(cores * PERIOD_US)) if cores else 0
        if version == 2:
            self._write(folder / "cpu.max", f"{quota_us or 'max'} {PERIOD_US}")
        else:
            self._write(folder / "cpu.cfs_period_us", str(PERIOD_US))
            self._write(folder / "cpu.cfs_quota_us", str(quota_us or -1))

    def favour(self, on: bool) -> None:
        """Let the hosts go before the machine's other programs, to get what they may use; off: as one each."""
        if "cpu" not in self._places:
            return
        usual = tuple(min(one * (len(self._hosts) - 1), most) for one, most in zip(_HOST_WEIGHT, _HIGH_WEIGHT))
        self._write_weight(self._tops["cpu"], _HIGH_WEIGHT if on else usual)

    def _write_weight(self, folder: Path, weights: tuple[int, ...]) -> None:
        version = self._places["cpu"].version
        self._write(folder / ("cpu.weight" if version == 2 else "cpu.shares"), str(weights[version - 1]))

    def set_memory(self, host: str, num_bytes: int) -> None:
        """Let a host use ``num_bytes`` of memory, 0 for all. Raises UserError without a memory controller."""
        folder, version = self._find("memory", host, "memory")
        if version == 2:
            self._write(folder / "memory.max", str(num_bytes or "max"))
        else:
            self._write(folder / "memory.limit_in_bytes", str(num_bytes or _NO_LIMIT_BYTES))

    def cpu_seconds(self, host: str) -> float:
        """Processor time that a host's processes have used so far."""
        folder, version = self._find("cpuacct", host, "cpu")
        if version == 2:
            stat = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            return int(stat["usage_usec"]) / 1e6
        return int((folder / "cpuacct.usage").read_text()) / 1e9

    def _find(self, controller: str, host: str, key: str) -> tuple[Path, int]:
        if controller not in self._places:
            known = ", ".join(sorted(self._places)) or "none"
            raise UserError(
                f"this kernel offers no {controller} controller for control groups (it offers {known}); "
                f"remove {key} from the scenario's hosts, or boot with that controller"
            )
        return self._tops[controller] / host, self._places[controller].version

    def _write(self, file: Path, text: str) -> None:
        try:
            file.write_text(text)
        except OSError as error:
            raise UserError(f"cannot write {text!r} to {file}: {error}") from None


def remove_groups(folders: Iterable[str]) -> None:
    """Kill what is still in the groups and remove them; those that are gone are fine. Who calls this leaves them."""
    deadline_s = time.monotonic() + _LEAVE_S
    for folder in map(Path, folders):
        while folder.is_dir():
            with contextlib.suppress(OSError, ValueError):
                for pid in map(int, (folder / "cgroup.procs").read_text().split()):
                    if pid == os.getpid():
                        (folder.parents[1] / "cgroup.procs").write_text(str(pid))
                        continue
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.02)
