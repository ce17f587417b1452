"""One method on one scenario: starts its programs on the hosts of a testbed, measures while it trains.

Programs start and warm up without limits; then processor shares and link rates are set, some steps settle, and the rest
is timed. When the last step is done the limits are lifted, so that validation and checkpoints cost no time. What the
network carried comes from the emulator, processor time from the control groups, never from the method itself.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from benchmarks.wan_fork import Child, Spec
from benchmarks.wan_meter import Work, read_work
from benchmarks.wan_modelled import Modelled, model_of, stage_s
from fusionllm.estimate.work import OpWork
from fusionllm.node.options import PASSIVE_WAITS
from fusionllm.testbed import PipeSpec, Scenario, Testbed
from fusionllm.testbed.scenario import Host

ROOT = Path(__file__).parents[1]
DEVICE = "wan0"
BROKER_PORT, PEER_PORT = 7654, 29511
SETTLE_STEPS = 1
_QUEUE_BYTES = 96 << 10  # of a stretched link, at least: a queue is waited for by heartbeats, which no stretch delays
START_S = 300.0  # for programs to load, on a busy machine


class MethodFailed(Exception):
    """A method did not get to its end; the text says why."""


@dataclass
class Measured:
    """What one method did, per timed step.

    Attributes:
        step_s: seconds of each timed step. losses: training losses of all steps.
        num_bytes: pipe -> bytes in a step. dropped: packets, all steps.
        cpu_s: host -> processor seconds in a step. work: host -> its forwards and backwards alone, where known.
        stages: hosts in the order of the pipeline. plan: what a planner said. result: what was said at the end.
    """

    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    num_bytes: dict[str, float] = field(default_factory=dict)
    dropped: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)


@dataclass
class Watch:
    """Follows the lines of a program, sets the limits and reads the counters at the right ones."""

    bed: Bed
    num_steps: int
    measured: Measured = field(default_factory=Measured)
    _before: tuple[float, dict[str, Any], dict[str, float]] | None = None

    def line(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind in ("exchange", "summary"):
            self.measured.result = event
        elif kind == "plan":  # measuring for it is over; weights need not travel at the links' rates
            self.measured.stages = [stage["node"] for stage in event["stages"]]
            limit(self.bed, False)
        elif kind == "note" and event["kind"] == "plan":
            self.measured.plan.append(event["text"])
        elif kind == "step":
            self._step(event)

    def _step(self, event: dict[str, Any]) -> None:
        step = event["step"]
        self.measured.losses.append(event["loss"])
        if step == self.bed.warm_steps:
            limit(self.bed, True)
        elif step == self.bed.warm_steps + SETTLE_STEPS:
            self._before = self._counters()
        elif self._before is not None:
            self.measured.step_s.append(event["seconds"])
        if step == self.num_steps:
            self._finish()

    def _counters(self) -> tuple[float, dict[str, Any], dict[str, float]]:
        cpu = {host.name: self.bed.cpu_seconds(host.name) for host in self.bed.scenario.nodes}
        return time.perf_counter(), self.bed.stats(), cpu

    def _finish(self) -> None:
        assert self._before is not None
        (_, stats, cpu), (_, old_stats, old_cpu) = self._counters(), self._before
        steps = len(self.measured.step_s)
        for name, now in stats.items():
            old = old_stats.get(name)
            self.measured.num_bytes[name] = (now.num_bytes - (old.num_bytes if old else 0)) / steps
            self.measured.dropped += now.num_dropped - (old.num_dropped if old else 0)
        self.measured.cpu_s = {host: (used - old_cpu[host]) / steps for host, used in cpu.items()}
        limit(self.bed, False)


class Bed(Testbed):
    """A testbed whose links are ``stretch`` times slower than its scenario has them, where compute is as well.

    Attributes:
        works: of emulated compute, the operators of the whole model, cut into equal numbers of them.
        activation: and a recording of what it sends.
        unlimited: no shares and rates are ever set, for losses alone. warm_steps: after which they are set.
    """

    def __init__(self, scenario: Scenario, stretch: float = 1.0) -> None:
        super().__init__(scenario)
        self.stretch = stretch
        self.unlimited, self.warm_steps = False, 2
        self.works: list[list[OpWork]] = []
        self.activation = ""
        if stretch != 1:
            slow = {name: stretched(spec, stretch) for name, spec in self.network.pipes.items()}
            self.network = msgspec.structs.replace(self.network, pipes=slow)

    def modelled(self, host: Host, meter: str = "") -> Modelled:
        return model_of(host, self.works, self.stretch, meter)


def stretched(spec: PipeSpec, stretch: float) -> PipeSpec:
    """A pipe so many times slower; its queue holds the same time or, of few bytes, a segment and a half."""
    rate = spec.rate_bytes_per_s / stretch
    queue = max(_QUEUE_BYTES, int(rate * max(0.1, 2 * spec.delay_s) * stretch)) if rate else 0
    delays = {"delay_s": spec.delay_s * stretch, "jitter_s": spec.jitter_s * stretch}
    return msgspec.structs.replace(spec, rate_bytes_per_s=rate, queue_bytes=queue, **delays)


def limit(bed: Bed, on: bool, delays: bool | None = None) -> None:
    """Set the hosts' shares and the links' rates, or lift both; stretched delays are set with them, or as told."""
    on = on and not bed.unlimited
    bed.throttle(on)
    if bed.stretch == 1:
        bed.open_rates(not on)
        return
    shorter = 1.0 if (on if delays is None else delays) else bed.stretch
    bed.set_pipes({
        name: {"rate_bytes_per_s": spec.rate_bytes_per_s * on, "delay_s": spec.delay_s / shorter}
        for name, spec in bed.network.pipes.items()
    })  # fmt: skip


class Programs:
    """Programs on the hosts of a testbed, ended with the block; logs in a folder."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed, self.folder, self._stack = bed, folder, ExitStack()
        self.running: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.running.values():
            program.kill()
        for program in self.running.values():
            program.communicate()
        self._stack.close()

    def start(self, name: str, host: str, words: list[str]) -> subprocess.Popen[str]:
        return self._start_here(name, self.bed.command(host, words))

    def start_forked(
        self, name: str, prepare: str, options: dict[str, Any], function: str, words: dict[str, list[str]]
    ) -> subprocess.Popen[str]:
        """Programs on many hosts from one process: ``function`` of each host's ``words``; the first one's output."""
        network = self.bed.network
        children = [
            Child(
                namespace=f"/run/netns/{network.host(host).namespace}", entrances=self.bed.entrances(host),
                log=str(self.folder / f"{host}.log"), function=function, words=own,
            )
            for host, own in words.items()
        ]  # fmt: skip
        file = self.folder / f"{name}.json"
        file.write_bytes(msgspec.json.encode(Spec(prepare=prepare, options=options, children=children)))
        return self._start_here(name, [sys.executable, "-m", "benchmarks.wan_fork", str(file)])

    def _start_here(self, name: str, words: list[str]) -> subprocess.Popen[str]:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("a"))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | PASSIVE_WAITS
        program = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment, bufsize=1
        )
        self.running[name] = program
        return program

    def stop(self, name: str) -> None:
        program = self.running.pop(name)
        program.kill()
        program.communicate()

    def follow(self, name: str, watch: Callable[[dict[str, Any]], None], timeout_s: float) -> None:
        """Read a program's JSON lines until it ends. Raises MethodFailed when it fails or says nothing for long."""
        program = self.running[name]
        assert program.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([program.stdout], [], [], left_s)[0]:
                raise MethodFailed(f"{name} was not done after {timeout_s:.0f} s{self.blame(name)}")
            line = program.stdout.readline()
            if not line:
                break
            if line.startswith("{"):
                watch(json.loads(line))
        if program.wait(60):
            raise MethodFailed(f"{name} ended with code {program.returncode}{self.blame(name)}")

    def blame(self, name: str) -> str:
        """The last words of a program's log, after a colon."""
        text = (self.folder / f"{name}.log").read_text(errors="replace").strip()
        return f": {text.splitlines()[-1][-300:]}" if text else ""


