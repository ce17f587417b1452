"""What single codecs promise beyond the kit: the tangent correction, error feedback, outliers, the doors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard

from fusionllm import compress
from fusionllm.compress import Reference
from fusionllm.compress.rotate import group_width, rotation
from fusionllm.errors import LocalProtocolError, RemoteProtocolError, UserError
from fusionllm.ir.codec import HEADER_NUM_BYTES, IDENTITY, parse_codec

SHAPE = (6, 32)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed))


def through(text: str, x: torch.Tensor, reference: Reference | None = None) -> torch.Tensor:
    spec, name = parse_codec(text), compress.dtype_name(x)
    payload, _ = compress.encode(x, compress.init(spec, x.shape, name), reference=reference)
    return compress.decode(payload, spec, x.shape, name, reference=reference)


def test_identity_is_a_view_and_carries_every_dtype() -> None:
    x = normal(0)
    payload, _ = compress.encode(x, compress.init(IDENTITY, x.shape, "float32"))
    assert np.shares_memory(np.frombuffer(payload[0], np.uint8), x.numpy())
    for y in (torch.tensor(True), torch.arange(5), torch.zeros(0, 3, dtype=torch.int16), x.bfloat16(), x.t()):
        assert torch.equal(through("identity", y), y)
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    assert through("identity", special).view(torch.int32).tolist() == special.view(torch.int32).tolist()


def test_cast_saturates_finite_values_and_keeps_infinity() -> None:
    x = torch.tensor([1e30, -1e30, float("inf"), 1.0])
    assert through("cast:dtype=float16", x).tolist() == [65504.0, -65504.0, float("inf"), 1.0]


@pytest.mark.parametrize("inner", ["hadamard:bits=2", "topk:ratio=10,scope=row", "int4"])
@pytest.mark.parametrize("bits", [16, 8])
def test_tangent_makes_the_radial_part_exact(inner: str, bits: int) -> None:
    gradient, activation = normal(0), normal(1)
    plain = through(inner, gradient)
    fixed = through(f"tangent:bits={bits}({inner})", gradient, Reference(activation))
    want = (gradient * activation).sum(1)
    # Eight bits: half an eighth of an octave.
    error = 2e-3 * want.abs().max() if bits == 16 else 0.045 * want.abs() + 1e-4 * want.abs().max()
    assert bool((((fixed * activation).sum(1) - want).abs() <= error).all())
    assert ((plain * activation).sum(1) - want).abs().max() > 2e-2 * want.abs().max()


def test_tangent_leaves_rows_without_activation_alone() -> None:
    gradient = normal(0)
    fixed = through("tangent(int8)", gradient, Reference(torch.zeros(SHAPE)))
    assert torch.equal(fixed, through("int8", gradient))


def test_error_feedback_delivers_everything_in_the_end() -> None:
    spec, x = parse_codec("ef(topk:ratio=16,values=float32)"), normal(0)
    state, total = compress.init(spec, SHAPE, "float32"), torch.zeros(SHAPE)
    for _ in range(200):
        payload, state = compress.encode(x, state)
        total += compress.decode(payload, spec, SHAPE, "float32")
    assert (total / 200 - x).norm() < 0.1 * x.norm()
    assert torch.allclose(total + state.tensors["residual"], 200 * x, atol=1e-3)


def test_powersgd_finds_a_low_rank_matrix() -> None:
    x = normal(0, 40, 3) @ normal(1, 3, 30)
    y = through("powersgd:rank=3", x)
    assert (x - y).norm() < 0.01 * x.norm()
    assert through("powersgd", torch.zeros(4, 5)).abs().max() == 0


def test_outlier_channels_make_four_bits_enough() -> None:
    x = normal(0, 256, 64)
    x[:, [3, 40]] *= 100
    x[:, 17] += 300
    for_the_rest = [c for c in range(64) if c not in (3, 17, 40)]
    plain, aside = through("hadamard", x), through("outlier:channels=4", x)
    error = ((aside - x)[:, for_the_rest].norm() / x[:, for_the_rest].norm()).item()
    assert error < 0.15 < 1 < ((plain - x)[:, for_the_rest].norm() / x[:, for_the_rest].norm()).item()


@pytest.mark.parametrize("width", [1, 2, 7, 64, 96, 576, 577, 768, 1000])
def test_rotations_are_orthogonal_and_never_mix_rows(width: int) -> None:
    group = group_width(width)
    assert width % group == 0
    matrix = rotation(group).double()
    assert torch.allclose(matrix @ matrix.t(), torch.eye(group, dtype=torch.float64), atol=1e-5)
    x = normal(0, 4, width)
    other = torch.cat([x[:3], normal(1, 1, width)])
    assert torch.equal(through("hadamard", x)[:3], through("hadamard", other)[:3])


def test_scales_span_the_range_of_float32() -> None:
    for scale in (1e-30, 1e-9, 1.0, 1e30):
        x = normal(0) * scale
        assert (through("int8", x) - x).abs().max() <= x.abs().max() * 0.005


def test_a_bomb_is_refused_before_it_grows() -> None:
    spec = parse_codec("zstd")
    bomb = b"\1" + zstandard.ZstdCompressor(level=19).compress(b"\0" * 10_000_000)
    assert len(bomb) < 4 * 6 * 32
    with pytest.raises(RemoteProtocolError, match="declares 10000000 bytes"):
        compress.decode(bomb, spec, SHAPE, "float32")


def test_the_doors_say_what_is_wrong() -> None:
    with pytest.raises(UserError, match="takes floats, not int64"):
        compress.init(parse_codec("int8"), SHAPE, "int64")
    with pytest.raises(LocalProtocolError, match="set up for float32"):
        compress.encode(normal(0, 3), compress.init(IDENTITY, SHAPE, "float32"))
    with pytest.raises(LocalProtocolError, match="needs the forward"):
        through("tangent(int8)", normal(0))
    with pytest.raises(LocalProtocolError, match="needs the forward payload's 19 positions"):
        through("same-mask", normal(0), Reference(support=torch.arange(3)))
    with pytest.raises(RemoteProtocolError, match="takes exactly 768"):
        compress.decode(b"abc", IDENTITY, SHAPE, "float32")
    with pytest.raises(UserError, match="codec state of"):
        compress.init(parse_codec("ef(int8)"), SHAPE, "float32").load_state_dict({})
    with pytest.raises(UserError, match="cannot travel"):
        compress.dtype_name(torch.zeros(1, dtype=torch.complex64))


def test_envelope_names_the_codec_of_each_message() -> None:
    x, seen = normal(0), []
    allowed = [IDENTITY, parse_codec("int8"), parse_codec("int8:block=64"), parse_codec("topk:ratio=5")]
    for spec in allowed:
        payload, _ = compress.encode(x, compress.init(spec, SHAPE, "float32"))
        sealed = b"".join(compress.seal(spec, payload))
        assert len(sealed) == HEADER_NUM_BYTES + compress.payload_num_bytes(payload)
        found, body = compress.unseal(sealed, allowed)
        compress.decode(body, found, SHAPE, "float32")
        seen.append(found)
        with pytest.raises(RemoteProtocolError, match="this link allows"):
            compress.unseal(sealed, [s for s in allowed if s != spec])
    assert seen == allowed
    with pytest.raises(RemoteProtocolError, match="are no payload"):
        compress.unseal(b"FC", allowed)


def test_a_message_with_infinity_can_travel_dense() -> None:
    spec = parse_codec("ef(int8)")
    state = compress.init(spec, SHAPE, "float32")
    used, _, state = compress.encode_or_dense(normal(0), state)
    assert used == spec
    bad = normal(1)
    bad[2, 3] = float("inf")
    with pytest.raises(UserError, match=r"holds NaN or infinity.*; 1 such elements, the first at \[2, 3\]"):
        compress.encode(bad, state)
    used, payload, after = compress.encode_or_dense(bad, state)
    assert used == IDENTITY and after is state
    assert torch.equal(compress.decode(payload, used, SHAPE, "float32"), bad)


@pytest.mark.parametrize(
    "text",
    [
        "topk:ratio=1e9", "topk-paper:ratio=1e9", "topk:ratio=1e9,scope=row", "randomk:ratio=1e9", "topk:ratio=1",
        "outlier:channels=4096", "powersgd:rank=4096", "int8:block=1048576", "klt:rate=8", "klt-ec:rate=8",
        "klt-ec:rate=0.01",
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (2, 1, 1, 3, 1, 2, 1, 2)])
def test_parameters_beyond_the_tensor_are_met_at_its_size(text: str, shape: tuple[int, ...]) -> None:
    """One in 1e9 elements is still one, and 4096 channels of five are five."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = through(text, x)
    assert y.shape == x.shape and bool(y.isfinite().all())
    if "topk" in text and x.numel():
        kept = int((y != 0).sum())
        rows = x.reshape(-1, *x.shape[-1:]).shape[0] if "row" in text and x.ndim else 1
        assert kept == (x.numel() if text.endswith("=1") else rows)


