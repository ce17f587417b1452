"""Tensors of torch as the blobs of a checkpoint, and back into the user's module."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusionllm.capture.weights import write_back
from fusionllm.compute.wire import dtype_name, tensor_from_buffer, tensor_to_bytes
from fusionllm.store.tensorfile import Blob


def to_blobs(tensors: Mapping[str, torch.Tensor]) -> dict[str, Blob]:
    """The tensors by the same names; views of their memory where that is possible."""
    return {n: Blob(dtype_name(t), tuple(t.shape), tensor_to_bytes(t)) for n, t in tensors.items()}


def restore(module: torch.nn.Module, weights: Mapping[str, Blob]) -> torch.nn.Module:
    """Put trained weights into a module and that into eval mode. Raises CheckpointError when they do not fit."""
    write_back(module, {n: tensor_from_buffer(b.data, b.dtype, b.shape) for n, b in weights.items()})
    return module.eval()
