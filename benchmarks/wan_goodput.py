"""How much of a slow link a session uses while it has something to send, beside a plain TCP socket on the same link.

    python -m benchmarks wan-goodput --json

Two programs on two hosts of a testbed, full processors, messages of 400 KB (a microbatch's activation): ``session`` is
our Endpoint, TLS, framing, acknowledgements and all, ``tcp`` is `sendall` on a socket as the system gives it.
``one way`` a link carries one of them alone, ``both ways`` each direction at once, as training does; the slower
direction counts. Payload that has arrived over the configured rate, headers of packets not counted; needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.wan import find_scenario
from fusionllm.testbed import Testbed, why_unavailable
from fusionllm.transport import Endpoint, Identity, PeerAddress, issue_identity, make_authority

ROOT = Path(__file__).parents[1]
#: name of a row -> scenario, rate of its links if another, the two hosts.
LINKS = {
    "two-labs": ("two-labs", "", ("a0", "b0")),
    "two-labs 20 Mbps": ("two-labs", "20 Mbps", ("a0", "b0")),
    "two-labs 100 Mbps": ("two-labs", "100 Mbps", ("a0", "b0")),
    "three-homes": ("three-homes", "", ("a0", "b0")),
    "campus": ("campus", "", ("a0", "b0")),
    "lossy": ("lossy", "", ("a0", "b0")),
}
KINDS, WAYS = ("session", "tcp"), ("one way", "both ways")
MESSAGE_BYTES = 400_000
PORT = 29600
CONNECT_S = 30.0


class _Count:
    """What has arrived between the first moment after ``skip_s`` and the last one."""

    def __init__(self, skip_s: float, seconds: float) -> None:
        self._from_s = time.perf_counter() + skip_s
        self._until_s = self._from_s + seconds
        self._first = self._last = (0.0, 0)
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        now_s = time.perf_counter()
        self._num_bytes += num_bytes
        if now_s < self._from_s:
            self._first = self._last = now_s, self._num_bytes
        elif now_s <= self._until_s:
            self._last = now_s, self._num_bytes

    @property
    def bytes_per_s(self) -> float:
        (begun_s, before), (ended_s, after) = self._first, self._last
        return (after - before) / (ended_s - begun_s) if ended_s > begun_s else 0.0


async def _session(spec: dict[str, Any]) -> float:
    lost: list[Exception] = []

    def arrived(peer: str, meta: bytes, payload: bytearray) -> None:
        endpoint.consumed(peer, len(payload))
        count.add(len(payload))

    identity = Identity(**{key: text.encode() for key, text in spec["pems"].items()})
    endpoint = Endpoint(spec["name"], identity, on_message=arrived, on_peer_lost=lambda _, error: lost.append(error))
    peer = spec["peer"]
    await endpoint.listen(spec["address"], PORT)
    _wait_for_the_other()
    endpoint.expect({peer: PeerAddress(spec["peer_address"], PORT)})
    await endpoint.connect(peer, CONNECT_S)
    count = _Count(spec["skip_s"], spec["seconds"])
    end_s = time.perf_counter() + spec["skip_s"] + spec["seconds"] + 1
    payload = bytes(MESSAGE_BYTES)
    while time.perf_counter() < end_s and not lost:
        if not spec["sends"]:
            await asyncio.sleep(0.5)
            continue
        try:
            await asyncio.wait_for(endpoint.send(peer, b"", payload), max(0.1, end_s - time.perf_counter()))
        except asyncio.TimeoutError:
            break
    await asyncio.sleep(0.5)  # the other one may be a little later
    endpoint.abort_wires()
    return count.bytes_per_s


def _tcp(spec: dict[str, Any]) -> float:
    """The first of two names listens."""
    with socket.create_server((spec["address"], PORT)) as server:
        _wait_for_the_other()
        server.settimeout(CONNECT_S)
        listens = spec["name"] < spec["peer"]
        wire = server.accept()[0] if listens else socket.create_connection((spec["peer_address"], PORT), CONNECT_S)
    count = _Count(spec["skip_s"], spec["seconds"])
    wire.settimeout(None)
    if spec["sends"]:
        threading.Thread(target=_send_on, args=(wire,), daemon=True).start()
    end_s = time.perf_counter() + spec["skip_s"] + spec["seconds"] + 1
    buffer = bytearray(1 << 20)
    while time.perf_counter() < end_s:
        if not select.select([wire], [], [], 1.0)[0]:  # no timeout of the socket: it would end a slow sendall
            continue
        got = wire.recv_into(buffer)
        if not got:
            break
        count.add(got)
    return count.bytes_per_s


def _wait_for_the_other() -> None:
    print("listening", flush=True)
    sys.stdin.readline()


def _send_on(wire: socket.socket) -> None:
    payload = bytes(MESSAGE_BYTES)
    try:
        while True:
            wire.sendall(payload)
    except OSError:
        return


def _measure(bed: Testbed, hosts: tuple[str, str], kind: str, both: bool, args: argparse.Namespace) -> float:
    """Payload bytes per second of the slower direction that is used."""
    authority = make_authority()
    programs = []
    for index, host in enumerate(hosts):
        identity, other = issue_identity(authority, host), hosts[1 - index]
        pems = {"cert_pem": identity.cert_pem, "key_pem": identity.key_pem, "ca_pem": identity.ca_pem}
        spec = {
            "kind": kind, "name": host, "peer": other, "address": bed.address(host), "peer_address": bed.address(other),
            "sends": both or index == 0, "skip_s": args.skip, "seconds": args.seconds,
            "pems": {key: pem.decode() for key, pem in pems.items()},
        }  # fmt: skip
        words = [sys.executable, "-m", "benchmarks.wan_goodput"]
        program = bed.popen(host, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert program.stdin is not None
        program.stdin.write(json.dumps(spec) + "\n")
        program.stdin.flush()
        programs.append(program)
    for program in programs:
        assert program.stdin is not None and program.stdout is not None
        program.stdout.readline()
    for program in programs:
        program.stdin.write("\n")
        program.stdin.flush()
    rates = []
    for program in programs:
        out, _ = program.communicate(timeout=args.skip + args.seconds + 2 * CONNECT_S)
        rates.append(float(json.loads(out.splitlines()[-1])["bytes_per_s"]))
    return min(rates) if both else rates[1]


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks wan-goodput", description=__doc__)
    parser.add_argument("--links", default=",".join(LINKS), help=f"some of {', '.join(LINKS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="that count")
    parser.add_argument("--skip", type=float, default=4.0, help="seconds before, for a connection to find its rate")
    args = parser.parse_args(argv)
    names = [name.strip() for name in args.links.split(",")]
    if unknown := [name for name in names if name not in LINKS]:
        raise SystemExit(f"no link {unknown[0]!r}; known: {', '.join(LINKS)}")
    if reason := why_unavailable():
        return {"skipped": f"no wide-area network can be made here: {reason}", "rows": []}
    rows = []
    for name in names:
        scenario, bandwidth, hosts = LINKS[name]
        with Testbed(find_scenario(scenario, bandwidth)) as bed:
            route = bed.network.route(*(bed.network.host(host) for host in hosts))
            rate = min(r for r in (bed.network.pipes[pipe].rate_bytes_per_s for pipe in route) if r)
            found: dict[str, list[float]] = {f"{kind}, {way}": [] for kind in KINDS for way in WAYS}
            for _ in range(args.rounds):
                for way in WAYS:
                    for kind in KINDS:
                        used = _measure(bed, hosts, kind, way == WAYS[1], args) / rate
                        found[f"{kind}, {way}"].append(used)
        rows.append({"link": name, "rate_bytes_per_s": rate} | {key: median(shares) for key, shares in found.items()})
        print(json.dumps(rows[-1]), flush=True)
    return {"rounds": args.rounds, "seconds": args.seconds, "rows": rows}


def table(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"wan-goodput skipped: {result['skipped']}"
    keys = [f"{kind}, {way}" for way in WAYS for kind in KINDS]
    lines = [f"{'share of the rate':20}" + "".join(f"{key:>20}" for key in keys)]
    for row in result["rows"]:
        lines.append(f"{row['link']:20}" + "".join(f"{row[key]:20.1%}" for key in keys))
    return "\n".join(lines)


if __name__ == "__main__":
    spec = json.loads(sys.stdin.readline())
    rate = asyncio.run(_session(spec)) if spec["kind"] == "session" else _tcp(spec)
    print(json.dumps({"bytes_per_s": rate}), flush=True)