@pytest.mark.parametrize(
    "text", ["topk:ratio=0", "topk:ratio=0.5", "randomk:ratio=0", "powersgd:rank=0", "klt-ec:rate=0"]
)
def test_nothing_at_all_is_no_codec(text: str) -> None:
    with pytest.raises(UserError, match=r"is outside"):
        parse_codec(text)


def test_distortion() -> None:
    x = normal(0)
    exact = compress.measure_distortion(x, x, 768)
    assert (exact.nmse, exact.true_ratio) == (0, 1) and exact.cosine == pytest.approx(1)
    nothing = compress.measure_distortion(x, torch.zeros(SHAPE), 384)
    assert (nothing.nmse, nothing.cosine, nothing.true_ratio) == (1, 0, 2)
    assert compress.measure_distortion(torch.zeros(2), torch.zeros(2), 8).cosine == 1


def test_klt_sends_its_basis_now_and_then_and_the_receiver_remembers() -> None:
    spec, shape = parse_codec("klt:rate=1,refresh=8"), (128, 24)
    mixing = normal(9, 4, 24)
    state, memory, sizes = compress.init(spec, shape, "float32"), {}, []
    for seed in range(9):
        x = normal(seed, 128, 4) @ mixing
        payload, state = compress.encode(x, state)
        memory = compress.remember(payload, spec, shape, "float32", memory)
        y = compress.decode(payload, spec, shape, "float32", reference=Reference(memory=memory))
        sizes.append(compress.payload_num_bytes(payload))
        assert (x - y).norm() < 0.12 * x.norm()
    plain = 5 + 2 * 128 + 128 * 24 // 8
    assert [size > plain for size in sizes] == [i in (0, 1, 2, 5, 8) for i in range(9)]
    assert min(sizes) == plain


