"""The verbs a person uses from Python: `train`, `capture`, `export`. Everything here may import all rooms below."""

from fusionllm.api.config import RunConfig, load_config
from fusionllm.api.train import TrainResult, train
from fusionllm.api.verbs import capture, export

__all__ = ["RunConfig", "TrainResult", "capture", "export", "load_config", "train"]
