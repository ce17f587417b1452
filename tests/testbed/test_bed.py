"""The testbed with real sockets: rates, delays, loss, sharing, limits; and that nothing of it is ever left."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fusionllm.errors import UserError
from fusionllm.testbed import Testbed, build_scenario, namespaces, why_unavailable
from fusionllm.testbed.cgroups import find_places

pytestmark = [
    pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-"),
    pytest.mark.timeout(120),
]
needs_cpu = pytest.mark.skipif("cpu" not in find_places(), reason="this kernel offers no cpu controller")
needs_memory = pytest.mark.skipif("memory" not in find_places(), reason="this kernel offers no memory controller")

#: Prints the payload rate in Mbps from a second after the first byte to the last one.
RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
connection = server.accept()[0]
first, num_bytes = None, 0
while data := connection.recv(1 << 20):
    now = time.monotonic()
    first = first or now
    num_bytes += len(data) if now > first + 1 else 0
print(num_bytes * 8e-6 / (now - first - 1))
"""
SEND = """
import socket, sys, time
connection, end = socket.create_connection((sys.argv[1], 5000)), time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    connection.sendall(bytes(1 << 14))
"""
ECHO = """
import socket
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 5001))
print("ready", flush=True)
while True:
    udp.sendto(*udp.recvfrom(2000))
"""
#: Prints the round trips in ms of 20 small datagrams and how many were lost.
ASK = """
import socket, sys, time
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.settimeout(0.5)
times = []
for _ in range(int(sys.argv[2])):
    start = time.monotonic()
    udp.sendto(b"x", (sys.argv[1], 5001))
    try:
        udp.recv(100)
        times.append((time.monotonic() - start) * 1e3)
    except TimeoutError:
        pass
print(*times)
"""


def scenario(**changes: Any):
    hosts = [{"name": n, "fence": n[0]} for n in ("a0", "a1", "b0", "b1")]
    raw = {
        "name": "try", "fence": [{"name": "a"}, {"name": "b"}], "host": hosts,
        "otherwise": {"bandwidth": "8 Mbps", "latency": "25 ms"},
    }  # fmt: skip
    return build_scenario(raw | changes)