def test_klt_ec_learns_its_covariance_only_shortly_before_a_new_basis() -> None:
    spec, shape = parse_codec("klt-ec:rate=2,refresh=60"), (64, 8)
    state, learned, renewed = compress.init(spec, shape, "float32"), [], []
    for message in range(80):
        _, after = compress.encode(normal(message, *shape), state)
        if not torch.equal(after.tensors["covariance"], state.tensors["covariance"]):
            learned.append(message)
        if int(after.tensors["version"]) > int(state.tensors["version"]):
            renewed.append(message)
        state = after
    assert renewed == [0, 1, 2, 5, 10, 15, 23, 35, 53]
    assert learned == list(range(54)) + list(range(80 - 22 + 1, 80))  # the next one is due at 80


def test_klt_refuses_a_basis_it_does_not_hold() -> None:
    spec, shape = parse_codec("klt"), (16, 8)
    state = compress.init(spec, shape, "float32")
    memories = [{}]
    for seed in range(4):
        payload, state = compress.encode(normal(seed, *shape), state)
        if seed < 3:
            memories.append(compress.remember(payload, spec, shape, "float32", memories[-1]))
    compress.decode(payload, spec, shape, "float32", reference=Reference(memory=memories[3]))
    for memory in memories[:3]:
        with pytest.raises(RemoteProtocolError, match="coded in basis 3, but this side holds"):
            compress.decode(payload, spec, shape, "float32", reference=Reference(memory=memory))
    with pytest.raises(UserError, match="ef cannot wrap"):
        compress.init(parse_codec("ef(klt)"), shape, "float32")


