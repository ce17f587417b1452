"""Tensors as bytes and back, checked. Little-endian, contiguous, as safetensors has them."""

from __future__ import annotations

from typing import Any

import torch

from fusionllm.compute.backend import checked_view
from fusionllm.compute.stage import dtype_name
from fusionllm.errors import RemoteProtocolError

__all__ = ["dtype_name", "tensor_from_buffer", "tensor_to_bytes"]


def tensor_to_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; a view of its memory when it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy().data)


def tensor_from_buffer(buffer: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over a buffer. Raises RemoteProtocolError when dtype, shape and length do not agree."""
    view = checked_view(buffer, dtype, shape)
    kind = getattr(torch, dtype)
    if view.readonly and len(view) > 0:
        view = memoryview(bytearray(view))
    try:
        flat = torch.frombuffer(view, dtype=kind) if len(view) > 0 else torch.empty(0, dtype=kind)
        return flat.reshape(shape)
    except (RuntimeError, OverflowError, TypeError):  # e.g. a size past 64 bits beside a size of 0
        raise RemoteProtocolError(
            f"torch cannot hold {dtype}{list(shape)[:16]}; sizes and rank are too large"
        ) from None
