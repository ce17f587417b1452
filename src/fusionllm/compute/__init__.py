"""Executing graphs on a device: one backend per framework, the same operators and the same tests for each."""

from fusionllm.compute.optim import OptimConfig, learning_rate
from fusionllm.compute.stage import ComputeOptions, TorchStage
from fusionllm.compute.wire import tensor_from_buffer, tensor_to_bytes

#: name -> stage class. A new backend is a class with TorchStage's methods and one line here.
BACKENDS = {"torch": TorchStage}

__all__ = [
    "BACKENDS", "ComputeOptions", "OptimConfig", "TorchStage", "learning_rate", "tensor_from_buffer", "tensor_to_bytes",
]  # fmt: skip
