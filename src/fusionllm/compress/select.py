"""Which elements are largest: exact, deterministic on every device, and as fast as an approximate threshold.

A fixed sample guesses a threshold a little too low; one pass keeps the few elements above it; the exact
choice is made among those, ties going to the lower position. Should the guess be wrong (it is checked, never
trusted), the same choice is made over everything. 3.1 M elements at 1 %: about 4 ms on one core, where
``torch.topk`` takes 70.

Reference: the sampled threshold is Deep Gradient Compression's (1712.01887), made exact here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Below this many elements one plain selection is as quick.
_SMALL = 1 << 15
_SAMPLE = 1 << 14
#: The golden ratio's multiplicative sequence spreads the sample over rows and channels without a random
#: generator.
_GOLDEN = 0.6180339887498949


def largest(magnitude: Tensor, count: int) -> Tensor:
    """Flat positions of the ``count`` largest of a non-negative float32 [n], increasing, int64.

    Ties go to the lower position. ``magnitude`` holds no NaN.
    """
    numel = magnitude.numel()
    if count >= numel:
        return torch.arange(numel, device=magnitude.device)
    if numel > _SMALL and count * 2 < numel:
        candidates = _above(magnitude, _guess_threshold(magnitude, count))
        if candidates.numel() >= count:
            return candidates[_largest_exact(magnitude[candidates], count)]
    return _largest_exact(magnitude, count)


def largest_per_row(magnitude: Tensor, count: int) -> Tensor:
    """Flat positions of the ``count`` largest of each row of a float32 [rows, width], increasing."""
    rows, width = magnitude.shape
    columns = magnitude.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    return (columns + torch.arange(rows, device=magnitude.device)[:, None] * width).reshape(-1)


def _guess_threshold(magnitude: Tensor, count: int) -> Tensor:
    """A magnitude that a little more than ``count`` elements reach.

    Four standard deviations of the sample above.
    """
    numel = magnitude.numel()
    steps = torch.arange(_SAMPLE, dtype=torch.float64, device=magnitude.device) * _GOLDEN
    sample = magnitude[((steps - steps.floor()) * numel).long().clamp_(max=numel - 1)]
    expected = count / numel * _SAMPLE
    rank = min(_SAMPLE, math.ceil(expected + 4 * math.sqrt(expected) + 4))
    return sample.kthvalue(_SAMPLE - rank + 1).values


def _above(magnitude: Tensor, threshold: Tensor) -> Tensor:
    mask = magnitude >= threshold
    if mask.device.type == "cpu":
        # numpy's scan of a boolean array is several times quicker than torch.nonzero.
        return torch.from_numpy(mask.numpy().nonzero()[0])
    return mask.nonzero().view(-1)


def _largest_exact(magnitude: Tensor, count: int) -> Tensor:
    kth = magnitude.kthvalue(magnitude.numel() - count + 1).values
    sure = magnitude > kth
    ties = _above(magnitude, kth)
    ties = ties[~sure[ties]][: count - int(sure.sum())]
    sure[ties] = True
    return _above(sure.float(), torch.tensor(1.0, device=magnitude.device))
