"""How far a decoded tensor is from the true one: the quality guard's measure. Pure.

On no path, called on a sample.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor


class Distortion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message compared with what a dense codec would have sent.

    Attributes:
        nmse: squared error over the squared norm; 0 is perfect, 1 is as good as sending zeros.
        cosine: between the two as vectors; 1 is perfect.
        true_ratio: dense bytes over the bytes sent.
    """

    nmse: float
    cosine: float
    true_ratio: float


@torch.no_grad()
def measure_distortion(true: Tensor, decoded: Tensor, num_bytes: int) -> Distortion:
    """Compare a tensor with its decoded form, same shape; ``num_bytes`` is what travelled.

    Two zero tensors are equal: error 0, cosine 1. A zero tensor decoded as another has error inf.
    """
    a, b = true.reshape(-1).double().cpu(), decoded.reshape(-1).double().cpu()
    power, other = float(a.square().sum()), float(b.square().sum())
    error = float((a - b).square().sum())
    nmse = error / power if power > 0 else (0.0 if error == 0 else float("inf"))
    norm = (power**0.5) * (other**0.5)
    cosine = float(a @ b) / norm if norm > 0 else (1.0 if power == other else 0.0)
    return Distortion(nmse, cosine, true.numel() * true.element_size() / max(1, num_bytes))
