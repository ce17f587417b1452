"""What the session costs on top of TLS: ``python -m benchmarks session``.

Two processes on loopback, this one sending, side by side in one run:

- ``session``: our Endpoint, with framing, checksums, credits and acknowledgements;
- ``plain``: a blocking TLS 1.3 socket, ``sendall`` and ``recv_into`` one buffer that is used again and again;
- ``asyncio``: asyncio's own TLS with a BufferedProtocol (on uvloop where there is one).

Same message sizes, alternated, medians of the rounds. Then memory over many messages, and connections cut on
purpose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil

from fusionllm.errors import LinkError
from fusionllm.transport import Endpoint, Identity, PeerAddress, SessionConfig, issue_identity, make_authority
from fusionllm.transport.tls import client_context, server_context
from fusionllm.units import KIB, MIB

SIZES = {"1MB": MIB, "16MB": 16 * MIB}
_HOST = "127.0.0.1"
_CONFIG = SessionConfig(max_queue_bytes=64 * MIB)
_WARM_MESSAGES = 1000


def _run_loop(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


# --- the receiving process: reads its identity from stdin, then one command a line, answers with on


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _receive_plain(identity: Identity) -> None:
    """Each connection: 16 bytes of message size and count, the messages, one byte back."""
    context = server_context(identity)
    with socket.create_server((_HOST, 0)) as listener:
        _say(port=listener.getsockname()[1])
        while True:
            with context.wrap_socket(listener.accept()[0], server_side=True) as sock:
                head = sock.recv(16)
                if len(head) < 16:
                    return
                size, count = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
                buffer = memoryview(bytearray(size))
                for _ in range(count):
                    filled = 0
                    while filled < size:
                        filled += sock.recv_into(buffer[filled:])
                sock.sendall(b"!")


class _Sink(asyncio.BufferedProtocol):
    """The same conversation for asyncio."""

    def __init__(self, finished: asyncio.Event) -> None:
        self._finished = finished
        self._head = bytearray(16)
        self._buffer = memoryview(self._head)
        self._filled, self._left, self._size = 0, -1, 16

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled < self._size:
            return
        self._filled = 0
        if self._left < 0:
            self._size, self._left = (
                int.from_bytes(self._head[:8], "big"),
                int.from_bytes(self._head[8:], "big"),
            )
            if not self._left:
                self._finished.set()
                return
            self._buffer = memoryview(bytearray(self._size))
            return
        self._left -= 1
        if self._left == 0:
            self._transport.write(b"!")
            self._transport.close()


async def _receive_asyncio(identity: Identity) -> None:
    finished = asyncio.Event()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Sink(finished), _HOST, 0, ssl=server_context(identity))
    _say(port=server.sockets[0].getsockname()[1])
    await finished.wait()
    server.close()


async def _receive_session(identity: Identity) -> None:
    """Counts messages by the id in their meta; the command ``report`` answers, ``cut`` breaks the wire."""
    seen: set[bytes] = set()
    counts = {"messages": 0, "wrong": 0}
    finished = asyncio.Event()

    def on_message(peer: str, meta: bytes, payload: bytearray) -> None:
        counts["messages"] += 1
        if meta:
            seen.add(meta)
            counts["wrong"] += payload[: len(meta)] != meta
        endpoint.consumed(peer, len(payload))

    def command() -> None:
        line = sys.stdin.readline().strip()
        if line == "report":
            _say(unique=len(seen), **counts, rss=psutil.Process().memory_info().rss)
        elif line == "cut":
            endpoint.abort_wires()
        else:
            finished.set()

    endpoint = Endpoint("b", identity, on_message=on_message, on_peer_lost=lambda *_: finished.set(), config=_CONFIG)
    endpoint.expect({"a": None})
    _, port = await endpoint.listen(_HOST)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), command)
    _say(port=port)
    await finished.wait()
    await endpoint.close()


class _Receiver:
    """The other process."""

    def __init__(self, kind: str, identity: Identity) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        pems = {"cert_pem": identity.cert_pem, "key_pem": identity.key_pem, "ca_pem": identity.ca_pem}
        self.tell(json.dumps({key: pem.decode() for key, pem in pems.items()}))
        self.port = int(self.listen()["port"])

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def listen(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def report(self) -> dict[str, Any]:
        self.tell("report")
        return self.listen()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


# --- the sending process


def _head(size: int, count: int) -> bytes:
    return size.to_bytes(8, "big") + count.to_bytes(8, "big")


def _send_plain(identity: Identity, port: int, payload: bytes, count: int) -> float:
    context = client_context(identity)
    with context.wrap_socket(socket.create_connection((_HOST, port))) as sock:
        begun_s = time.perf_counter()
        sock.sendall(_head(len(payload), count))
        for _ in range(count):
            sock.sendall(payload)
        sock.recv(1)
        return time.perf_counter() - begun_s


class _Source(asyncio.Protocol):
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[None] = loop.create_future()
        self.may_write = asyncio.Event()
        self.may_write.set()

    def pause_writing(self) -> None:
        self.may_write.clear()

    def resume_writing(self) -> None:
        self.may_write.set()

    def data_received(self, data: bytes) -> None:
        self.answered.set_result(None)


async def _send_asyncio(identity: Identity, port: int, payload: bytes, count: int) -> float:
    loop = asyncio.get_running_loop()
    transport, source = await loop.create_connection(
        _Source, _HOST, port, ssl=client_context(identity), server_hostname=""
    )
    view = memoryview(payload)
    begun_s = time.perf_counter()
    transport.write(_head(len(payload), count))
    for _ in range(count):
        for offset in range(0, len(view), 256 * KIB):
            transport.write(view[offset : offset + 256 * KIB])
            await source.may_write.wait()
    await source.answered
    transport.close()
    return time.perf_counter() - begun_s


async def _send_session(endpoint: Endpoint, payload: bytes, count: int) -> float:
    begun_s = time.perf_counter()
    for _ in range(count):
        await endpoint.send("b", b"", payload)
    await endpoint.drain(120)
    return time.perf_counter() - begun_s


async def _goodput(
    sizes: dict[str, int], round_bytes: int, rounds: int, identity: Identity, peers: dict[str, _Receiver],
    endpoint: Endpoint,
) -> dict[str, dict[str, list[float]]]:  # fmt: skip
    """GB/s per size and kind, one per round; the order turns every round, a first round is thrown away."""
    rates: dict[str, dict[str, list[float]]] = {label: {kind: [] for kind in peers} for label in sizes}
    for index in range(rounds + 1):
        for label, size in sizes.items():
            payload, count = os.urandom(size), max(1, round_bytes // size)
            for kind in list(peers) if index % 2 else reversed(list(peers)):
                if kind == "plain":
                    seconds = _send_plain(identity, peers[kind].port, payload, count)
                elif kind == "asyncio":
                    seconds = await _send_asyncio(identity, peers[kind].port, payload, count)
                else:
                    seconds = await _send_session(endpoint, payload, count)
                if index:
                    rates[label][kind].append(size * count / seconds / 1e9)
    return rates


async def _memory_growth(endpoint: Endpoint, receiver: _Receiver, count: int) -> float:
    """MiB that either process grew by over ``count`` messages, after a warm-up."""
    payload, process = os.urandom(64 * KIB), psutil.Process()
    await _send_session(endpoint, payload, _WARM_MESSAGES)
    before = process.memory_info().rss, receiver.report()["rss"]
    await _send_session(endpoint, payload, count)
    after = process.memory_info().rss, receiver.report()["rss"]
    return max(after[0] - before[0], after[1] - before[1]) / MIB


async def _cuts(endpoint: Endpoint, receiver: _Receiver, count: int, size: int) -> dict[str, int]:
    """Send numbered messages while the connection is cut three times, by this side and by the other."""
    start, sent_before = receiver.report(), endpoint.stats()["b"].messages_sent
    rest = random.Random(0).randbytes(size - 8)

    async def send_all() -> None:
        for index in range(count):
            number = index.to_bytes(8, "big")
            await endpoint.send("b", number, [number, rest])

    sending = asyncio.ensure_future(send_all())
    for quarter in (1, 2, 3):
        while endpoint.stats()["b"].messages_sent - sent_before < quarter * count // 4:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        if quarter == 2:
            receiver.tell("cut")
        else:
            endpoint.abort_wires()
        while endpoint.stats()["b"].reconnects < quarter:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await asyncio.wait_for(sending, 120)
    await endpoint.drain(120)
    end = receiver.report()
    stats = endpoint.stats()["b"]
    return {
        "lost": count - end["unique"], "duplicates": end["messages"] - start["messages"] - end["unique"],
        "damaged": end["wrong"], "reconnects": stats.reconnects, "resent_bytes": stats.resent_bytes,
    }  # fmt: skip


def _ratio(kinds: dict[str, list[float]], kind: str) -> float:
    """Median over the rounds of this kind's rate over plain's of the same round: other load hits both."""
    return statistics.median(rate / plain for rate, plain in zip(kinds[kind], kinds["plain"], strict=True))


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    authority = make_authority()
    mine, theirs = issue_identity(authority, "a"), issue_identity(authority, "b")
    peers = {kind: _Receiver(kind, theirs) for kind in ("plain", "session", "asyncio")}
    lost: list[LinkError] = []
    endpoint = Endpoint(
        "a",
        mine,
        on_message=lambda *_: None,
        on_peer_lost=lambda peer, error: lost.append(error),
        config=_CONFIG,
    )
    try:
        endpoint.expect({"b": PeerAddress(_HOST, peers["session"].port)})
        await endpoint.connect("b", 10)
        rates = await _goodput(SIZES, options.round_mib * MIB, options.rounds, mine, peers, endpoint)
        growth = await _memory_growth(endpoint, peers["session"], options.messages)
        cuts = await _cuts(endpoint, peers["session"], options.cut_messages, MIB)
    finally:
        await endpoint.close()
        for receiver in peers.values():
            receiver.stop()
    medians = {label: {kind: statistics.median(r) for kind, r in kinds.items()} for label, kinds in rates.items()}
    ratios = {label: _ratio(kinds, "session") for label, kinds in rates.items()}
    return {
        "gb_per_s": medians, "ratios": ratios, "ratio": min(ratios.values()),
        "ratio_asyncio": min(_ratio(kinds, "asyncio") for kinds in rates.values()),
        "rss_growth_mib": growth, "rounds": options.rounds, **cuts,
    }  # fmt: skip


def run(argv: list[str]) -> dict[str, Any]:
    """Measure.

    Keys: ``ratio`` (session over plain, the worst size), ``rss_growth_mib``, ``lost``, ``duplicates``.
    """
    parser = argparse.ArgumentParser(prog="benchmarks session", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25, help="measured rounds per kind and size")
    parser.add_argument("--round-mib", type=int, default=128, help="MiB sent per measurement")
    parser.add_argument("--messages", type=int, default=10_000, help="messages of 64 KiB in the memory test")
    parser.add_argument("--cut-messages", type=int, default=200, help="messages of 1 MiB while connections are cut")
    parser.add_argument("--small", action="store_true", help="a quick look: 5 rounds of 64 MiB, 2,000 messages")
    options = parser.parse_args(argv)
    if options.small:
        options.rounds, options.round_mib, options.messages, options.cut_messages = 5, 64, 2000, 40
    return dict(_run_loop(_measure(options)))


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"goodput on loopback, GB/s, medians of {result['rounds']} rounds"]
    lines.append(f"{'message':>8} {'plain TLS':>10} {'session':>10} {'asyncio':>10} {'session/plain':>14}")
    for label, kinds in result["gb_per_s"].items():
        lines.append(
            f"{label:>8} {kinds['plain']:>10.3f} {kinds['session']:>10.3f} {kinds['asyncio']:>10.3f} "
            f"{result['ratios'][label]:>14.3f}"
        )
    lines.append(f"memory grown: {result['rss_growth_mib']:.1f} MiB")
    lost, duplicates, damaged = result["lost"], result["duplicates"], result["damaged"]
    lines.append(
        f"{result['reconnects']} connections cut: {lost} messages lost, {duplicates} duplicates, "
        f"{damaged} damaged, {result['resent_bytes'] / MIB:.1f} MiB sent again"
    )
    return "\n".join(lines)


def _receive(kind: str) -> None:
    fields = json.loads(sys.stdin.readline())
    identity = Identity(**{key: pem.encode() for key, pem in fields.items()})
    if kind == "plain":
        _receive_plain(identity)
    else:
        _run_loop({"asyncio": _receive_asyncio, "session": _receive_session}[kind](identity))


if __name__ == "__main__":
    _receive(sys.argv[1])
