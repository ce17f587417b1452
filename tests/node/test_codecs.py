"""A stage's links: what may come in, what travels, what both ends keep."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionllm.compute.wire import dtype_name
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.codec import IDENTITY, parse_codec, wire_num_bytes
from fusionllm.ir.graph import OpGraph, Value
from fusionllm.ir.tensor import TensorSpec
from fusionllm.node.codecs import StageCodecs, check_payload, parse_state_key
from fusionllm.node.door import Door
from fusionllm.node.guard import FIRST, STRIKES
from fusionllm.protocol.messages import LinkChoice, LinkCodecs, TensorHeader
from fusionllm.protocol.stage import OWNER

LINK = LinkCodecs("hadamard", "tangent(hadamard:bits=2)")
CHOICE = LinkChoice(("int8", LINK.forward), (LINK.backward,))


def header(kind: str, tensor: torch.Tensor, codec: str, microbatch_index: int = 0, seq: int = 0) -> TensorHeader:
    return TensorHeader(kind, "job1", seq, microbatch_index, "v", dtype_name(tensor), tuple(tensor.shape), codec)


def carry(sender, receiver, kind, tensor, microbatch_index=0, link=LINK) -> tuple[torch.Tensor, str, int]:
    """Send from stage 0 to stage 1 or back, through the door."""
    to, source = (1, 0) if kind == "activation" else (0, 1)
    codec, payload = sender.encode(kind, to, 0, microbatch_index, "v", tensor, link)
    data = bytearray(b"".join(payload))
    head = header(kind, tensor, codec, microbatch_index)
    check_payload(head, len(data), CHOICE)
    return receiver.decode(source, head, data), codec, len(data)


def ends() -> tuple[StageCodecs, StageCodecs]:
    return StageCodecs({1: CHOICE}), StageCodecs({0: CHOICE})


@settings(max_examples=20)
@given(rows=st.integers(1, 5), width=st.sampled_from([8, 64]), order=st.permutations(range(3)))
def test_gradients_find_their_activation_whatever_the_order_of_microbatches(rows, width, order):
    first, second = ends()
    torch.manual_seed(rows)
    activations = [torch.randn(rows, width) for _ in range(3)]
    seen = [carry(first, second, "activation", x, i)[0] for i, x in enumerate(activations)]
    for index in order:
        gradient = torch.randn(rows, width)
        decoded, codec, _ = carry(second, first, "gradient", gradient, index)
        if codec == LINK.backward:  # its component along the activation came through, up to float16
            kept = (decoded * activations[index]).sum(1)
            assert torch.allclose(kept, (gradient * seen[index]).sum(1), atol=2e-2 * width)


def restored(codecs: StageCodecs, links: dict[int, LinkChoice]) -> StageCodecs:
    """Another one with its state, as a checkpoint brings it."""
    other = StageCodecs(links)
    for key, tensor in codecs.state().items():
        data = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        other.load(key, dtype_name(tensor), tuple(tensor.shape), data)
    return other


@pytest.mark.parametrize("codec", ["klt:rate=2", "klt-ec:rate=2", "outlier:channels=2"])
def test_state_brought_back_sends_the_same_and_reads_it(codec):
    link = LinkCodecs(codec, f"tangent({codec})")
    choice = LinkChoice((link.forward,), (link.backward,))
    first, second = StageCodecs({1: choice}), StageCodecs({0: choice})
    torch.manual_seed(1)
    mixing = torch.randn(16, 16)

    def exchange(first: StageCodecs, second: StageCodecs, index: int, x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for kind, a, b, to in (("activation", first, second, 1), ("gradient", second, first, 0)):
            spec, payload = a.encode(kind, to, index, 0, "v", x, link)
            head = header(kind, x, spec, seq=index)
            found.append(b.decode(1 - to, head, bytearray(b"".join(payload))))
        return found

    xs = [torch.randn(64, 16) @ mixing for _ in range(7)]
    for index, x in enumerate(xs[:4]):
        exchange(first, second, index, x)
    again = restored(first, {1: choice}), restored(second, {0: choice})
    for index, x in enumerate(xs[4:], 4):
        a, b = exchange(first, second, index, x), exchange(*again, index, x)
        assert all(map(torch.equal, a, b))
    fresh = exchange(StageCodecs({1: choice}), StageCodecs({0: choice}), 9, xs[6])
    assert not torch.equal(fresh[0], a[0])


WAY = ("activation", 1, "hadamard")


def test_a_way_given_up_stays_given_up():
    first, _ = ends()
    for error in [0.02] * FIRST + [0.5] * STRIKES:
        first.guard.wants(WAY)
        first.guard.note(WAY, error)
    again = restored(first, {1: CHOICE})
    assert again.guard.is_dense(WAY) and again.guard.state() == first.guard.state()


@pytest.mark.parametrize(
    "key",
    ["", "send/activation/1/v/klt", "keep/activation/1/v/klt/x", "send/weight/1/v/klt/x", "send/gradient/-1/v/k/x"],
)
def test_a_key_that_names_no_state_is_refused(key):
    with pytest.raises(RemoteProtocolError, match="names no state"):
        parse_state_key(key)


def test_dense_may_step_in_for_any_message():
    first, second = ends()
    x = torch.randn(4, 64)
    y, codec, _ = carry(first, second, "activation", x, link=None)
    assert codec == str(IDENTITY) and torch.equal(x, y)
    broken = torch.full((4, 64), torch.nan)
    y, codec, _ = carry(first, second, "activation", broken, 1)
    assert codec == str(IDENTITY) and bool(y.isnan().all())
    _, codec, num_bytes = carry(first, second, "activation", x, 2)
    assert codec == "hadamard" and num_bytes == wire_num_bytes(parse_codec("hadamard"), (4, 64), "float32")


@pytest.mark.parametrize(
    ("kind", "codec", "num_bytes", "words"),
    [
        ("activation", "identity", 1023, "sent dense"),
        ("activation", "cast", 512, "this link has int8, hadamard"),
        ("activation", "hadamard:bits=2", 66, "this link has int8, hadamard"),
        ("activation", "x" * 10_000, 1, "this link has int8, hadamard"),
        ("activation", "hadamard", 1 << 40, "takes exactly"),
        ("gradient", "hadamard", 136, "this link has tangent"),
        ("weight", "hadamard", 136, "this link has identity"),
        ("input", "hadamard", 136, "this link has identity"),
    ],
)
def test_a_payload_the_link_does_not_allow_is_refused_by_its_header(kind, codec, num_bytes, words):
    with pytest.raises(RemoteProtocolError, match=words):
        check_payload(header(kind, torch.zeros(4, 64), codec), num_bytes, CHOICE)


def test_a_link_changes_its_codec_between_two_messages_and_back():
    first, second = ends()
    x, other = torch.randn(4, 64), LinkCodecs("int8", LINK.backward)
    names = [carry(first, second, "activation", x, i, link)[1] for i, link in enumerate((LINK, other, None, LINK))]
    assert names == ["hadamard", "int8", "identity", "hadamard"]


def test_an_order_of_a_codec_that_is_not_the_links_is_refused():
    first, _ = ends()
    first.check({1: LinkCodecs("identity", LINK.backward)})
    for orders in ({1: LinkCodecs("cast", "identity")}, {1: LinkCodecs("int8", "int8")}, {2: LINK}):
        with pytest.raises(RemoteProtocolError, match="an order of codec"):
            first.check(orders)


def test_a_gradient_without_its_activation_is_refused():
    first, second = ends()
    carry(first, second, "activation", torch.randn(4, 64))
    codec, payload = second.encode("gradient", 0, 0, 0, "v", torch.randn(4, 64), LINK)
    data = bytearray(b"".join(payload))
    first.finish(0)
    with pytest.raises(RemoteProtocolError, match="without its activation"):
        first.decode(1, header("gradient", torch.zeros(4, 64), codec), data)


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_payloads_are_refused_or_decoded_to_the_declared_shape(data):
    first, second = ends()
    x = torch.randn(4, 64)
    codec, payload = first.encode("activation", 1, 0, 0, "v", x, LINK)
    raw = bytearray(b"".join(payload))
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        y = second.decode(0, header("activation", x, codec), raw)
    except RemoteProtocolError:
        return
    assert y.shape == x.shape and y.dtype == x.dtype


@pytest.mark.parametrize(
    ("key", "num_bytes", "source"),
    [
        ("send/activation/1/x/klt/covariance", 8 * 64 * 64 + 1, OWNER),
        ("send/activation/1/x/klt/covariance", 1, 1),
        ("send/activation/2/x/klt/covariance", 1, OWNER),
        ("send/activation/1/y/klt/covariance", 1, OWNER),
        ("guard/activation/1///looks", 65, OWNER),
    ],
)
def test_state_of_no_link_or_too_large_is_refused_at_the_door(key, num_bytes, source):
    x = Value("x", TensorSpec("float32", ("B", 64)))
    graph = OpGraph(symbols={"B": 1}, inputs=(), params={}, ops=(), outputs=("x",), recv=(x,))
    door = Door(SimpleNamespace(codecs={1: CHOICE}, options=SimpleNamespace(microbatch_size=4, max_length=0)), graph)
    good = TensorHeader("codec", "job1", 0, -1, "send/activation/1/x/klt/covariance", "float32", (64, 64))
    door.admit(OWNER, good, 4 * 64 * 64)
    with pytest.raises(RemoteProtocolError, match="bytes of codec state"):
        door.admit(source, msgspec.structs.replace(good, key=key), num_bytes)
