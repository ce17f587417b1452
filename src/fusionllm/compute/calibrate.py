"""Calibration: what this device really does, in a few seconds, one kind of operator after another.

On the path: device -> **NodeProfile** -> `estimate.device.fit_rates`, in the broker. `compute.timing` has the sizes:
they grow until a call takes long enough to be timed; the smallest calls show what a launch costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import psutil
import torch
from torch.nn import functional as F

from fusionllm.compute.timing import time_kinds
from fusionllm.compute.torch_backend import autocast
from fusionllm.ir.cluster import NodeProfile, OpKind


def calibrate(device: str, precision: str = "float32") -> NodeProfile:
    """Time matrix products, attention, convolution and plain movements on ``device``, forward and backward.

    Numbers of a busy device are those of a busy device: nodes that share one are best measured together.

    Args:
        precision: of `ComputeOptions`; operators are timed as a stage computes them in it.
    """
    dtype = torch.bfloat16 if precision == "bfloat16-weights" else torch.float32
    full = partial(torch.full, device=device, dtype=dtype, requires_grad=True)
    weight = full((64, 64, 3, 3), 1 / (64 * 9))
    functions: dict[OpKind, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "matmul": F.linear,
        "attention": lambda y, x: F.scaled_dot_product_attention(y, x, x, is_causal=True),
        "convolution": lambda y, x: F.conv2d(y, weight, padding=1),
        "memory": lambda y, x: F.gelu(y) * x + x,
    }
    kind = torch.device(device).type

    def prepare(
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], shape: tuple[int, ...], count: int
    ) -> Callable[[], object]:
        x = full(shape, 1 / shape[-1])

        def call() -> None:
            y = x
            with autocast(kind, precision):
                for _ in range(count):
                    y = function(y, x)
            torch.autograd.backward(y, y.detach())
            x.grad = weight.grad = None
            if kind != "cpu":
                getattr(torch, kind).synchronize()

        return call

    samples = time_kinds(functions, prepare, weight.itemsize)
    return NodeProfile(device=_name(device), memory_bytes=_free_bytes(device), samples=samples)


def _name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device


def _free_bytes(device: str) -> float:
    if device.startswith("cuda"):
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