def run_peer(bed: Bed, folder: Path, mode: str, options: dict[str, Any], timeout_s: float) -> Measured:
    """One of `wan_peer`'s methods; rank 0 tells the time. Raises MethodFailed."""
    hosts = [host.name for host in bed.scenario.nodes]
    if mode == "one-host":
        hosts = [max(bed.scenario.nodes, key=lambda host: host.cpu or 1e9).name]
    options = options | {
        "addresses": [bed.address(host) for host in hosts], "port": PEER_PORT, "device": DEVICE,
        "folder": str(folder), "skip": bed.warm_steps + SETTLE_STEPS,
        "padding_s": [stage_s(works, bed.modelled(host).rates) for works, host in zip(bed.works, bed.scenario.nodes)],
    }  # fmt: skip
    file = folder / "options.json"
    file.write_text(json.dumps(options))
    watch = Watch(bed, options["config"]["train"]["steps"])
    watch.measured.stages = hosts
    if mode == "diloco":  # its exchange comes after the last step and is measured too
        watch._finish = lambda: None  # type: ignore[method-assign]
    limit(bed, False)
    with Programs(bed, folder) as programs:
        words = [mode, str(file)]
        if bed.works:
            forked = {host: [*words, str(rank)] for rank, host in enumerate(hosts)}
            programs.start_forked("ranks", "benchmarks.wan_peer:prepare", {}, "benchmarks.wan_peer:main", forked)
            programs.follow("ranks", watch.line, timeout_s)
            times = dict(zip(hosts, options["padding_s"]))
            count = options["config"]["train"]["global_batch"]
            watch.measured.work = {host: Work(f, b, (f + b) * count) for host, (f, b) in times.items()}
            return watch.measured
        for rank, host in enumerate(hosts):
            programs.start(f"rank{rank}", host, [sys.executable, "-m", "benchmarks.wan_peer", *words, str(rank)])
        programs.follow("rank0", watch.line, timeout_s)
        for rank in range(1, len(hosts)):
            programs.follow(f"rank{rank}", lambda _: None, 60)
    if mode == "diloco":
        Watch._finish(watch)
    if mode == "pipeline":
        files = {host: folder / f"rank{rank}.work" for rank, host in enumerate(hosts)}
        watch.measured.work = read_all(files, watch.measured, options["config"])
    watch.measured.result |= {"val_loss": _evaluate(file)}
    return watch.measured


