"""What machines say to each other: the control plane's messages and the header of every tensor on the data plane.

Pure: msgspec structs and their checks, no sockets. Control messages travel as msgpack over a WebSocket between the
broker and everyone else; tensor headers are the `meta` of a Session message between two machines. Every field is
checked here once, at the door; an unknown field, an unknown message or an over-long one is refused.
"""

from __future__ import annotations

import re
from contextlib import suppress
from enum import IntEnum
from typing import Literal, TypeVar

import msgspec

from fusionllm.errors import RemoteProtocolError, UserError
from fusionllm.ir.cluster import LinkProfile, NodeProfile, Precision
from fusionllm.ir.init import Init
from fusionllm.ir.plan import Plan

#: Version of the control plane. A node of another version is refused at join with both numbers.
CONTROL_VERSION = 4
MAX_CONTROL_BYTES = 300 << 20
#: What a machine that has not joined yet may send.
MAX_JOIN_BYTES = 64 << 10
#: Of an offer of weights and its answer.
MAX_OFFER_BYTES = 64 << 20
#: Of a job: stages, microbatches of a step, rows of a microbatch.
MAX_STAGES, MAX_MICROBATCHES, MAX_ROWS = 1024, 1 << 16, 1 << 20
#: A host name, or an address of IPv4 or IPv6.
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9a-fA-F:.]{2,45}")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

Role = Literal["node", "owner"]


class Priority(IntEnum):
    """What goes first on a link: the pipeline's own values, then orders, inputs, gradients of the step, weights."""

    VALUE = 0
    ORDER = 2
    INPUT = 3
    TIED = 4
    STATE = 8


TensorKind = Literal[
    "input",
    "activation",
    "gradient",
    "tied",
    "output",
    "weight",
    "optimizer",
    "codec",
    "step",
    "fetch",
    "done",
    "probe",
    "offer",
    "want",
]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of control messages: tagged with the class name."""


class LinkShape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What outgoing bytes are slowed down to: a rate in bytes per second, > 0, and a one-way latency in seconds."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0


class FenceLink(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An emulated link between two fences, both directions."""

    fence_a: str
    fence_b: str
    shape: LinkShape


