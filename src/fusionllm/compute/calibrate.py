"""Calibration: what this device really does, in a few seconds, one kind of operator after another.

On the path: device -> **NodeProfile** -> `estimate.device.fit_rates`, in the broker. Sizes grow until a call takes long
enough to be timed; the smallest calls show what a launch costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import psutil
import torch
from torch.nn import functional as F

from fusionllm.compute.timing import LONG_S, sustained_s
from fusionllm.ir.cluster import NodeProfile, OpKind, Sample

_Case = tuple[OpKind, float, float, Callable[[], object]]
_Ones = Callable[..., torch.Tensor]


def calibrate(device: str, precision: str = "float32") -> NodeProfile:
    """Time matrix products, attention, convolution and plain movements on ``device``, float32 or bfloat16, forward.

    Numbers of a busy device are those of a busy device: nodes that share one are best measured together.
    """
    samples: list[Sample] = []
    ones = partial(torch.ones, device=device, dtype=getattr(torch, precision))
    with torch.no_grad():
        for cases in (_matmul(ones), _attention(ones), _convolution(ones), _memory(ones)):
            for kind, flops, moved_bytes, call in cases:
                seconds = sustained_s(partial(_waited, device, call))
                samples.append(Sample(kind=kind, flops=flops, moved_bytes=moved_bytes, seconds=seconds))
                if seconds > LONG_S:
                    break
    return NodeProfile(device=_name(device), memory_bytes=_free_bytes(device), samples=tuple(samples))


def _waited(device: str, call: Callable[[], object]) -> None:
    call()
    kind = device.partition(":")[0]
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def _matmul(ones: _Ones) -> Iterator[_Case]:
    for size in (32, 128, 256, 512, 1024, 2048, 4096, 8192):
        a, b = (ones(size, size) for _ in range(2))
        yield "matmul", 2.0 * size**3, 3.0 * a.nbytes, lambda a=a, b=b: F.linear(a, b)  # type: ignore[misc]


def _attention(ones: _Ones) -> Iterator[_Case]:
    for rows in (1, 4, 16, 64, 256):
        q = ones(rows, 8, 128, 64)
        flops = 4.0 * rows * 8 * 128 * 128 * 64
        call = lambda q=q: F.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731
        yield "attention", flops, 4.0 * q.nbytes, call


def _convolution(ones: _Ones) -> Iterator[_Case]:
    weight = ones(64, 64, 3, 3)
    for rows in (1, 4, 16, 64):
        x = ones(rows, 64, 28, 28)
        flops = 2.0 * x.numel() * 64 * 9
        yield "convolution", flops, 2.0 * x.nbytes, lambda x=x: F.conv2d(x, weight, padding=1)  # type: ignore[misc]


def _memory(ones: _Ones) -> Iterator[_Case]:
    for size in (1 << 10, 1 << 20, 1 << 22, 1 << 24, 1 << 26):
        x = ones(size)
        yield "memory", float(size), 2.0 * x.nbytes, lambda x=x: F.gelu(x)  # type: ignore[misc]


def _name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device


def _free_bytes(device: str) -> float:
    if device.startswith("cuda"):
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