def python(bed: Testbed, host: str, code: str, *words: str) -> subprocess.Popen[str]:
    return bed.popen(host, [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)


def goodput(bed: Testbed, flows: list[tuple[str, str]], seconds: float) -> list[float]:
    """Payload Mbps of TCP flows at the same time, no two to one host; on a busy machine hosts go first."""
    bed.throttle()
    receivers = [python(bed, b, RECEIVE) for _, b in flows]
    assert all(r.stdout.readline() == "ready\n" for r in receivers)
    senders = [python(bed, a, SEND, bed.address(b), str(seconds)) for a, b in flows]
    rates = [float(r.communicate(timeout=60)[0]) for r in receivers]
    assert [s.wait(10) for s in senders] == [0] * len(senders)
    for sender in senders:
        sender.stdout.close()
    return rates


def round_trips_ms(bed: Testbed, a: str, b: str, count: int = 20) -> list[float]:
    echo = python(bed, b, ECHO)
    assert echo.stdout.readline() == "ready\n"
    out = python(bed, a, ASK, bed.address(b), str(count)).communicate(timeout=60)[0]
    echo.kill()
    echo.communicate()
    return [float(word) for word in out.split()]


def left_over(name: str) -> list[str]:
    groups = [f"{place.folder}/fusionllm-{name}" for place in find_places().values()]
    spaces = [str(path) for path in Path(namespaces.FOLDER).glob(f"{name}.*")]
    return [*filter(os.path.exists, [*groups, str(namespaces.BEDS / name)]), *spaces]


def wait_gone(name: str) -> None:
    deadline = time.monotonic() + 15
    while left_over(name) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over(name) == []


@pytest.mark.parametrize(("mbps", "latency_ms"), [(8, 25), (100, 25)])
def test_goodput_and_round_trip_are_as_configured(mbps, latency_ms):
    between = {"bandwidth": f"{mbps} Mbps", "latency": f"{latency_ms} ms"}
    with Testbed(scenario(otherwise=between)) as bed:
        assert statistics.median(round_trips_ms(bed, "a0", "b0")) == pytest.approx(2 * latency_ms, rel=0.1)
        (rate,) = goodput(bed, [("a0", "b0")], 5)
        assert 0.9 * mbps <= rate <= mbps
        stats = bed.stats()
        assert (
            stats["a0>b0"].num_bytes >= rate * 1e6 / 8 * 3 and stats["a0>b0"].num_bytes > 20 * stats["b0>a0"].num_bytes
        )
    assert left_over(bed.name) == []


def test_hosts_of_a_fence_share_its_uplink():
    fences = [{"name": "a", "uplink": "6 Mbps"}, {"name": "b"}]
    with Testbed(scenario(fence=fences)) as bed:
        rates = goodput(bed, [("a0", "b0"), ("a1", "b1")], 6)
        assert 0.85 * 6 <= sum(rates) <= 6.1 and min(rates) > 0.5
        assert goodput(bed, [("a0", "b0")], 4)[0] > 0.9 * 6


def test_links_change_live():
    with Testbed(scenario()) as bed:
        bed.set_link("a0", "b0", delay_s=0.005, rate_bytes_per_s=2.5e6)
        assert statistics.median(round_trips_ms(bed, "a0", "b0")) == pytest.approx(10, abs=2)
        assert 18 <= goodput(bed, [("a0", "b0")], 4)[0] <= 20
        bed.set_link("a0", "b0", up=False)
        assert round_trips_ms(bed, "a0", "b0", 3) == [] and bed.stats()["a0>b0"].num_dropped >= 3
        bed.set_link("a0", "b0", up=True, loss=0.4)
        assert 3 <= len(round_trips_ms(bed, "a0", "b0", 30)) <= 20  # 0.6 squared come back
        bed.open_rates()
        assert bed.pipes()["a0>b1"].rate_bytes_per_s == 0 and bed.pipes()["a0>b1"].delay_s == 0.025
        bed.open_rates(False)
        assert bed.pipes()["a0>b0"] == bed.network.pipes["a0>b0"]
        with pytest.raises(UserError, match="no pipe"):
            bed.set_pipe("a0>z0", up=False)
        with pytest.raises(UserError, match="rate"):
            bed.set_pipe("a0>b0", rate=1)


def test_a_lossy_link_loses_packets_one_by_one_and_each_namespace_has_its_congestion_control():
    lossy = {"bandwidth": "50 Mbps", "latency": "10 ms", "loss": 0.01}
    with Testbed(scenario(otherwise=lossy, congestion="reno")) as bed:
        names = [f"/proc/sys/net/ipv4/{name}" for name in ("tcp_congestion_control", "tcp_wmem")]
        said = bed.popen("a0", ["cat", *names], stdout=subprocess.PIPE, text=True).communicate()[0].split()
        assert said == ["reno", "4096", "131072", str(32 << 20)]
        (rate,) = goodput(bed, [("a0", "b0")], 4)
        assert rate < 25  # reno: about 1.2 * 1448 * 8 / (20 ms * sqrt(0.01)) = 7 Mbps
        stats = bed.stats()["a0>b0"]
        assert 0.003 < stats.num_dropped / (stats.num_packets + stats.num_dropped) < 0.03


@pytest.mark.parametrize("kind", ["preserving", "symmetric"])
def test_a_host_behind_a_nat_reaches_others_and_is_not_reached(kind):
    hosts = [{"name": "a0", "fence": "a", "nat": kind}, {"name": "b0", "fence": "b"}]
    with Testbed(scenario(host=hosts)) as bed:
        assert goodput(bed, [("a0", "b0")], 3)[0] > 0.9 * 8
        assert len(round_trips_ms(bed, "a0", "b0", 3)) == 3
        assert round_trips_ms(bed, "b0", "a0", 3) == []


@needs_cpu
def test_hosts_get_their_share_of_a_core_once_throttled():
    hosts = [{"name": "a0", "fence": "a", "cpu": 0.2}, {"name": "a1", "fence": "a"}]
    with Testbed(scenario(host=hosts)) as bed:
        program = python(bed, "a0", "while True: pass")
        bed.throttle()
        before, start = bed.cpu_seconds("a0"), time.monotonic()
        while bed.cpu_seconds("a0") - before < 0.5:  # a busy machine may give less than the share, never more
            time.sleep(0.1)
        assert time.monotonic() - start >= 0.8 * 0.5 / 0.2
        assert program.poll() is None
    assert program.wait(5) == -signal.SIGKILL
    program.stdout.close()
    greedy = scenario(host=[{"name": "a0", "fence": "a", "cpu": 1000.0}])
    with Testbed(greedy) as bed, pytest.raises(UserError, match="adds up to 1000 cores"):
        bed.throttle()


@needs_memory
def test_a_host_has_no_more_memory_than_its_scenario_says():
    with Testbed(scenario(host=[{"name": "a0", "fence": "a", "memory": "64 MiB"}])) as bed:
        program = python(bed, "a0", "x = bytearray(200 << 20); print(len(x))")
        assert program.communicate(timeout=30)[0] == "" and program.returncode in (1, -signal.SIGKILL)


def test_a_second_testbed_of_a_name_is_refused_and_the_first_goes_on():
    with Testbed(scenario(), "twice") as bed:
        with pytest.raises(UserError, match="up already"):
            Testbed(scenario(), "twice").start()
        assert bed.pipes()
    assert left_over("twice") == []


HOLD = """
import sys, time
from tests.testbed.test_bed import scenario, Testbed
bed = Testbed(scenario(), sys.argv[1])
bed.start()
bed.popen("a0", ["sleep", "600"])
print(bed._emulator.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(request):
    """Another process with a testbed, and the id of its emulator."""
    name = f"held-{os.getpid()}"
    words = [sys.executable, "-c", HOLD, name]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    emulator = int(process.stdout.readline())
    yield name, process, emulator
    process.kill()
    process.communicate()


def test_a_killed_maker_leaves_nothing(holder):
    name, process, _ = holder
    assert left_over(name)
    process.kill()
    wait_gone(name)


def test_a_killed_maker_and_emulator_are_cleaned_up_after_at_the_next_start(holder):
    name, process, emulator = holder
    os.kill(emulator, signal.SIGKILL)
    process.kill()
    process.wait()
    torn = namespaces.BEDS / f"torn-{os.getpid()}"  # of a maker killed before it wrote down what it makes
    torn.mkdir()
    os.utime(torn, (0, 0))
    time.sleep(0.2)
    assert left_over(name)
    with Testbed(scenario()):
        assert left_over(name) == [] and not torn.exists()


def test_the_commands(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('name = "cli"\n[[fence]]\nname = "a"\n[[host]]\nname = "a0"\nfence = "a"\n')
    name = f"cli-{os.getpid()}"

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fusionllm.cli.main", "testbed", *words]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)

    up = call("up", str(path), "--name", name)
    assert up.returncode == 0 and "a0" in up.stdout and "10.88.0.1" in up.stdout, up.stdout
    assert f"testbed run --name {name} {path} a0 COMMAND" in up.stdout
    try:
        assert "up already" in call("up", str(path), "--name", name).stdout
        assert call("run", "--name", name, str(path), "a0", "false").returncode == 1
        assert "no host 'zz'" in call("run", "--name", name, str(path), "zz", "true").stdout
    finally:
        assert call("down", str(path), "--name", name).returncode == 0
    assert left_over(name) == []
    assert "no testbed" in call("down", str(path), "--name", name).stdout
    assert call("run", str(path), "a0", "true").returncode == 0
    path.write_text(path.read_text() + "cpu = 1000\n")
    assert "adds up to 1000 cores" in call("up", "--throttle", str(path), "--name", name).stdout
    assert left_over(name) == []