def spiky(seed: int, *shape: int) -> torch.Tensor:
    """Normal values, most of them small and a tenth large, as coefficients of trained models are."""
    large = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1000)) < 0.1
    return normal(seed, *shape) * torch.where(large, 5.0, 0.3)


@pytest.mark.parametrize("rate", [0.3, 1.0, 3.0])
def test_the_entropy_coder_keeps_its_rate_and_has_less_error(rate: float) -> None:
    shape, sizes, errors = (512, 64), [], {}
    mixing = torch.linalg.qr(normal(7, 64, 64)).Q * torch.logspace(0, -2, 64)[:, None]
    for name in ("klt", "klt-ec"):
        spec = parse_codec(f"{name}:rate={rate},refresh=1000")
        state, memory = compress.init(spec, shape, "float32"), {}
        for seed in range(13):
            x = spiky(seed, 512, 64) @ mixing
            payload, state = compress.encode(x, state)
            memory = compress.remember(payload, spec, shape, "float32", memory)
            y = compress.decode(payload, spec, shape, "float32", reference=Reference(memory=memory))
        sizes.append(8 * compress.payload_num_bytes(payload) / x.numel())
        errors[name] = ((x - y).norm() / x.norm()).square().item()
    # klt counts its scales besides its rate, klt-ec within it, but for classes and heads of a small tensor.
    assert rate * 0.9 < sizes[1] < rate + 0.06 and sizes[1] < sizes[0]
    assert errors["klt-ec"] < 0.6 * errors["klt"]


def test_the_entropy_coder_keeps_rows_of_any_size_and_those_of_zeros() -> None:
    x = normal(0, 64, 32) * torch.logspace(-6, 6, 64)[:, None]
    x[5] = 0
    y = through("klt-ec:rate=4", x)
    assert bool((y[5] == 0).all())
    large = x.norm(dim=1) > x.norm(dim=1).max() * 2.0**-30
    assert ((x - y).norm(dim=1) / x.norm(dim=1))[large & (x.norm(dim=1) > 0)].max() < 0.5


@pytest.mark.parametrize("lossy", ["hadamard:bits=2", "topk:ratio=10,scope=row"])
def test_the_tangent_keeps_a_scale_invariant_loss_from_drifting(lossy: str) -> None:
    """Descend on f(h / |h|) with a lossy gradient: the norm drifts unless the radial part is exact."""
    norms = {}
    for text in (lossy, f"tangent({lossy})"):
        h, target = normal(0, 8, 64), normal(1, 8, 64)
        for _ in range(60):
            h.requires_grad_(True)
            loss = -(h / h.norm(dim=1, keepdim=True) * target).sum()
            (gradient,) = torch.autograd.grad(loss, h)
            h = h.detach()
            h = h - 0.5 * through(text, gradient, Reference(h))
        norms[text] = (h.norm() / normal(0, 8, 64).norm()).item()
    plain, fixed = norms.values()
    assert abs(fixed - 1) < abs(plain - 1)


@pytest.mark.parametrize("text", ["identity", "klt", "tangent(same-mask:ratio=4,scope=row)", "ef(int8)"])
def test_speed_is_a_line_through_two_sizes(text: str) -> None:
    ticks = iter(range(10**6))
    speed = compress.measure_speed(parse_codec(text), repeats=2, clock=lambda: float(next(ticks)))
    # Every interval of this clock is one second, whatever the size: all of it is overhead.
    assert (speed.encode_s_per_element, speed.decode_s_per_element, speed.overhead_s) == (0, 0, 1)
    assert speed.encode_s(1000) == speed.decode_s(10) == 1
