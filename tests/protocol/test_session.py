"""Sessions over a stream that breaks at any byte: all arrives, whole, once; hostile peers gain nothing."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fusionllm.errors import LinkBroken, LinkClosed, LocalProtocolError, RemoteProtocolError
from fusionllm.protocol import session as machine
from fusionllm.protocol.frames import Credit, Data, Hello, Ping, checksum_of, encode_frame
from fusionllm.protocol.outbox import MESSAGE_OVERHEAD_BYTES
from fusionllm.protocol.session import Session, SessionConfig

CONFIG = SessionConfig(chunk_bytes=1100, window_bytes=9000, max_message_bytes=40_000, recycle_bytes=1 << 20)


class Side:
    """A session with the bytes it wrote that are still on their way."""

    def __init__(self, name: str, peer: str, incarnation: int = 1, epoch: int = 1, config=CONFIG, admit=None) -> None:
        self.session = Session(name, peer, incarnation, epoch, config, 0.0, admit)
        self.on_the_way = bytearray()
        self.delivered: list[tuple[bytes, bytes]] = []
        self.held = 0
        self.closed: list[str] = []
        self.ended: Exception | None = None
        self.now_s = 0.0

    def run(self, event) -> None:
        for command in self.session.handle(event):
            if isinstance(command, machine.Write):
                data = b"".join(bytes(buffer) for buffer in command.buffers)
                assert len(data) == command.num_bytes
                self.on_the_way += data
            elif isinstance(command, machine.Deliver):
                self.delivered.append((command.meta, bytes(command.payload)))
                self.held += len(command.payload)
            elif isinstance(command, machine.CloseWire):
                self.on_the_way += command.farewell
                self.closed.append(command.reason)
            elif isinstance(command, machine.End):
                self.on_the_way += command.farewell
                self.ended = command.error

    def post(self, meta: bytes, payload: bytes, priority: int = 1) -> None:
        view = memoryview(payload)
        half = len(payload) // 2
        pieces = (view[:half], view[half:]) if half else (view,) if payload else ()
        self.run(machine.Post(meta, pieces, priority))

    def write_once(self) -> bool:
        if not self.session.wants_write:
            return False
        before = len(self.on_the_way)
        self.run(machine.Writable(1 << 18, self.now_s))
        assert len(self.on_the_way) > before, "wants_write, but wrote nothing"
        return True

    def take(self, data: bytes) -> None:
        """Receive bytes, until the wire is closed."""
        offset = 0
        while offset < len(data) and not self.closed and self.ended is None:
            target = self.session.get_buffer()
            size = min(len(target), len(data) - offset)
            target[:size] = data[offset : offset + size]
            offset += size
            self.run(machine.Received(size, self.now_s))

    def consume(self) -> None:
        self.run(machine.Consumed(self.held))
        self.held = 0


class Pair:
    """Two sides and the wire between them."""

    def __init__(self, **options) -> None:
        self.a, self.b = Side("a", "b", **options), Side("b", "a", **options)
        self.connect()

    def connect(self) -> None:
        for side in (self.a, self.b):
            side.on_the_way.clear()
            side.closed.clear()
            side.run(machine.WireUp(side.now_s))

    def cut(self) -> None:
        for side in (self.a, self.b):
            side.run(machine.WireLost(side.now_s, "cut"))
        self.connect()

    def move(self, source: Side, num_bytes: int) -> None:
        data = bytes(source.on_the_way[:num_bytes])
        del source.on_the_way[:num_bytes]
        (self.b if source is self.a else self.a).take(data)

    def settle(self) -> None:
        """Write, move and consume until nothing happens any more."""
        busy = True
        while busy:
            busy = False
            for side in (self.a, self.b):
                while side.write_once():
                    busy = True
                busy |= bool(side.on_the_way or side.held)
                self.move(side, 1 << 20)
                side.consume()


sizes = st.one_of(st.integers(0, 40), st.sampled_from([1039, 1040, 1041, 2500, 4000, 20_000]))
messages = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 2)), max_size=12)


@settings(max_examples=120)
@given(messages, st.integers(0, 1 << 32), st.integers(0, 12))
def test_everything_arrives_once_and_whole_over_random_cuts(sends, seed, num_cuts):
    rng, pair = random.Random(seed), Pair()
    posts = [(pair.a if to_b else pair.b, size, priority) for to_b, size, priority in sends]
    expected: dict[str, Counter] = {"a": Counter(), "b": Counter()}
    cuts_left = num_cuts
    for step in range(400):
        action = rng.randrange(8)
        side = rng.choice((pair.a, pair.b))
        if posts and action == 0:
            sender, size, priority = posts.pop()
            payload, meta = rng.randbytes(size), b"%d" % step
            sender.post(meta, payload, priority)
            expected["b" if sender is pair.a else "a"][meta, payload] += 1
        elif action == 1 and cuts_left and rng.random() < 0.2:
            cuts_left -= 1
            pair.cut()
        elif action == 2:
            side.consume()
        elif action < 5:
            side.write_once()
        else:
            pair.move(side, rng.choice((1, 7, 300, 5000)))
    for sender, size, priority in posts:
        payload = rng.randbytes(size)
        sender.post(b"late", payload, priority)
        expected["b" if sender is pair.a else "a"][b"late", payload] += 1
    pair.settle()
    assert Counter(pair.a.delivered) == expected["a"]
    assert Counter(pair.b.delivered) == expected["b"]
    for side in (pair.a, pair.b):
        assert side.ended is None and not side.closed
        assert len(side.session.outbox) == side.session.outbox.queued_bytes == 0
        assert side.session.inbox.duplicates == 0


@pytest.mark.parametrize("direction", ["a", "b"])
def test_a_cut_at_every_single_byte_loses_nothing(direction):
    rng = random.Random(1)
    payloads = [rng.randbytes(size) for size in (0, 1500, 3)]

    def run(cut_at: int | None) -> int:
        pair, moved = Pair(), 0
        for index, payload in enumerate(payloads):
            pair.a.post(b"%d" % index, payload)
        source = pair.a if direction == "a" else pair.b
        for _ in range(12):
            for side in (pair.a, pair.b):
                while side.write_once():
                    pass
                size = len(side.on_the_way)
                if side is source and cut_at is not None and moved + size >= cut_at:
                    pair.move(side, cut_at - moved)
                    pair.cut()
                    cut_at = None
                    continue
                moved += size if side is source else 0
                pair.move(side, size)
                side.consume()
        assert [payload for _, payload in sorted(pair.b.delivered)] == payloads
        return moved

    for cut_at in range(1, run(None) + 1):
        run(cut_at)


def test_a_resumed_message_continues_where_the_peer_stands():
    pair = Pair()
    pair.settle()
    pair.a.post(b"m", bytes(8000))
    for _ in range(4):
        pair.a.write_once()
    pair.move(pair.a, 3 * 1100)
    pair.cut()
    pair.settle()
    assert [len(payload) for _, payload in pair.b.delivered] == [8000]
    assert 0 < pair.a.session.outbox.resent_bytes <= 2 * 1100


def test_urgent_messages_overtake_bulk_ones_half_way():
    pair = Pair()
    pair.settle()
    pair.a.post(b"bulk", bytes(6000), priority=5)
    pair.a.write_once()
    pair.a.post(b"urgent", b"now", priority=0)
    pair.settle()
    assert [meta for meta, _ in pair.b.delivered] == [b"urgent", b"bulk"]


def test_unconsumed_messages_bound_the_receivers_memory():
    pair = Pair()
    for index in range(50):
        pair.a.post(b"%d" % index, bytes(1000))
    for _ in range(100):
        for side in (pair.a, pair.b):
            while side.write_once():
                pass
            pair.move(side, 1 << 20)
    assert len(pair.b.delivered) == CONFIG.window_bytes // (1000 + MESSAGE_OVERHEAD_BYTES)
    pair.settle()
    assert len(pair.b.delivered) == 50


def test_credit_that_is_small_change_is_told_with_the_heartbeat():
    pair = Pair()
    pair.settle()
    pair.a.post(b"small", bytes(500))
    pair.a.post(b"small", bytes(500))
    while pair.a.write_once():
        pass
    pair.move(pair.a, 1 << 20)
    pair.b.write_once()
    pair.move(pair.b, 1 << 20)
    pair.b.run(machine.Consumed(500))  # one of two: too little to announce at once
    assert not pair.b.session.wants_write
    pair.a.post(b"large", bytes(7400))
    assert not pair.a.session.outbox.can_send()
    for side in (pair.a, pair.b):
        side.now_s = 2.5
        side.run(machine.Tick(2.5))
    for _ in range(20):
        for side in (pair.a, pair.b):
            while side.write_once():
                pass
            pair.move(side, 1 << 20)
    assert len(pair.b.delivered) == 3


def hello(node="b", incarnation=5, epoch=1, peer_incarnation=0, peer_epoch=0, next_in=1, consumed=0, partial=None):
    return encode_frame(
        Hello(
            node,
            incarnation,
            epoch,
            peer_incarnation,
            peer_epoch,
            9000,
            next_in,
            b"",
            consumed,
            partial or {},
        )
    )


def data(message_id=1, offset=0, total=4, payload=b"abcd", checksum=None, meta=b"") -> bytes:
    checksum = checksum_of(payload) if checksum is None else checksum
    return encode_frame(Data(message_id, offset, total, checksum, meta), len(payload)) + payload


def wired(frames: bytes = b"", **options) -> Side:
    """A side whose peer wrote ``frames``."""
    side = Side("a", "b", **options)
    side.run(machine.WireUp(0.0))
    side.take(frames)
    return side


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (data(total=40_001), "over the limit of 40000 bytes"),
        (data(total=1 << 62), "over the limit of 40000 bytes"),
        (data(offset=4, total=8), "starts at byte 4"),
        (data() + data(2, total=8) + data(2, offset=2, total=8), "chunk at 2 of 8 bytes, expected at 4 of 8"),
        (data(2, total=8) + data(2, offset=4, total=9), "chunk at 4 of 9 bytes, expected at 4 of 8"),
        (data(total=3), "a chunk of 4 bytes at 0 of 3"),
        (data(payload=b""), "a chunk of 0 bytes at 0 of 4"),
        (data(checksum=0), "bad checksum of 4 bytes at 0"),
        (data(message_id=5000), "allowed are ids below"),
        (b"".join(data(mid, total=100) for mid in range(1, 20)), "goes over the credit"),
        (encode_frame(Credit(0, 9)), "acknowledges message 8 and 0 bytes; sent were 0 messages"),
        (encode_frame(Credit(0, 1, b"\x04")), "acknowledges message 3"),
        (encode_frame(Credit(99, 1)), "acknowledges message 0 and 99 bytes"),
        (hello(), "a second Hello"),
        (b"GET / HTTP/1.1\r\n" + bytes(64), "it starts with b'GE'"),
    ],
)
def test_hostile_frames_close_the_wire_and_are_named(frame, message):
    side = wired(hello() + frame)
    assert len(side.closed) == 1 and message in side.closed[0], side.closed
    assert side.ended is None


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (hello(node="c"), "calls itself 'c', its certificate says 'b'"),
        (data(), "a Data frame before Hello"),
        (encode_frame(Ping(1)), "a Ping frame before Hello"),
        (hello().replace(b"FL\x01", b"FL\x02", 1), "speaks protocol version 2, this side speaks 1"),
        (hello(partial={0: 4}), "claims to hold 4 bytes of message 1"),
    ],
)
def test_a_peer_that_cannot_even_say_hello_is_given_up(frame, message):
    side = wired(frame)
    assert isinstance(side.ended, LinkBroken) and message in str(side.ended)


def test_a_peer_that_spoils_every_wire_is_given_up():
    side = wired(hello() + data(checksum=0))
    while side.ended is None:
        side.closed.clear()
        side.run(machine.WireUp(0.0))
        side.take(hello(peer_incarnation=1, peer_epoch=1) + data(checksum=0))
    assert "bad checksum" in str(side.ended) and side.session.wires == 8


def test_a_bad_checksum_is_healed_by_sending_the_chunk_again():
    side = wired(hello() + data(total=8) + data(offset=4, total=8, checksum=1))
    assert not side.delivered and "bad checksum" in side.closed[0]
    side.closed.clear()
    side.on_the_way.clear()
    side.run(machine.WireUp(0.0))
    side.take(hello(peer_incarnation=1, peer_epoch=1) + data(offset=4, total=8, payload=b"efgh"))
    assert side.delivered == [(b"", b"abcdefgh")]


def test_a_message_sent_twice_is_delivered_once():
    side = wired(hello() + data() + data() + data(2))
    assert len(side.delivered) == 2 and side.session.inbox.duplicates == 1


def test_admit_is_asked_before_memory_is_taken():
    asked = []

    def admit(meta: bytes, total: int) -> None:
        asked.append((meta, total))
        if total > 100:
            raise RemoteProtocolError("no message of that kind is expected")

    side = wired(hello() + data(meta=b"m") + data(2, total=5000), admit=admit)
    assert asked == [(b"m", 4), (b"", 5000)]
    assert "no message of that kind is expected" in side.closed[0]


def test_a_restarted_peer_breaks_the_session_but_may_come_back():
    side = wired(hello(incarnation=5))
    side.run(machine.WireLost(1.0, "cut"))
    side.run(machine.WireUp(2.0))
    side.write_once()
    side.take(hello(incarnation=6))
    assert isinstance(side.ended, LinkBroken) and "restarted" in str(side.ended)
    fresh = Side("b", "a", incarnation=6)
    fresh.run(machine.WireUp(2.0))
    fresh.take(bytes(side.on_the_way))  # our Hello, meant for its predecessor
    assert fresh.ended is None and "an earlier one of us" in fresh.closed[0]


def test_a_peer_that_opened_another_session_breaks_ours():
    side = wired(hello(epoch=1))
    side.run(machine.WireUp(1.0))
    side.take(hello(epoch=2))
    assert "opened another one" in str(side.ended)


def test_a_peer_that_forgot_us_breaks_the_session():
    side = wired(hello() + data())
    side.run(machine.WireUp(1.0))
    side.take(hello())
    assert "no memory of this session" in str(side.ended)


def test_a_peer_whose_first_hello_got_lost_is_no_stranger():
    side = wired(hello())
    side.run(machine.WireUp(1.0))
    side.take(hello())
    assert side.ended is None and side.session.ready


def test_a_session_without_a_wire_ends_after_keep_s_and_says_why():
    side = wired(hello())
    side.run(machine.WireLost(10.0, "cable pulled"))
    side.run(machine.Tick(129.9))
    assert side.ended is None
    side.run(machine.Tick(130.0))
    assert isinstance(side.ended, LinkBroken)
    assert "no wire for 120 s" in str(side.ended) and "cable pulled" in str(side.ended)


def test_silence_closes_the_wire_and_heartbeats_measure_the_round_trip():
    pair = Pair()
    pair.settle()
    pair.a.run(machine.Tick(2.0))
    pair.a.write_once()
    pair.move(pair.a, 1 << 20)
    pair.b.write_once()
    pair.a.now_s = 2.25
    pair.move(pair.b, 1 << 20)
    assert pair.a.session.rtt_s == pytest.approx(0.25)
    pair.a.run(machine.Tick(10.24))
    assert not pair.a.closed
    pair.a.run(machine.Tick(10.25))
    assert "nothing heard from b for 8.0 s" in pair.a.closed[0]


def test_closing_on_purpose_tells_the_peer_why():
    pair = Pair()
    pair.settle()
    pair.a.run(machine.Shut("training is over"))
    pair.move(pair.a, 1 << 20)
    assert isinstance(pair.a.ended, LinkClosed) and isinstance(pair.b.ended, LinkClosed)
    assert "training is over" in str(pair.b.ended)


def test_our_own_mistakes_are_local_errors():
    side = wired(hello())
    with pytest.raises(LocalProtocolError, match="limit is 40000"):
        side.post(b"", bytes(40_001))
    with pytest.raises(LocalProtocolError, match="priority 16"):
        side.post(b"", b"", priority=16)
    with pytest.raises(LocalProtocolError, match="4049 bytes of meta"):
        side.post(bytes(4049), b"")
    with pytest.raises(LocalProtocolError, match="delivered and unconsumed are 0"):
        side.run(machine.Consumed(1))


def test_message_memory_is_used_again_only_when_nobody_holds_it():
    big = SessionConfig(window_bytes=1 << 20, chunk_bytes=1 << 18)
    pair = Pair(config=big)
    kept: list[bytearray] = []
    first = pair.b.session.inbox._recycler.take(1 << 17)
    view = memoryview(first)
    kept.append(first)
    del first
    second = pair.b.session.inbox._recycler.take(1 << 17)
    assert second is not kept[0]
    identity = id(kept[0])
    kept.clear()
    third = pair.b.session.inbox._recycler.take(1 << 17)
    assert id(third) != identity, "the view still looks at it"
    view.release()
    del view
    assert id(pair.b.session.inbox._recycler.take(1 << 17)) == identity
