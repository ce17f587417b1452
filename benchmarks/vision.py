"""A small ResNet trained on Fashion-MNIST over node processes, against the same run in one process.

``--data FOLDER`` holds the four files ``train-images-idx3-ubyte.gz``, ``train-labels-idx1-ubyte.gz``,
``t10k-images-idx3-ubyte.gz`` and ``t10k-labels-idx1-ubyte.gz``. On Debian: ``apt-get download dataset-fashion-mnist``,
``dpkg -x dataset-fashion-mnist_*.deb HERE``, then ``--data HERE/usr/share/datasets/fashion-mnist``.
"""

from __future__ import annotations

import argparse
import gzip
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

#: Where `train_rows` and `test_rows` look; a run names them as ``python:`` sources.
FOLDER = "FUSIONLLM_FASHION_MNIST"
MICROBATCH, BATCH = 16, 64


class Images:
    """Rows ``{pixel_values: float32 [1, 28, 28], labels: int64}``; pixels by the training set's mean and deviation."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self._images, self._labels = images, labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        pixels = (self._images[index].astype(np.float32) / 255 - 0.2860) / 0.3530
        return {"pixel_values": pixels[None], "labels": self._labels[index]}


def train_rows(kind: type[Images] = Images) -> Images:
    """60,000 images, as ``Images`` or a kind of them."""
    return _read("train", kind)


def test_rows() -> Images:
    """10,000 others."""
    return _read("t10k")


def _read(which: str, kind: type[Images] = Images) -> Images:
    folder = Path(os.environ[FOLDER])
    return kind(_idx(folder / f"{which}-images-idx3-ubyte.gz"), _idx(folder / f"{which}-labels-idx1-ubyte.gz"))


def _idx(path: Path) -> np.ndarray:
    """An array in the IDX form: a number of axes in byte 3, their big-endian sizes, the bytes."""
    data = gzip.decompress(path.read_bytes())
    axes = data[3]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(struct.unpack_from(f">{axes}I", data, 4))


def small_resnet() -> Any:
    """Six blocks at widths 16, 32, 64: 0.18M parameters, batch norm throughout."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32, 64], depths=[2, 2, 2], layer_type="basic",
        num_labels=10,
    )  # fmt: skip
    return ResNetForImageClassification(config)


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks vision", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the four files")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(argv)
    os.environ[FOLDER] = str(args.data.resolve())
    import torch

    import fusionllm

    with tempfile.TemporaryDirectory() as root:
        torch.manual_seed(0)
        started = time.perf_counter()
        result = fusionllm.train(small_resnet(), config=_config(args, root))
        seconds = time.perf_counter() - started
    torch.manual_seed(0)
    plain_losses, plain_accuracy = _plain(small_resnet(), args.steps)
    return {
        "accuracy": result.summary.val_accuracy,
        "accuracy_single_process": plain_accuracy,
        "accuracy_of_the_returned_model": _accuracy(result.model),
        "test_loss": result.summary.val_loss,
        "loss_first_step": result.losses[0],
        "abs_diff_first_step": abs(result.losses[0] - plain_losses[0]),
        "loss_last_step": result.losses[-1],
        "steps": args.steps,
        "images_per_s": result.summary.tokens_per_s,
        "seconds": seconds,
    }


def table(result: dict[str, Any]) -> str:
    return (
        f"{result['accuracy']:.1%} of the test images right after {result['steps']} steps of {BATCH} "
        f"({result['accuracy_single_process']:.1%} in one process; the model given back: "
        f"{result['accuracy_of_the_returned_model']:.1%}); {result['images_per_s']:.0f} images/s, "
        f"{result['seconds']:.0f} s"
    )


def _config(args: argparse.Namespace, root: str) -> Any:
    from fusionllm.api.config import build_config

    return build_config(
        {
            "run": {"root": root, "base_dir": str(Path(__file__).parents[1])},
            "data": {
                "source": "python:benchmarks.vision:train_rows",
                "val_source": "python:benchmarks.vision:test_rows",
            },
            "train": {"steps": args.steps, "global_batch": BATCH, "microbatch_size": MICROBATCH},
            "optimizer": {"lr": 3e-3, "weight_decay": 0.01, "schedule": "linear"},
            "cluster": {"nodes": args.nodes, "device": "cpu"},
            "output": {"sinks": [], "plot": False},
        }
    )  # fmt: skip


def _plain(model: Any, steps: int) -> tuple[list[float], float]:
    """(losses, test accuracy) of a plain loop: same rows in the same order, statistics of the same microbatches."""
    import torch

    from benchmarks.plain import plain_optimizer
    from fusionllm.compute import OptimConfig, learning_rate
    from fusionllm.store.dataset import DataConfig, open_dataset

    data = open_dataset(DataConfig(val_fraction=0.0), seed=0, base_dir=Path(), obj=train_rows())
    optim = OptimConfig(lr=3e-3, weight_decay=0.01, schedule="linear")
    optimizer = plain_optimizer(optim, model.train())
    losses = []
    for step in range(steps):
        batches, total = data.microbatches(step, global_batch=BATCH, microbatch_size=MICROBATCH), 0.0
        for batch in batches:
            loss = model(**{k: torch.from_numpy(v) for k, v in batch.items()}).loss
            (loss / len(batches)).backward()
            total += loss.item() / len(batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, _accuracy(model)


def _accuracy(model: Any) -> float:
    import torch

    rows, right = test_rows(), 0
    with torch.no_grad():
        for start in range(0, len(rows), 500):
            batch = [rows[i] for i in range(start, min(start + 500, len(rows)))]
            pixels = torch.from_numpy(np.stack([row["pixel_values"] for row in batch]))
            labels = torch.from_numpy(np.stack([row["labels"] for row in batch]))
            right += int((model.eval()(pixel_values=pixels).logits.argmax(1) == labels).sum())
    return right / len(rows)
