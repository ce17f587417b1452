"""A job before any node is asked: data opened, model built, captured as a graph. The owner's first use of torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from fusionllm.api.config import RunConfig
from fusionllm.api.lazy import LazyWeights
from fusionllm.api.weights import restore, to_blobs
from fusionllm.capture.export import Captured, capture_module
from fusionllm.capture.options import ARCHITECTURES, check_context
from fusionllm.capture.sources import Source, resolve_model
from fusionllm.compute import OptimConfig, resolve_groups
from fusionllm.compute.optim import Optimizer
from fusionllm.errors import UserError
from fusionllm.ir.modes import with_metrics
from fusionllm.store.dataset import Dataset, open_dataset
from fusionllm.store.tensorfile import Blob
from fusionllm.store.weights import WeightFolder


@dataclass
class Job:
    """Everything known before a node is asked.

    Attributes:
        config: with what the data settled, such as the size of the vocabulary.
        captured: the graph has metrics where there are any to count.
        graph_hash: identity of the graph without them.
        optim: the optimizer with its groups by the names of the graph.
    """

    config: RunConfig
    dataset: Dataset
    source: Source
    captured: Captured
    graph_hash: str
    optim: OptimConfig

    def weights(self) -> Mapping[str, Blob]:
        """All tensors as they are before training."""
        if not self.config.model.lazy:
            return to_blobs(self.captured.tensors)
        source, config = self.source, self.config
        folder = WeightFolder(source.folder) if source.folder is not None else None
        return LazyWeights(self.captured, folder, source.inits, source.values, config.run.seed, config.model.mirrors)

    def restore(self, weights: Mapping[str, Blob]) -> torch.nn.Module:
        """The user's module with trained weights, in eval mode; of a lazy model, without any."""
        return self.source.module.eval() if self.config.model.lazy else restore(self.source.module, weights)


def prepare(
    config: RunConfig, base_dir: Path, module: torch.nn.Module | None = None, obj: Any = None, num_threads: int = 0
) -> Job:
    """Open the data, build the model, capture it.

    Args:
        module, obj: a model and data given by the caller, instead of the config's; a Dataset is opened already.
        num_threads: of torch in this process from now on; 0: as it is.

    Raises:
        UserError, CaptureError: what was given cannot be used.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    with _no_collection():
        config, dataset, source = open_model(config, base_dir, module, obj)
        if config.train.precision == "bfloat16-weights":
            source.module.to(torch.bfloat16)
        example = {name: torch.from_numpy(array) for name, array in dataset.example().items()}
        captured = capture_module(
            source.module, example, allow_ops=config.model.allow_ops, open_length=dataset.max_length > 0
        )
    graph = captured.graph
    captured = captured._replace(graph=with_metrics(graph))
    optim = resolve_groups(config.optimizer, graph)
    # torch's own complaints about it, while nothing is started
    Optimizer(optim, {n: torch.zeros([1] * len(p.spec.shape), requires_grad=True) for n, p in graph.params.items()})
    return Job(config, dataset, source, captured, graph.content_hash(), optim)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which takes a tenth of the time while all that is made is kept."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def open_model(
    config: RunConfig, base_dir: Path, module: torch.nn.Module | None = None, obj: Any = None
) -> tuple[RunConfig, Dataset, Source]:
    """The data and the model that fits it, before capture. Raises UserError."""
    opened = isinstance(obj, Dataset)
    dataset = obj if opened else open_dataset(config.data, seed=config.run.seed, base_dir=base_dir, obj=obj)
    model = config.model
    if module is None and dataset.vocab_size and model.source in ARCHITECTURES and "vocab_size" not in model.config:
        model = msgspec.structs.replace(model, config={**model.config, "vocab_size": dataset.vocab_size})
        config = msgspec.structs.replace(config, model=model)
    source = resolve_model(model, base_dir=base_dir, seed=config.run.seed, module=module, empty=model.lazy)
    if dataset.vocab_size:
        check_context(config.data.seq_len, source.max_seq_len)
        _check_vocabulary(source, dataset.vocab_size)
    return config, dataset, source


def _check_vocabulary(source: Source, vocab_size: int) -> None:
    if source.vocab_size is not None and vocab_size > source.vocab_size:
        raise UserError(
            f"the tokenizer has {vocab_size} ids, the model's vocabulary {source.vocab_size}; "
            "set model.config.vocab_size to the tokenizer's"
        )
