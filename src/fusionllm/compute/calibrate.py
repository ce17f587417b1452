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
from fusionllm.ir.cluster import NodeProfile, OpKind


def calibrate(device: str, precision: str = "float32") -> NodeProfile:
    """Time matrix products, attention, convolution and plain movements on ``device``, float32 or bfloat16, forward.

    Numbers of a busy device are those of a busy device: nodes that share one are best measured together.
    """
    ones = partial(torch.ones, device=device, dtype=getattr(torch, precision))
    weight = ones(64, 64, 3, 3)
    functions: dict[OpKind, Callable[[torch.Tensor], torch.Tensor]] = {
        "matmul": lambda x: F.linear(x, x),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "convolution": lambda x: F.conv2d(x, weight, padding=1),
        "memory": F.gelu,
    }
    with torch.no_grad():
        samples = time_kinds(functions, lambda f, shape: partial(_waited, device, f, ones(shape)), weight.itemsize)
    return NodeProfile(device=_name(device), memory_bytes=_free_bytes(device), samples=samples)


def _waited(device: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    function(x)
    kind = device.partition(":")[0]
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def _name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device


def _free_bytes(device: str) -> float:
    if device.startswith("cuda"):
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
