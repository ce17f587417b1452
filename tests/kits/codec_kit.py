"""The conformance kit that every codec passes. A codec joins with one ``CodecCase`` in ``CASES``.

A check takes a case and a tensor and asserts one promise; ``tests/compress/test_conformance.py`` runs every
check on every case, with tensors drawn by hypothesis.
"""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusionllm import compress
from fusionllm.compress import CodecState, Reference
from fusionllm.compress.codec import TORCH_DTYPES
from fusionllm.errors import RemoteProtocolError, UserError
from fusionllm.ir.codec import CodecSpec, adjoint_codec, codec_spec, parse_codec, verify_codec, wire_num_bytes

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class CodecCase:
    """A codec under test.

    Attributes:
        text: its spec.
        nmse: most squared error over squared norm on normal data, [64, 64] float32.
        worst: the same on anything finite; 1 is as bad as sending zeros.
    """

    text: str
    nmse: float
    worst: float = 1.01

    @property
    def spec(self) -> CodecSpec:
        return parse_codec(self.text)

    def __str__(self) -> str:
        return self.text


#: Bounds: a step of 1/127 or 1/7 of the peak of 64 normal values (2.4 rms) gives step**2 / 12; Lloyd-Max
#: tables for 2 and 1 bit; the energy outside the largest share for the sparse ones.
CASES = [
    CodecCase("identity", 0),
    CodecCase("cast", 1e-5, 1e-4),
    CodecCase("cast:dtype=float16", 1e-6, 1.0),
    CodecCase("cast:dtype=float32", 0),
    CodecCase("int8", 1e-4, 1e-2),
    CodecCase("int8:block=7", 1e-4, 1e-2),
    CodecCase("int4:block=64", 2e-2, 0.5),
    CodecCase("fp8", 1e-3, 1e-2),
    CodecCase("hadamard:bits=8", 1e-4, 1e-2),
    CodecCase("hadamard:bits=6", 2e-3),
    CodecCase("hadamard", 2e-2),
    CodecCase("hadamard:bits=2", 0.13, 1.3),
    CodecCase("hadamard:bits=1", 0.4),
    CodecCase("outlier:bits=6", 2e-3),
    CodecCase("outlier", 2e-2),
    CodecCase("outlier:channels=3,bits=2", 0.13, 1.3),
    CodecCase("topk:ratio=10", 0.6),
    CodecCase("topk:ratio=4,values=int4,index=bitmap", 0.35),
    CodecCase("topk:ratio=4,scope=row,values=bfloat16,index=rice", 0.35),
    CodecCase("topk:ratio=1,values=float32,index=int32", 1e-6),
    CodecCase("topk:ratio=20,index=gaps", 0.8),
    CodecCase("topk-paper:ratio=10", 0.6),
    CodecCase("randomk:ratio=4", 0.85),
    CodecCase("powersgd:rank=64", 1e-4, 1e-3),
    CodecCase("powersgd:rank=2", 1.0),
    CodecCase("ef(topk:ratio=10)", 0.6),
    CodecCase("ef(powersgd:rank=2)", 1.0),
    CodecCase("zstd", 0),
    CodecCase("zstd:level=3(cast)", 1e-5, 1e-4),
    CodecCase("zstd(topk:ratio=10)", 0.6),
    CodecCase("klt:rate=2", 0.13, 1.3),
    CodecCase("klt:rate=0.5,refresh=3", 0.7),
    CodecCase("zstd(klt)", 0.4),
    CodecCase("klt-ec:rate=3", 0.1),
    CodecCase("klt-ec:rate=0.5,refresh=3", 0.8),
    CodecCase("zstd(klt-ec)", 0.5),
    CodecCase("tangent:bits=8(klt-ec)", 0.5, 3.0),
    CodecCase("tangent(klt)", 0.4, 3.0),
    CodecCase("tangent(hadamard:bits=2)", 0.13, 3.0),
    CodecCase("tangent:centre=1(int4)", 3e-2, 3.0),
    CodecCase("same-mask:ratio=10", 0.95),
    CodecCase("tangent(same-mask:ratio=10,values=float16)", 0.95, 3.0),
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Float tensors of awkward shapes and scales.

    0-d, empty, odd, zero, tiny, huge, transposed, with outliers.
    """
    few_axes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17, 33]), max_size=3)
    shape = draw(st.one_of(few_axes, st.lists(st.integers(1, 3), min_size=4, max_size=8)))
    dtype = draw(st.sampled_from(FLOAT_DTYPES))
    scale = draw(st.sampled_from([0.0, 1e-4, 1.0, 1e3] if dtype == "float16" else [0.0, 1e-40, 1e-20, 1.0, 1e20]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        x = x.round()  # many ties and zeros
    x = (x * scale).to(TORCH_DTYPES[dtype])
    return x.t() if x.ndim == 2 and draw(st.booleans()) else x


def reference_for(spec: CodecSpec, x: torch.Tensor) -> Reference | None:
    """A forward message to lean on, where the codec needs one.

    Another tensor, and a mask of the right size.
    """
    if not spec.needs_reference:
        return None
    generator = torch.Generator().manual_seed(1)
    activation = torch.randn(x.shape, generator=generator)
    core = spec.core
    if core.name != "same-mask":
        return Reference(activation)
    forward = parse_codec(f"topk:ratio={core.number('ratio')},values=float32")
    state = compress.init(forward, x.shape, "float32")
    payload, _ = compress.encode(activation, state)
    return Reference(activation, compress.support(payload, forward, x.shape))


def start(case: CodecCase, x: torch.Tensor) -> CodecState:
    return compress.init(case.spec, x.shape, compress.dtype_name(x))


def encode_bytes(case: CodecCase, x: torch.Tensor, state: CodecState) -> tuple[bytes, CodecState]:
    payload, state = compress.encode(x, state, reference=reference_for(case.spec, x))
    return b"".join(payload), state


def decode_like(case: CodecCase, data: bytes, x: torch.Tensor) -> torch.Tensor:
    reference = reference_for(case.spec, x)
    return compress.decode(data, case.spec, x.shape, compress.dtype_name(x), reference=reference)


def check_round_trip(case: CodecCase, x: torch.Tensor) -> None:
    """Shape and dtype come back, the error is bounded, the input is untouched, lossless is lossless."""
    before = x.clone()
    data, _ = encode_bytes(case, x, start(case, x))
    y = decode_like(case, data, x)
    assert torch.equal(x, before)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert bool(y.isfinite().all())
    if case.spec.is_lossless:
        assert torch.equal(x, y)
    power = x.double().abs().max().item() if x.numel() else 0.0
    if power > 1e-30:  # below, scales and halves run out of exponent; finite is all that is promised
        scaled_x, scaled_y = x.double() / power, y.double() / power
        assert (scaled_x - scaled_y).square().sum() <= case.worst * scaled_x.square().sum() + 1e-12


def check_error_on_normal_data(case: CodecCase) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    data, _ = encode_bytes(case, x, start(case, x))
    assert compress.measure_distortion(x, decode_like(case, data, x), len(data)).nmse <= case.nmse


def check_wire_size(case: CodecCase, x: torch.Tensor) -> None:
    """The size of a payload is the spec's, exactly or as a bound."""
    data, _ = encode_bytes(case, x, start(case, x))
    limit = wire_num_bytes(case.spec, x.shape, compress.dtype_name(x))
    assert len(data) == limit if case.spec.is_exact else len(data) <= limit


def check_determinism(case: CodecCase, x: torch.Tensor) -> None:
    """The same tensor and state give the same bytes and the same tensor, however the memory lies."""
    state = start(case, x)
    first, _ = encode_bytes(case, x, state)
    second, _ = encode_bytes(case, x.contiguous().clone(), state)
    assert first == second
    assert torch.equal(decode_like(case, first, x), decode_like(case, second, x))


def check_state_round_trip(case: CodecCase, x: torch.Tensor) -> None:
    """A state restored from its dict goes on as the original does.

    An encode never changes the state it was given.
    """
    state = start(case, x)
    for _ in range(2):
        _, state = encode_bytes(case, x, state)
    frozen = state.state_dict()
    restored = start(case, x).load_state_dict(frozen)
    for _ in range(2):
        data, state = encode_bytes(case, x, state)
        again, restored = encode_bytes(case, x, restored)
        assert data == again
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in restored.load_state_dict(frozen).tensors.items())