class FenceLine(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all nodes of a fence share towards others, as its owner declares it: bytes per second out and in."""

    fence: str
    up_bytes_per_s: float
    down_bytes_per_s: float


class Peer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a machine listens for tensors, and how the way to it is paced (None: as fast as the wire goes)."""

    host: str
    port: int
    shape: LinkShape | None = None


class Compression(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What links do to what crosses them: codecs as `ir.codec` writes them.

    Attributes:
        forward: of activations. backward: of their gradients.
        links: ``slow`` for those between fences, ``all``.
        tied: of gradients that stages which share a parameter exchange, ``ef(...)`` with a state per parameter.
        rule: instead of these codecs, one of `schedule.ratios`, with its ``ratio`` and ``floor``; an empty floor is
            that of a pretrained model.
        rule_every: steps after which ``deadline`` is applied again to what was measured meanwhile; 0: never.
    """

    forward: str = "identity"
    backward: str = "identity"
    links: Literal["slow", "all"] = "slow"
    tied: str = "identity"
    rule: str = ""
    ratio: float = 100.0
    floor: str = ""
    rule_every: int = 0


class LinkCodecs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The codecs of the link between two stages: of the values that go forward, of the gradients that come back."""

    forward: str
    backward: str


class LinkChoice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All codecs that messages of a link may name beside dense: the owner's orders say which one a step uses."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


class Recoded(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A link, ``"a->b"``, shall use other codecs from the next step ordered on; ``why`` is empty for no news."""

    link: str
    codecs: LinkCodecs
    why: str = ""


class JobOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the broker needs to plan, and what it passes on unread (``optim``, ``compute``: JSON of their room).

    ``max_length``: of a sequence, where the graph leaves that open.
    """

    num_stages: int
    partition: str
    pipeline: str
    num_microbatches: int
    microbatch_size: int
    max_length: int = 0
    num_steps: int
    optim: bytes
    compute: bytes
    compression: Compression = Compression()
    fence_links: tuple[FenceLink, ...] = ()
    fence_lines: tuple[FenceLine, ...] = ()
    owner_fence: str = ""
    stall_s: float = 60.0
    allow_ops: tuple[str, ...] = ()


# everyone -> broker


class Join(_Message, frozen=True, kw_only=True):
    version: int
    role: Role
    name: str
    token: str
    public_key_pem: bytes
    fence: str = ""
    backend: str = ""
    opset: int = 1
    versions: dict[str, str] = {}


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node can do, known once its framework is loaded.

    Attributes:
        operators: those of `ir.ops.OPS` that its backend executes. optimizers: those it has, by name.
        dtypes: of tensors, by name. codecs: whether it has those beyond dense.
    """

    device: str
    operators: tuple[str, ...]
    optimizers: tuple[str, ...]
    dtypes: tuple[str, ...]
    codecs: bool


class Listening(_Message, frozen=True, kw_only=True):
    """Where a machine takes tensors; a node also says what it can do."""

    host: str
    port: int
    offer: Offer | None = None


class Leave(_Message, frozen=True, kw_only=True):
    reason: str


# owner -> broker


class Submit(_Message, frozen=True, kw_only=True):
    graph: bytes
    options: JobOptions


class EndJob(_Message, frozen=True, kw_only=True):
    job: str
    reason: str = ""


# node -> broker


class StageReady(_Message, frozen=True, kw_only=True):
    job: str
    stage_index: int


class StageDone(_Message, frozen=True, kw_only=True):
    """The stage holds the gradients of a step.

    Attributes:
        square_sum: its share of the squared global norm.
        sent_bytes: peer -> bytes sent to it since the job began.
        overflow: the scaled gradients left the range of float16; the step is committed with an infinite norm.
        peak_bytes: memory the node has needed at most.
        links: peer -> the way to it as the job's own traffic shows it, where that can be told.
        compute_s: seconds that the forwards and backwards of the step took, coding left out.
        errors: ``"peer kind"`` -> squared error, over the square, of the last message of that kind looked at.
    """

    job: str
    stage_index: int
    seq: int
    square_sum: float
    sent_bytes: dict[str, int] = {}
    overflow: bool = False
    peak_bytes: int = 0
    links: dict[str, LinkProfile] = {}
    compute_s: float = 0.0
    errors: dict[str, float] = {}


class StageFailed(_Message, frozen=True, kw_only=True):
    job: str
    stage_index: int
    message: str


class Calibrated(_Message, frozen=True, kw_only=True):
    """What the device of this node can do in a precision."""

    profile: NodeProfile
    precision: Precision


class Probed(_Message, frozen=True, kw_only=True):
    """What the way to ``peer`` can do; ``reason`` says why there is none."""

    peer: str
    profile: LinkProfile
    reason: str = ""


# broker -> node


class Calibrate(_Message, frozen=True, kw_only=True):
    """Measure your device as it trains in a precision."""

    precision: Precision


class Probe(_Message, frozen=True, kw_only=True):
    """Let ``peer`` in; with ``measure`` send it up to ``num_bytes`` and say how that went."""

    peer: str
    address: Peer
    measure: bool
    num_bytes: int = 0


# broker -> everyone


class Welcome(_Message, frozen=True, kw_only=True):
    name: str
    cert_pem: bytes
    ca_pem: bytes


class Refused(_Message, frozen=True, kw_only=True):
    reason: str


class Assign(_Message, frozen=True, kw_only=True):
    """A stage for a node: everything it needs but the weights, which the owner sends.

    Attributes:
        producers, consumers: value id -> the stage that makes it, the stages that want it.
        codecs: other stage -> codecs that the link with it may use, where that is not always dense.
    """

    job: str
    stage_index: int
    stage_nodes: tuple[str, ...]
    owner: str
    graph: bytes
    producers: dict[str, int]
    consumers: dict[str, tuple[int, ...]]
    tied: dict[str, tuple[int, ...]]
    peers: dict[str, Peer]
    options: JobOptions
    codecs: dict[int, LinkChoice] = {}


class Planned(_Message, frozen=True, kw_only=True):
    """The owner's share of a plan: who runs what, and which inputs and tensors each stage wants.

    Attributes:
        codecs: links that do not send everything dense at first, ``"a->b"`` by node.
        predicted_step_s: of a planned job, with what other ways would have taken; 0 where nothing was measured.
        found_fences: of nodes that joined without a fence, by the links that were measured.
        backends: of the plan's nodes, by name. left_out: nodes that were there, and why they have no stage.
    """

    job: str
    plan: Plan
    inputs: tuple[tuple[str, ...], ...]
    tensors: tuple[tuple[str, ...], ...]
    peers: dict[str, Peer]
    codecs: dict[str, LinkCodecs] = {}
    predicted_step_s: float = 0.0
    others: dict[str, float] = {}
    found_fences: tuple[tuple[str, ...], ...] = ()
    backends: dict[str, str] = {}
    left_out: dict[str, str] = {}


class Start(_Message, frozen=True, kw_only=True):
    job: str


class Commit(_Message, frozen=True, kw_only=True):
    """All stages update now; with an infinite ``total_norm`` they leave the step out.

    To the owner only: ``link_bytes``, ``"a->b"`` -> bytes since the job began; ``link_errors``, ``"a->b kind"`` -> the
    squared error of its codec; ``peak_bytes``, node -> memory it has needed at most; ``recoded``, links that change.
    """

    job: str
    seq: int
    total_norm: float
    link_bytes: dict[str, int] = {}
    link_errors: dict[str, float] = {}
    peak_bytes: dict[str, int] = {}
    recoded: tuple[Recoded, ...] = ()


class JobFailed(_Message, frozen=True, kw_only=True):
    job: str
    reason: str


class Waiting(_Message, frozen=True, kw_only=True):
    """The job waits for machines: how many it needs, how many are idle and who, how many have another job."""

    needed: int
    idle: int
    names: tuple[str, ...] = ()
    busy: int = 0


Control = (
    Join
    | Listening
    | Leave
    | Submit
    | EndJob
    | StageReady
    | StageDone
    | StageFailed
    | Calibrated
    | Probed
    | Calibrate
    | Probe
    | Welcome
    | Refused
    | Assign
    | Planned
    | Start
    | Commit
    | JobFailed
    | Waiting
)


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a payload on the data plane is.

    Attributes:
        job: id of the job, so that a late tensor of an earlier one is dropped.
        seq: sequence number of the step (training and evaluation steps count on together).
        microbatch_index: -1 where it has no meaning.
        key: value id, parameter name, or optimizer tensor name.
        dtype, shape, codec: of the dense value, and how the payload encodes it.
    """

    kind: TensorKind
    job: str
    seq: int
    microbatch_index: int
    key: str
    dtype: str
    shape: tuple[int, ...]
    codec: str = "identity"


class StepOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Payload of a ``step`` message: what the owner wants done next.

    Attributes:
        step: index of the training step from 0 (it seeds dropout and sets the learning rate).
        rows: rows of each microbatch; a last short batch has fewer or smaller ones.
        train: False for an evaluation step: forward only, nothing changes.
        codecs: other stage -> codecs of the link with it in this step; a link left out sends dense.
        tied: whether gradients of tied parameters go by the job's codec for them.
    """

    seq: int
    step: int
    rows: tuple[int, ...]
    train: bool = True
    codecs: dict[int, LinkCodecs] = {}
    tied: bool = False


class TensorOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of an offer: how it begins, or its name in a folder of safetensors and the SHA-256 of its bytes."""

    name: str
    source_name: str = ""
    sha256: str = ""
    init: Init | None = None


class WeightOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Payload of an ``offer``: what a stage may get without the owner. The answer is a `WeightWish`.

    Attributes:
        places: addresses of folders of safetensors. seed: of the run, for initial values.
    """

    places: tuple[str, ...] = ()
    seed: int = 0
    tensors: tuple[TensorOffer, ...] = ()


class WeightWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Payload of a ``want``: the tensors that the owner must send."""

    names: tuple[str, ...] = ()


class Ticket(msgspec.Struct, frozen=True):
    """All that joining needs, as one word: ``fusion1:HOST:PORT:FINGERPRINT:TOKEN``."""

    host: str
    port: int
    fingerprint: str
    token: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"fusion1:{host}:{self.port}:{self.fingerprint}:{self.token}"


_TICKET = re.compile(
    r"fusion(\d+):([A-Za-z0-9._-]{1,253}|\[[0-9a-fA-F:.]+\]):(\d{1,5}):([0-9a-f]{64}):([A-Za-z0-9_-]{8,128})"
)


def parse_ticket(text: str) -> Ticket:
    """Read a join ticket. Raises UserError naming what is wrong with it."""
    match = _TICKET.fullmatch(text.strip())
    if match is None:
        shown = text[:40] + "..." * (len(text) > 40)
        raise UserError(
            f"{shown!r} is not a join ticket; copy the whole line that `fusionllm broker` prints, "
            "it looks like fusion1:HOST:PORT:FINGERPRINT:TOKEN"
        )
    if match[1] != "1" or not 0 < int(match[3]) < 65536:
        raise UserError(
            f"ticket of version {match[1]} and port {match[3]}; this program reads version 1, ports 1-65535"
        )
    return Ticket(match[2].strip("[]"), int(match[3]), match[4], match[5])


class _AnyJoin(msgspec.Struct, tag="Join"):
    """What a Join of every version has in common."""

    version: int


_encode = msgspec.msgpack.Encoder().encode
_decode_any_join = msgspec.msgpack.Decoder(_AnyJoin)
_decode_control = msgspec.msgpack.Decoder(Control)
_decode_header = msgspec.msgpack.Decoder(TensorHeader)
_decode_order = msgspec.msgpack.Decoder(StepOrder)
_decode_offer = msgspec.msgpack.Decoder(WeightOffer)
_decode_wish = msgspec.msgpack.Decoder(WeightWish)
_M = TypeVar("_M", bound=msgspec.Struct)


def encode_message(message: msgspec.Struct) -> bytes:
    """A control message, tensor header or step order as msgpack."""
    return _encode(message)


def _checked(decoder: msgspec.msgpack.Decoder[_M], data: bytes | memoryview, what: str) -> _M:
    try:
        return decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RemoteProtocolError(f"bad {what}: {error}") from None


def check_version(version: int) -> None:
    """Raises RemoteProtocolError for a control plane other than ours."""
    if version != CONTROL_VERSION:
        raise RemoteProtocolError(
            f"protocol version {version}, this broker speaks {CONTROL_VERSION}; "
            "install the same FusionLLM release on both"
        )


def decode_control(data: bytes) -> Control:
    """Read a control message from outside. Raises RemoteProtocolError, which names a Join's version if it differs."""
    try:
        return _checked(_decode_control, data, "control message")
    except RemoteProtocolError:
        with suppress(msgspec.ValidationError, msgspec.DecodeError):  # another version's Join may have other fields
            check_version(_decode_any_join.decode(data).version)
        raise


def decode_header(data: bytes) -> TensorHeader:
    """Read a tensor header from outside. Raises RemoteProtocolError."""
    header = _checked(_decode_header, data, "tensor header")
    if any(size < 0 for size in header.shape) or len(header.shape) > 16:
        raise RemoteProtocolError(f"bad tensor header: shape {list(header.shape)[:17]}")
    return header


def decode_offer(data: bytes | memoryview) -> WeightOffer:
    """Read an offer of weights from outside. Raises RemoteProtocolError."""
    return _checked(_decode_offer, data, "offer of weights")


def decode_wish(data: bytes | memoryview) -> WeightWish:
    """Read which weights a stage wants. Raises RemoteProtocolError."""
    return _checked(_decode_wish, data, "list of weights")


def decode_order(data: bytes | memoryview) -> StepOrder:
    """Read a step order from outside. Raises RemoteProtocolError."""
    order = _checked(_decode_order, data, "step order")
    if not order.rows or min(order.rows) < 1 or order.step < 0 or len(order.rows) > MAX_MICROBATCHES:
        raise RemoteProtocolError(f"bad step order: step {order.step}, rows {list(order.rows)[:8]}")
    return order
