"""How long a codec takes on this machine: the planner counts it as part of a link's time.

Two sizes are timed and a line drawn through the medians: seconds per element and a fixed part. Called once
per node and codec, off the training path; the clock is an argument so that a test needs no stopwatch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from fusionllm.compress.codec import Reference
from fusionllm.compress.registry import decode, encode, init, remember, support
from fusionllm.ir.codec import CodecSpec, CodecSpeed, codec_spec

_WIDTH = 512
_SMALL_ROWS, _LARGE_ROWS = 8, 512
#: Messages that do not count: caches are cold, and codecs that find a basis do so at every one of them.
_WARM = 3


def measure_speed(spec: CodecSpec, *, repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> CodecSpeed:
    """Time a codec on float32 data of 4 K and 262 K elements, on the CPU with the present thread count.

    Args:
        spec: any codec; one that leans on a forward message is given one.
        repeats: timed calls per size and direction; the median counts.
        clock: seconds, monotonic.
    """
    small, large = (_median_times_s(spec, rows, repeats, clock) for rows in (_SMALL_ROWS, _LARGE_ROWS))
    elements = (_LARGE_ROWS - _SMALL_ROWS) * _WIDTH
    encode_s, decode_s = (max(0.0, big - little) / elements for little, big in zip(small, large, strict=True))
    fixed_s = sum(small) - (encode_s + decode_s) * _SMALL_ROWS * _WIDTH
    return CodecSpeed(encode_s, decode_s, max(0.0, fixed_s) / 2)


def _median_times_s(spec: CodecSpec, rows: int, repeats: int, clock: Callable[[], float]) -> tuple[float, float]:
    shape = (rows, _WIDTH)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    reference = _reference(spec, x)
    state = init(spec, shape, "float32")
    memory = reference.memory
    encode_times_s, decode_times_s = [], []
    for _ in range(_WARM + repeats):
        start_s = clock()
        payload, state = encode(x, state, reference=reference)
        encoded_s = clock()
        memory = remember(payload, spec, shape, "float32", memory)
        held = Reference(reference.activation, reference.support, memory)
        decode(payload, spec, shape, "float32", reference=held)
        encode_times_s.append(encoded_s - start_s)
        decode_times_s.append(clock() - encoded_s)
    return statistics.median(encode_times_s[_WARM:]), statistics.median(decode_times_s[_WARM:])


def _reference(spec: CodecSpec, x: torch.Tensor) -> Reference:
    """A forward message for the codecs that need one: the tensor itself, and a mask of the right size."""
    core = spec.core
    if core.name != "same-mask":
        return Reference(x)
    forward = codec_spec("topk", {"ratio": core.number("ratio"), "scope": core.word("scope")})
    payload, _ = encode(x, init(forward, x.shape, "float32"))
    return Reference(x, support(payload, forward, x.shape))
