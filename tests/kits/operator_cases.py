"""What every listed operator means: a call with arguments, and the same in plain torch. One entry per operator.

The plain form is arithmetic and torch's public functions, another one than the operator's own where there is another.
Tensors are float64, so that forward and gradient can be compared closely. Arguments take other values than their
defaults where that can be seen. The conformance test of every backend reads ``CASES``; a new operator adds a line.
"""

# fmt: off
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Case(NamedTuple):
    """A call of one operator; ``plain`` takes its tensors in order, lists laid flat, and returns the same results."""

    args: dict[str, Any]
    plain: Callable[..., Any]


class Held(NamedTuple):
    """A floating-point argument that has no gradient: a buffer of the stage."""

    tensor: Tensor


def real(seed: int, *shape: int) -> Tensor:
    """Normal numbers, float64, no two equal."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(seed: int, high: int, *shape: int) -> Tensor:
    """int64 from 0 up to ``high``, exclusive."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


A, B, ROW, CUBE = real(1, 3, 4), real(2, 3, 4), real(3, 4), real(4, 2, 3, 4)
POSITIVE, IMAGE, SOUND, SOLID = A.abs() + 0.5, real(5, 2, 4, 6, 6), real(6, 2, 4, 9), real(7, 1, 2, 4, 4, 4)
N, M, MASK = whole(1, 5, 3, 4), whole(2, 5, 3, 4), real(8, 3, 4) > 0
CLASSES = torch.tensor([2, 0, 1])
HEADS = tuple(real(9 + i, 2, 4, 5, 8) for i in range(3))
SHARED = tuple(real(12 + i, 2, 2, 5, 8) for i in range(2))
SPECIAL = torch.tensor([1.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
F32, F64 = torch.float32, torch.float64

CASES: dict[str, Case] = {}


def op(name: str, plain: Callable[..., Any], **args: Any) -> None:
    CASES[name] = Case(args, plain)


def _unary(functions: dict[str, Callable[[Tensor], Tensor]], at: Tensor) -> None:
    for name, function in functions.items():
        op(f"aten.{name}.default", function, self=at)


def _binary(overloads: str, functions: dict[str, Callable[[Any, Any], Tensor]], left: Tensor, right: Tensor) -> None:
    for name, function in functions.items():
        if "Tensor" in overloads:
            op(f"aten.{name}.Tensor", function, self=left, other=right)
        if "Scalar" in overloads:
            op(f"aten.{name}.Scalar", lambda a, f=function: f(a, 2), self=left, other=2)


# ------------------------------------------------------------------------------------------- element by element

_unary(
    {
        "abs": lambda a: a * torch.sgn(a), "cos": torch.cos, "detach": lambda a: a.detach(), "erf": torch.erf,
        "exp": lambda a: math.e**a, "floor": lambda a: torch.floor(a), "neg": lambda a: 0 - a,
        "relu": lambda a: torch.where(a > 0, a, torch.zeros_like(a)), "round": torch.round,
        "sigmoid": lambda a: 1 / (1 + torch.exp(-a)), "sign": torch.sgn, "silu": lambda a: a * torch.sigmoid(a),
        "sin": torch.sin, "square": lambda a: a * a, "tanh": lambda a: 2 * torch.sigmoid(2 * a) - 1,
        "mish": lambda a: a * torch.tanh(torch.log(1 + torch.exp(a))), "t": lambda a: a.mT,
    },
    A,
)
_unary(
    {
        "log": torch.log, "log1p": lambda a: torch.log(1 + a), "sqrt": lambda a: a**0.5, "rsqrt": lambda a: a**-0.5,
        "reciprocal": lambda a: 1 / a,
    },
    POSITIVE,
)
_unary(
    {
        "logical_not": lambda a: a == 0, "all": lambda a: (a != 0).sum() == a.numel(),
        "any": lambda a: (a != 0).sum() > 0, "bitwise_not": lambda a: -a - 1,
    },
    N,
)
_unary({"isinf": lambda a: a.abs() == math.inf, "isnan": lambda a: a != a}, SPECIAL)
_binary(
    "Tensor Scalar",
    {"eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b, "gt": lambda a, b: a > b,
     "le": lambda a, b: a <= b, "lt": lambda a, b: a < b},
    N, M,
)
_binary("Tensor Scalar", {"div": lambda a, b: a / b, "mul": lambda a, b: a * b}, A, POSITIVE)
_binary("Tensor", {f"{name}and{end}": lambda a, b: a & b for name, end in (("__", "__"), ("bitwise_", ""))}, N, M)
_binary("Tensor", {"bitwise_or": lambda a, b: a | b}, N, M)
for _name, _sign in (("add", 1), ("sub", -1)):
    op(f"aten.{_name}.Tensor", lambda a, b, s=_sign: a + s * 3 * b, self=A, other=B, alpha=3)
    op(f"aten.{_name}.Scalar", lambda a, s=_sign: a + s * 3 * 2, self=A, other=2, alpha=3)
op("aten.rsub.Scalar", lambda a: 2 - 3 * a, self=A, other=2, alpha=3)
op("aten.div.Tensor_mode", lambda a, b: torch.floor(a / b), self=A, other=B, rounding_mode="floor")
op("aten.floor_divide.default", lambda a, b: a // b, self=N, other=M + 1)
op("aten.floor_divide.Scalar", lambda a: a // 2, self=N, other=2)
op("aten.remainder.Scalar", lambda a: a - 3 * torch.floor(a / 3), self=A, other=3)
op("aten.pow.Tensor_Scalar", lambda a: a * a * a, self=A, exponent=3)
op("aten.pow.Tensor_Tensor", lambda a, b: torch.exp(b * torch.log(a)), self=POSITIVE, exponent=B)
op("aten.pow.Scalar", lambda a: torch.exp(a * math.log(2)), self=2, exponent=A)
for _name in ("maximum.default", "max.other"):
    op(f"aten.{_name}", lambda a, b: torch.where(a > b, a, b), self=A, other=B)
for _name in ("minimum.default", "min.other"):
    op(f"aten.{_name}", lambda a, b: torch.where(a < b, a, b), self=A, other=B)
op("aten.logical_and.default", lambda a, b: (a != 0) & (b != 0), self=N, other=M)
op("aten.logical_or.default", lambda a, b: (a != 0) | (b != 0), self=N, other=M)
op("aten.clamp.default", lambda a: torch.maximum(torch.minimum(a, torch.full_like(a, 0.9)), torch.full_like(a, -0.5)),
   self=A, min=-0.5, max=0.9)
op("aten.clamp_min.default", lambda a: torch.where(a < -0.5, torch.full_like(a, -0.5), a), self=A, min=-0.5)
op("aten.elu.default", lambda a: torch.where(a > 0, a, 2 * (torch.exp(a) - 1)), self=A, alpha=2.0)
op("aten.gelu.default", lambda a: a / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (a + 0.044715 * a**3))),
   self=A, approximate="tanh")
op("aten.glu.default", lambda a: a[:, :2] * torch.sigmoid(a[:, 2:]), self=A, dim=1)
op("aten.hardtanh.default", lambda a: a.clamp(-0.5, 0.9), self=A, min_val=-0.5, max_val=0.9)
op("aten.leaky_relu.default", lambda a: torch.where(a > 0, a, 0.3 * a), self=A, negative_slope=0.3)
op("aten.softplus.default", lambda a: torch.log(1 + torch.exp(2 * a)) / 2, self=A, beta=2, threshold=30)
op("ir.cast", lambda a: a.float(), x=A, dtype=F32)
op("aten.type_as.default", lambda a, b: a.long(), self=A, other=N)

# ------------------------------------------------------------------------------------------------ choose and mask

op("aten.where.self", lambda c, a, b: c * a + ~c * b, condition=MASK, self=A, other=B)
op("aten.where.ScalarOther", lambda c, a: c * a + ~c * 2.0, condition=MASK, self=A, other=2.0)
op("aten.where.ScalarSelf", lambda c, b: c * 2.0 + ~c * b, condition=MASK, self=2.0, other=B)
op("aten.where.Scalar", lambda c: c * 2 + ~c * 5, condition=MASK, self=2, other=5)
op("aten.masked_fill.Scalar", lambda a, m: torch.where(m, torch.full_like(a, -math.inf), a),
   self=A, mask=MASK, value=-math.inf)
op("aten.masked_fill.Tensor", lambda a, m, v: torch.where(m, v, a), self=A, mask=MASK, value=real(20).reshape(()))
op("aten.tril.default", lambda a: a * (torch.arange(3)[:, None] + 1 >= torch.arange(4)), self=A, diagonal=1)
op("aten.triu.default", lambda a: a * (torch.arange(3)[:, None] + 1 <= torch.arange(4)), self=A, diagonal=1)

# ------------------------------------------------------------------------------------------------- over dimensions

op("aten.sum.default", lambda a: a.flatten() @ torch.ones(12, dtype=F64), self=A)
op("aten.sum.dim_IntList", lambda a: torch.einsum("ijk->j", a)[None, :, None], self=CUBE, dim=[0, 2], keepdim=True)
op("aten.mean.default", lambda a: a.sum() / 12, self=A)
op("aten.mean.dim", lambda a: a.sum(1, keepdim=True) / 4, self=A, dim=[1], keepdim=True)
op("aten.amax.default", lambda a: torch.stack([row.max() for row in a])[:, None], self=A, dim=[1], keepdim=True)
op("aten.any.dim", lambda a: (a > 0).sum(1, keepdim=True) > 0, self=N, dim=1, keepdim=True)
op("aten.argmax.default", lambda a: a.sort(1).indices[:, -1:], self=A, dim=1, keepdim=True)
op("aten.argsort.default", lambda a: a.sort(0, descending=True).indices, self=A, dim=0, descending=True)
op("aten.max.dim", lambda a: (a.amax(0, keepdim=True), a.argmax(0, keepdim=True)), self=A, dim=0, keepdim=True)
op("aten.prod.dim_int", lambda a: a[:, :1] * a[:, 1:2] * a[:, 2:3] * a[:, 3:], self=A, dim=1, keepdim=True)
op("aten.cumsum.default", lambda a: torch.ones(3, 3, dtype=F64).tril() @ a, self=A, dim=0)
op("aten.diff.default", lambda a: a[:, 1:] - a[:, :-1], self=A, dim=1)
op("aten.logsumexp.default", lambda a: torch.log(torch.exp(a).sum(1, keepdim=True)), self=A, dim=[1], keepdim=True)
op("aten.softmax.int", lambda a: torch.exp(a) / torch.exp(a).sum(0), self=A, dim=0)
op("aten.log_softmax.int", lambda a: a - torch.log(torch.exp(a).sum(0)), self=A, dim=0)
op("aten.linalg_vector_norm.default", lambda a: (a.abs() ** 3).sum(1, keepdim=True) ** (1 / 3),
   self=A, ord=3, dim=[1], keepdim=True)
op("aten.norm.ScalarOpt_dim", lambda a: (a * a).sum(1, keepdim=True) ** 0.5, self=A, p=2, dim=[1], keepdim=True)
op("aten.var.correction", lambda a: ((a - a.mean(1, True)) ** 2).sum(1, True) / 4,
   self=A, dim=[1], correction=0, keepdim=True)
op("aten.std.correction", lambda a: (((a - a.mean(1, True)) ** 2).sum(1, True) / 4) ** 0.5,
   self=A, dim=[1], correction=0, keepdim=True)
op("aten.sort.default", lambda a: (a.gather(0, i := (-a).argsort(0)), i), self=A, dim=0, descending=True)
op("aten.topk.default", lambda a: ((s := a.sort(0)).values[:2], s.indices[:2]), self=A, k=2, dim=0, largest=False)
op("aten.histc.default", lambda a: torch.stack([(a == i).sum() for i in range(5)]).to(F64),
   self=N.to(F64), bins=5, min=0, max=4)

# ------------------------------------------------------------------------------------------------------- products

op("aten.matmul.default", lambda a, b: torch.einsum("bij,jk->bik", a, b), self=CUBE, other=real(21, 4, 5))
op("aten.bmm.default", lambda a, b: torch.einsum("bij,bjk->bik", a, b), self=CUBE, mat2=real(22, 2, 4, 5))
op("aten.addmm.default", lambda c, a, b: 2 * c + 3 * (a @ b),
   self=real(23, 5), mat1=A, mat2=real(21, 4, 5), beta=2, alpha=3)
op("aten.baddbmm.default", lambda c, a, b: 2 * c + 3 * (a @ b),
   self=real(24, 2, 3, 5), batch1=CUBE, batch2=real(22, 2, 4, 5), beta=2, alpha=3)
op("aten.linear.default", lambda a, w, b: a @ w.mT + b, input=CUBE, weight=real(25, 5, 4), bias=real(26, 5))
op("aten.outer.default", lambda a, b: a[:, None] * b, self=ROW, vec2=real(27, 3))
op("aten.conv1d.default",
   lambda a, w, b: torch.einsum("bclk,ock->bol", F.pad(a, (1, 1)).unfold(2, 3, 2), w) + b[:, None],
   input=SOUND, weight=real(28, 6, 4, 3), bias=real(29, 6), stride=[2], padding=[1])
op("aten.conv2d.default",
   lambda a, w, b: torch.cat([_window(a[:, :2], w[:3]), _window(a[:, 2:], w[3:])], 1) + b[:, None, None],
   input=IMAGE, weight=real(30, 6, 2, 3, 3), bias=real(31, 6), stride=[2, 1], padding=[1, 0], dilation=[1, 2], groups=2)
op("aten.conv3d.default",
   lambda a, w: torch.einsum("bcxyzijk,ocijk->boxyz", a.unfold(2, 2, 1).unfold(3, 2, 1).unfold(4, 2, 1), w),
   input=SOLID, weight=real(32, 3, 2, 2, 2, 2))
op("aten.conv_transpose2d.input",
   lambda a, w, b: F.fold(w.flatten(1).mT @ a.flatten(2), (13, 12), (2, 2), stride=2) + b[:, None, None],
   input=IMAGE, weight=real(33, 4, 3, 2, 2), bias=real(34, 3), stride=[2, 2], output_padding=[1, 0])


def _window(image: Tensor, weight: Tensor) -> Tensor:
    """The convolution of the case above, by columns: stride (2, 1), padding (1, 0), dilation (1, 2)."""
    columns = F.unfold(image, (3, 3), dilation=(1, 2), padding=(1, 0), stride=(2, 1))
    return (weight.flatten(1) @ columns).reshape(2, 3, 3, 2)


LATER = torch.full((5, 5), -math.inf).triu(1)


def _attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float, scale: float) -> Tensor:
    return torch.softmax(query @ key.mT * scale + bias, -1) @ value


op("aten.scaled_dot_product_attention.default",
   lambda q, k, v: _attention(q, *(t.repeat_interleave(2, 1) for t in (k, v)), LATER, 0.3),
   query=HEADS[0], key=SHARED[0], value=SHARED[1], is_causal=True, scale=0.3, enable_gqa=True)

# -------------------------------------------------------------------------------------------- norms, pools, losses


def _scaled(a: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = a - a.mean(dims, keepdim=True)
    return centred / ((centred**2).mean(dims, keepdim=True) + eps) ** 0.5


def _grouped(a: Tensor) -> Tensor:
    return _scaled(a.reshape(2, 2, -1), [2], 1e-3).reshape(a.shape)


def _batch_norm(a: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> tuple[Any, ...]:
    flat = a.transpose(0, 1).flatten(1)
    y = _scaled(a, [0, 2, 3], 1e-3) * w[:, None, None] + b[:, None, None]
    return y, None, None, 0.8 * mean + 0.2 * flat.mean(1).detach(), 0.8 * var + 0.2 * flat.var(1).detach()


def _batch_norm_fixed(a: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> tuple[Any, ...]:
    w, b, mean, var = (t[:, None, None] for t in (w, b, mean, var))
    return (a - mean) / (var + 1e-3) ** 0.5 * w + b, None, None


_STATISTICS = {"running_mean": Held(real(35, 4)), "running_var": Held(real(36, 4).abs())}
op("aten._native_batch_norm_legit_functional.default", _batch_norm,
   input=IMAGE, weight=ROW, bias=real(37, 4), **_STATISTICS,
   training=True, momentum=0.2, eps=1e-3)
op("aten._native_batch_norm_legit_no_training.default", _batch_norm_fixed,
   input=IMAGE, weight=ROW, bias=real(37, 4), **_STATISTICS, momentum=0.2, eps=1e-3)
op("aten.layer_norm.default", lambda a, w, b: _scaled(a, [1], 1e-3) * w + b,
   input=A, normalized_shape=[4], weight=ROW, bias=real(37, 4), eps=1e-3)
op("aten.rms_norm.default", lambda a, w: a / ((a * a).mean(1, True) + 1e-3) ** 0.5 * w,
   input=A, normalized_shape=[4], weight=ROW, eps=1e-3)
op("aten.group_norm.default", lambda a, w, b: _grouped(a) * w[:, None, None] + b[:, None, None],
   input=IMAGE, num_groups=2, weight=ROW, bias=real(37, 4), eps=1e-3)
op("aten.native_group_norm.default",
   lambda a, w, b: (_grouped(a) * w[:, None, None] + b[:, None, None], None, None),
   input=IMAGE, weight=ROW, bias=real(37, 4), N=2, C=4, HxW=36, group=2, eps=1e-3)
op("aten.adaptive_avg_pool1d.default", lambda a: a.reshape(2, 4, 3, 3).mean(3), self=SOUND, output_size=[3])
op("aten.adaptive_avg_pool2d.default", lambda a: a.reshape(2, 4, 2, 3, 3, 2).mean((3, 5)),
   self=IMAGE, output_size=[2, 3])
op("aten.avg_pool2d.default", lambda a: a.reshape(2, 4, 3, 2, 3, 2).mean((3, 5)),
   self=IMAGE, kernel_size=[2, 2], stride=[2, 2])
op("aten.max_pool2d.default",
   lambda a: F.pad(a, (1, 1, 1, 1), value=-math.inf).unfold(2, 3, 2).unfold(3, 3, 2).amax((4, 5)),
   self=IMAGE, kernel_size=[3, 3], stride=[2, 2], padding=[1, 1])
op("aten.upsample_nearest2d.vec", lambda a: a.repeat_interleave(2, 2).repeat_interleave(3, 3),
   input=IMAGE, output_size=None, scale_factors=[2.0, 3.0])
op("aten.upsample_bilinear2d.vec", lambda a: torch.einsum("iy,bcyx,jx->bcij", *_lines(a)),
   input=IMAGE[:, :, :2, :2], output_size=[3, 5], align_corners=True, scale_factors=None)


def _lines(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A bilinear resize of two rows and columns to three and five, corners aligned: weights of rows and columns."""
    rows, columns = (torch.stack([1 - t, t], 1) for t in (torch.linspace(0, 1, n, dtype=F64) for n in (3, 5)))
    return rows, image, columns


def _nll(scores: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of the negative scores at the targets; target 1 is ignored."""
    used = weight[target] * (target != 1)
    return -(scores.gather(1, target[:, None])[:, 0] * used).sum() / used.sum()


op("aten.cross_entropy_loss.default", lambda a, t, w: _nll(torch.log_softmax(a, 1), t, w),
   self=A, target=CLASSES, weight=Held(ROW.abs()), ignore_index=1)
op("aten.nll_loss_nd.default", _nll, self=A, target=CLASSES, weight=Held(ROW.abs()), ignore_index=1)
op("aten.mse_loss.default", lambda a, b: ((a - b) ** 2).sum(), self=A, target=B, reduction=2)
op("aten.l1_loss.default", lambda a, b: (a - b).abs().sum(), self=A, target=B, reduction=2)
op("aten.smooth_l1_loss.default", lambda a, b: torch.where((d := (a - b).abs()) < 0.5, d * d, d - 0.25).sum(),
   self=A, target=B, reduction=2, beta=0.5)
op("aten.binary_cross_entropy_with_logits.default",
   lambda a, t, w, p: -(p * t * torch.log(torch.sigmoid(a)) + (1 - t) * torch.log(1 - torch.sigmoid(a))).mul(w).sum(),
   self=A, target=Held(MASK.to(F64)), weight=Held(POSITIVE), pos_weight=Held(POSITIVE[0]), reduction=2)

# ------------------------------------------------------------------------------------------- move, gather, scatter

INDEX, EACH_ONCE = torch.tensor([[0, 2, 1, 1], [2, 0, 0, 1]]), torch.tensor([[0, 2, 1, 1], [2, 0, 0, 2]])
TWO = torch.tensor([2, 0])


def _scatter(a: Tensor, index: Tensor, source: Tensor | float, keep: bool) -> Tensor:
    """Rows of ``a`` that ``index`` names in each column take the source's number, or add it."""
    chosen = F.one_hot(index, 3).permute(2, 0, 1).to(F64)  # [row of a, row of index, column]
    written = (chosen * source).sum(1)
    return a + written if keep else torch.where(chosen.sum(1) > 0, written, a)


op("aten.cat.default", lambda a, b: torch.hstack([a, b]), tensors=[A, B], dim=1)
op("aten.stack.default", lambda a, b: torch.cat([a[:, None], b[:, None]], 1), tensors=[A, B], dim=1)
op("aten.chunk.default", lambda a: [a[:, :2], a[:, 2:]], self=A, chunks=2, dim=1)
op("aten.split.Tensor", lambda a: [a[:, :3], a[:, 3:]], self=A, split_size=3, dim=1)
op("aten.split_with_sizes.default", lambda a: [a[:, :1], a[:, 1:]], self=A, split_sizes=[1, 3], dim=1)
op("aten.unbind.int", lambda a: [a[:, 0], a[:, 1], a[:, 2], a[:, 3]], self=A, dim=1)
op("aten.reshape.default", lambda a: a.flatten()[torch.arange(12).view(2, 6)], self=A, shape=[2, -1])
op("aten.flatten.using_ints", lambda a: a.reshape(2, 12), self=CUBE, start_dim=1, end_dim=2)
op("aten.unflatten.int", lambda a: a.reshape(3, 2, 2), self=A, dim=1, sizes=[2, 2])
op("aten.permute.default", lambda a: torch.einsum("ijk->kij", a), self=CUBE, dims=[2, 0, 1])
op("aten.transpose.int", lambda a: torch.einsum("ijk->kji", a), self=CUBE, dim0=0, dim1=2)
op("aten.movedim.int", lambda a: torch.einsum("ijk->jki", a), self=CUBE, source=0, destination=2)
op("aten.unsqueeze.default", lambda a: a[:, None], self=A, dim=1)
op("aten.squeeze.dim", lambda a: a[:, 0], self=A[:, None], dim=1)
op("aten.expand.default", lambda a: a * torch.ones(3, 1, dtype=F64), self=ROW, size=[3, -1])
op("aten.repeat.default", lambda a: torch.cat([torch.cat([a, a], 1)] * 3), self=A, repeats=[3, 2])
op("aten.repeat_interleave.self_int", lambda a: a[:, [0, 0, 1, 1, 2, 2, 3, 3]], self=A, repeats=2, dim=1)
op("aten.roll.default", lambda a: torch.cat([a[:, 3:], a[:, :3]], 1), self=A, shifts=[1], dims=[1])
op("aten.narrow.default", lambda a: a[:, 1:3], self=A, dim=1, start=1, length=2)
op("aten.slice.Tensor", lambda a: a[:, 1:4:2], self=A, dim=1, start=1, end=4, step=2)
op("aten.select.int", lambda a: a[:, -1], self=A, dim=1, index=-1)
op("aten.pad.default", lambda a: torch.cat([torch.full((3, 1), 7.0), a, torch.full((3, 2), 7.0)], 1),
   self=A, pad=[1, 2], mode="constant", value=7.0)
op("aten.slice_scatter.default", lambda a, b: torch.cat([a[:, :1], b, a[:, 3:]], 1),
   self=A, src=B[:, :2], dim=1, start=1, end=3)
op("aten.select_scatter.default", lambda a, b: torch.cat([a[:1], b[None], a[2:]]), self=A, src=ROW, dim=0, index=1)
op("aten.copy.default", lambda a, b: b * torch.ones_like(a), self=A, src=ROW)
op("aten.embedding.default", lambda w, i: F.one_hot(i, 3).to(F64) @ torch.cat([w[:1].detach(), w[1:]]),
   weight=A, indices=N % 3, padding_idx=0)
op("aten.gather.default", lambda a, i: torch.stack([a[i[0], torch.arange(4)], a[i[1], torch.arange(4)]]),
   self=A, dim=0, index=INDEX)
op("aten.index.Tensor", lambda a, i: torch.stack([a[:, 2], a[:, 0]], 1), self=A, indices=[None, TWO])
op("aten.index_select.default", lambda a, i: torch.stack([a[:, 2], a[:, 0]], 1), self=A, dim=1, index=TWO)
op("aten.index_add.default", lambda a, i, b: torch.stack([a[0] + 3 * b[1], a[1], a[2] + 3 * b[0]]),
   self=A, dim=0, index=TWO, source=B[:2], alpha=3)
op("aten.index_put.default", lambda a, i, b: torch.stack([a[0] + b[1], a[1], a[2] + b[0]]),
   self=A, indices=[TWO], values=B[:2], accumulate=True)
op("aten.scatter.src", lambda a, i, b: _scatter(a, i, b, False), self=A, dim=0, index=EACH_ONCE, src=B[:2])
op("aten.scatter.value", lambda a, i: torch.where(_scatter(a * 0, i, 1.0, True) > 0, torch.full_like(a, 5.0), a),
   self=A, dim=0, index=INDEX, value=5.0)
op("aten.scatter_add.default", lambda a, i, b: _scatter(a, i, b, True), self=A, dim=0, index=INDEX, src=B[:2])

# ------------------------------------------------------------------------------------------------ out of nothing

op("aten.arange.default", lambda: torch.tensor([0, 1, 2, 3]), end=4)
op("aten.arange.start", lambda: torch.tensor([2, 3]), start=2, end=4)
op("aten.arange.start_step", lambda: torch.tensor([1.0, 3.0, 5.0], dtype=F64), start=1, end=7, step=2, dtype=F64)
op("aten.full.default", lambda: torch.tensor([[3.0, 3.0]], dtype=F64), size=[1, 2], fill_value=3, dtype=F64)
op("aten.ones.default", lambda: torch.tensor([1, 1]), size=[2], dtype=torch.int64)
op("aten.zeros.default", lambda: torch.tensor([0, 0]), size=[2], dtype=torch.int64)
op("aten.scalar_tensor.default", lambda: torch.tensor(2.0, dtype=F64), s=2, dtype=F64)
op("aten.full_like.default", lambda a: (a * 0).long() + 3, self=A, fill_value=3, dtype=torch.int64)
op("aten.ones_like.default", lambda a: (a * 0).long() + 1, self=A, dtype=torch.int64)
op("aten.zeros_like.default", lambda a: (a * 0).long(), self=A, dtype=torch.int64)
op("aten.new_full.default", lambda a: torch.tensor([3, 3]), self=A, size=[2], fill_value=3, dtype=torch.int64)
op("aten.new_ones.default", lambda a: torch.tensor([1.0, 1.0], dtype=F64), self=A, size=[2])
op("aten.new_zeros.default", lambda a: torch.tensor([0.0, 0.0], dtype=F64), self=A, size=[2])
op("aten.fill.Scalar", lambda a: (a * 0).detach() + 3, self=A, value=3)
op("aten.fill.Tensor", lambda a, v: (a * 0).detach() + v, self=A, value=real(20).reshape(()))

# ----------------------------------------------------------------------------------------------------- recurrent


def _lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, c, seen = h[0], c[0], []
    for step in x.unbind(1):
        i, f, g, o = (step @ w.mT + b + h @ u.mT + d).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        seen.append(h)
    return torch.stack(seen, 1), h[None], c[None]


def _gru(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    h, seen = h[0], []
    for step in x.unbind(1):
        (r, z, n), (s, y, m) = (step @ w.mT + b).chunk(3, 1), (h @ u.mT + d).chunk(3, 1)
        new, keep = torch.tanh(n + torch.sigmoid(r + s) * m), torch.sigmoid(z + y)
        h = (1 - keep) * new + keep * h
        seen.append(h)
    return torch.stack(seen, 1), h[None]


_LAYER = {
    "has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True, "bidirectional": False, "batch_first": True,
}
op("aten.lstm.input", _lstm, input=CUBE, hx=[real(40, 1, 2, 5), real(41, 1, 2, 5)],
   params=[real(42, 20, 4), real(43, 20, 5), real(44, 20), real(45, 20)], **_LAYER)
op("aten.gru.input", _gru,
   input=CUBE, hx=real(40, 1, 2, 5), params=[real(46, 15, 4), real(47, 15, 5), real(48, 15), real(49, 15)], **_LAYER)