def check_hostile(case: CodecCase, x: torch.Tensor, seed: int) -> None:
    """Cut, stretched, flipped and random payloads: refused, or decoded to a finite tensor.

    Nothing else happens.
    """
    rng = random.Random(seed)
    data, _ = encode_bytes(case, x, start(case, x))
    flipped = bytearray(data)
    for _ in range(3):
        if flipped:
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    hostile = [data[:-1], data[: len(data) // 2], data + b"\0", bytes(flipped), rng.randbytes(len(data)), b""]
    for bad in hostile:
        try:
            y = decode_like(case, bad, x)
        except RemoteProtocolError:
            continue
        assert y.shape == x.shape and y.dtype == x.dtype
        assert case.spec.core.name in ("identity", "cast") or bool(y.isfinite().all())
        if case.spec.is_exact:
            assert len(bad) == len(data)


class _Largest(TorchDispatchMode):
    """Remembers the most bytes that one operator of torch returned."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return out


def check_allocation(case: CodecCase, x: torch.Tensor, seed: int) -> None:
    """Whatever comes, decoding takes memory in proportion to the declared shape (and to a codec's basis)."""
    rng = random.Random(seed)
    data, _ = encode_bytes(case, x, start(case, x))
    width = x.shape[-1] if x.ndim else 1
    allowed = 64 * x.numel() + 16 * width * width + (1 << 18)
    with _Largest():  # what is imported or cached at a first call is not the payload's
        decode_like(case, data, x)
    for bad in (rng.randbytes(len(data)), data[:6] + b"\xff" * max(0, len(data) - 6), data[:1] + bytes(len(data[1:]))):
        tracemalloc.start()
        try:
            with _Largest() as seen:
                decode_like(case, bad, x)
        except RemoteProtocolError:
            pass
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert seen.num_bytes <= allowed and peak <= allowed


def check_damage_shows(case: CodecCase, x: torch.Tensor, seed: int) -> None:
    """One flipped bit anywhere in a sealed payload is refused."""
    payload, _ = compress.encode(x, start(case, x), reference=reference_for(case.spec, x))
    sealed = bytearray(b"".join(compress.seal(case.spec, payload)))
    spec, body = compress.unseal(sealed, [case.spec])
    assert spec == case.spec and bytes(body) == b"".join(payload)
    position = random.Random(seed).randrange(len(sealed) * 8)
    sealed[position // 8] ^= 1 << (position % 8)
    with pytest.raises(RemoteProtocolError):
        compress.unseal(sealed, [case.spec])


def check_nonfinite(case: CodecCase, value: float) -> None:
    """NaN and infinity are carried as they are by the dense codecs and refused by the others."""
    x = torch.ones(3, 20)
    # randomk and same-mask look only at what they keep: put it everywhere.
    x[:] = value
    if case.spec.core.name in ("identity", "cast") and case.spec.name not in ("ef", "tangent"):
        data, _ = encode_bytes(case, x, start(case, x))
        assert torch.equal(decode_like(case, data, x).isnan(), x.isnan())
        return
    with pytest.raises(UserError, match="NaN or infinity"):
        encode_bytes(case, x, start(case, x))


def check_adjoint(case: CodecCase, x: torch.Tensor, seed: int) -> None:
    """<decode(encode(x)), y> = <x, adjoint(y)> where the spec names an adjoint, to the values' rounding."""
    forward = exact_values(case.spec)
    backward = adjoint_codec(forward)
    if backward is None:
        return
    x = (x.double() / x.double().abs().max().clamp(min=1e-300)).float() if x.numel() else x.float()
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    payload, _ = compress.encode(x, compress.init(forward, x.shape, "float32"))
    kept = compress.support(payload, forward, x.shape)
    reference = None if kept is None else Reference(support=kept)
    gradient, _ = compress.encode(y, compress.init(backward, x.shape, "float32"), reference=reference)
    there = compress.decode(payload, forward, x.shape, "float32").double()
    back = compress.decode(gradient, backward, x.shape, "float32", reference=reference).double()
    rounding = 2e-2 if forward.core.name == "cast" else 1e-6
    difference = (there * y).sum() - (x.double() * back).sum()
    assert difference.abs() <= rounding * (x.double().norm() * y.double().norm()) + 1e-30


def exact_values(spec: CodecSpec) -> CodecSpec:
    """The same codec with its kept values in float32."""
    if "values" not in spec.core.format.parameters:
        return spec
    inner = None if spec.inner is None else exact_values(spec.inner)
    values = {} if inner else {"values": "float32"}
    return codec_spec(spec.name, {**dict(spec.parameters), **values}, inner)


def check_spec(case: CodecCase) -> None:
    """The text form parses back and the spec verifies."""
    verify_codec(case.spec)
    assert parse_codec(str(case.spec)) == case.spec