def _evaluate(options: Path) -> float:
    words = [sys.executable, "-m", "benchmarks.wan_peer", "evaluate", str(options), "0"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise MethodFailed(f"the evaluation failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["val_loss"])


def read_all(files: dict[str, Path], measured: Measured, config: dict[str, Any]) -> dict[str, Work]:
    """Host -> what its stage's forwards and backwards took of the processor in the timed steps. Raises MethodFailed."""
    num_microbatches = config["train"]["global_batch"] // config["train"]["microbatch_size"]
    try:
        return {host: read_work(files[host], len(measured.step_s), num_microbatches) for host in measured.stages}
    except (OSError, ValueError) as error:
        raise MethodFailed(f"what the stages took is not known: {error}") from None


class OurCluster(Programs):
    """A broker on the owner's host and a node on those given, for the block. ``codes``: whether links may compress."""

    def __init__(self, bed: Bed, folder: Path, hosts: list[Host], codes: bool) -> None:
        super().__init__(bed, folder)
        self._hosts, self._codes = hosts, codes
        words = ["benchmarks.wan_modelled", str(bed.stretch)] if bed.works else ["fusionllm.cli.main"]
        self.command = (sys.executable, "-m", *words)

    def __enter__(self) -> OurCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        self.ticket = ""
        limit(self.bed, False)
        command, owner = self.command, self.bed.scenario.owner.name
        broker = self.start("broker", owner, [*command, "broker", "--advertise", self.bed.address(owner), "--json"])
        assert broker.stdout is not None
        if not select.select([broker.stdout], [], [], START_S)[0]:
            raise MethodFailed("the broker did not start")
        line = broker.stdout.readline()
        if not line:
            raise MethodFailed(f"the broker did not start{self.blame('broker')}")
        self.ticket = json.loads(line)["ticket"]
        joins = {
            host: ["join", self.ticket, "--name", host.name, "--fence", host.fence, "--device", "cpu"]
            for host in self._hosts
        }
        if self.bed.works:
            forked = {host.name: [self._modelled(host), *words] for host, words in joins.items()}
            options = {"activation": self.bed.activation, "codecs": self._codes}
            node = "benchmarks.wan_modelled:run_node"
            self.start_forked("nodes", "benchmarks.wan_modelled:prepare", options, node, forked)
            return
        for host, words in joins.items():
            metered = [sys.executable, "-m", "benchmarks.wan_node", str(self._work(host.name))]
            self.start(host.name, host.name, [*metered, *words])

    def _modelled(self, host: Host) -> str:
        return msgspec.json.encode(self.bed.modelled(host, str(self._work(host.name)))).decode()

    def _work(self, host: str) -> Path:
        return self.folder / f"{host}.work"

    def train(self, name: str, config: dict[str, Any], timeout_s: float) -> Measured:
        """One run over the nodes; what a planner measures it measures under the limits. Raises MethodFailed."""
        run = self.folder / f"{name}.toml"
        run.write_text(tomli_w.dumps(config))
        watch = Watch(self.bed, config["train"]["steps"])
        limit(self.bed, "rule" in config.get("compression", {}), delays=False)
        words = [*self.command, "train", str(run), "--broker", self.ticket, "--json"]
        self.start(name, self.bed.scenario.owner.name, words)
        try:
            self.follow(name, watch.line, timeout_s)
        finally:
            limit(self.bed, False)
            self.stop(name)
        files = {host: self._work(host) for host in watch.measured.stages}
        watch.measured.work = read_all(files, watch.measured, config)
        return watch.measured
