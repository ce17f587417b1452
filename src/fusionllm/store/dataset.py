"""The data of a run: rows in an order that is a pure function of (seed, step, microbatch).

No torch, no clock, no state: any process that opens the same data with the same seed gets the same batches,
so a resumed run continues exactly where it stopped and a lost step can be fed again. Knows no model and no
stage. On the path: documents or rows -> **batches of numpy arrays** -> the stages' inputs.

An epoch's order is the stable argsort of the raw 64-bit stream of Philox keyed on (seed, epoch): numpy
promises that stream never changes, which it does not promise for ``Generator.permutation``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash

from fusionllm.errors import UserError
from fusionllm.ir.tensor import TensorSpec
from fusionllm.store.rows import ArrayRows, PackedText, PaddedText, RowTable
from fusionllm.store.sources import Documents, Rows, open_source, wrap_object
from fusionllm.store.tokens import Tokenizer, check_tokenizer, open_tokenizer, tokenize

_MASK_64 = (1 << 64) - 1


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the data comes from and how it is cut.

    Attributes:
        source: a text file, a folder of .txt, .md or .jsonl files, ``hf:DATASET[:CONFIG]``, or
            ``python:module:function`` that returns texts or a sequence of dicts of arrays.
        tokenizer: ``bytes``, ``bytes+eos``, a tokenizers JSON file, a folder with tokenizer.json, or
            a hub id.
        text_column: column of a dataset, or key of a JSON line, with the text.
        split: split of a Hugging Face dataset.
        seq_len: tokens per row of text, at least 2.
        documents: ``joined``: one after the other, cut into rows. ``apart``: the same, with ``position_ids`` that begin
            anew with each, by which the models that take them keep documents from seeing each other. ``padded``: a row
            each, padded to the longest of its microbatch, with an ``attention_mask``; seq_len is the longest.
        val_fraction: share of the rows, a block at the end, kept for validation; in [0, 1).
        val_source: other data to validate on, in the same forms; then no row is taken from ``source``.
        val_split: split of a Hugging Face dataset named by ``val_source``.
    """

    source: str = ""
    tokenizer: str = "bytes"
    text_column: str = "text"
    split: str = "train"
    seq_len: int = 128
    documents: Literal["joined", "apart", "padded"] = "joined"
    val_fraction: float = 0.05
    val_source: str | None = None
    val_split: str = "validation"

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UserError(f"data.seq_len is {self.seq_len}; a row needs at least 2 tokens to predict one")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"data.val_fraction is {self.val_fraction}; it must be at least 0 and below 1, as in 0.05")


class Dataset:
    """Training and validation rows. Made by ``open_dataset``.

    Attributes:
        num_rows: training rows.
        num_val_rows: validation rows; 0 when there is no validation.
        columns: name -> dtype and shape of one row, without the batch dimension.
        vocab_size: ids are below it; None for ready rows.
        tokenizer: None for ready rows.
        max_length: of a sequence, where that differs from batch to batch; 0 where rows are of one shape.
        fingerprint: hash of content and options; a resumed run compares it.
    """

    def __init__(
        self,
        train: RowTable,
        val: RowTable,
        *,
        num_rows: int,
        val_start: int,
        seed: int,
        tokenizer: Tokenizer | None,
        max_length: int = 0,
    ) -> None:
        self._train, self._val, self._val_start = train, val, val_start
        self._seed = seed
        self._epoch_order: tuple[int, np.ndarray] | None = None
        self.num_rows = num_rows
        self.num_val_rows = val.num_rows - val_start
        self.columns: dict[str, TensorSpec] = train.columns
        self.tokenizer, self.max_length = tokenizer, max_length
        self.vocab_size = tokenizer.vocab_size if tokenizer else None
        parts = (train.fingerprint, val.fingerprint, num_rows, val_start, seed, self.columns)
        name = tokenizer.fingerprint if tokenizer else ""
        self.fingerprint = xxhash.xxh3_128_hexdigest(repr((*parts, name)).encode())

    def steps_per_epoch(self, global_batch: int) -> int:
        """Steps in which every training row is seen once; the last of them may be short.

        Raises:
            UserError: there are fewer training rows than one global batch.
        """
        if global_batch < 1:
            raise UserError(f"a global batch of {global_batch} rows is empty; use 1 or more")
        if self.num_rows < global_batch:
            raise UserError(
                f"the data has {self.num_rows} training rows but one global batch needs {global_batch}; give "
                f"more data, or lower the batch size, data.seq_len or data.val_fraction"
            )
        return math.ceil(self.num_rows / global_batch)

    def microbatches(self, step: int, *, global_batch: int, microbatch_size: int) -> list[dict[str, np.ndarray]]:
        """The microbatches of one step, each ``{column: [B, ...]}`` with 1 <= B <= microbatch_size.

        Args:
            step: number of the step, from 0; steps walk through one epoch after another.
            global_batch: rows per step.
            microbatch_size: rows per microbatch.

        Returns:
            ``ceil(rows / microbatch_size)`` microbatches; the last step of an epoch may have fewer, and any
            step's last microbatch may be smaller. Never an empty one.

        Raises:
            UserError: there are fewer training rows than one global batch.
        """
        rows = self.step_rows(step, global_batch)
        if microbatch_size < 1:
            raise UserError(f"a microbatch of {microbatch_size} rows is empty; use 1 or more")
        return [
            self._train.take(rows[start : start + microbatch_size]) for start in range(0, len(rows), microbatch_size)
        ]

    def example(self) -> dict[str, np.ndarray]:
        """Two training rows to capture a model with, as long as any. Raises UserError when there are fewer."""
        first = self.microbatches(0, global_batch=2, microbatch_size=2)[0]
        if not self.max_length:
            return first
        return {name: np.pad(a, ((0, 0), (0, self.max_length - a.shape[1]))) for name, a in first.items()}

    def step_rows(self, step: int, global_batch: int) -> list[int]:
        """Indices of the training rows of one step, in order."""
        epoch, index = divmod(step, self.steps_per_epoch(global_batch))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, epoch_order(self._seed, epoch, self.num_rows))
        order = self._epoch_order[1]
        return [int(row) for row in order[index * global_batch : (index + 1) * global_batch]]

    def val_batches(self, batch_size: int, max_batches: int | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Validation batches in a fixed order, the last short one included; at most ``max_batches``."""
        if batch_size < 1:
            raise UserError(f"a validation batch of {batch_size} rows is empty; use 1 or more")
        starts = range(self._val_start, self._val.num_rows, batch_size)
        for start in starts[:max_batches]:
            yield self._val.take(range(start, min(start + batch_size, self._val.num_rows)))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, such as a prompt. Raises UserError for data that is not text."""
        return self._require_tokenizer().encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; special tokens and unknown ids are left out."""
        return self._require_tokenizer().decode(ids)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("the data is rows of arrays, not text: there is no tokenizer to encode or decode with")
        return self.tokenizer


def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """A permutation of ``range(num_rows)``, int64 [num_rows], that depends on nothing but its arguments."""
    key = np.array([seed & _MASK_64, epoch & _MASK_64], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(num_rows), kind="stable")


def open_dataset(config: DataConfig, *, seed: int, base_dir: Path, obj: Any = None) -> Dataset:
    """Open the data of a run.

    Args:
        config: where it comes from and how it is cut.
        seed: the run's seed; decides the order of the training rows.
        base_dir: relative paths start here.
        obj: data given in Python instead of ``config.source``: a list of texts, a Hugging Face Dataset, or a
            map-style sequence of dicts of arrays.

    Raises:
        UserError: the data cannot be used; the message names the value and the fix.
    """
    check_tokenizer(config.tokenizer, base_dir)  # before what may take long to read
    if obj is None:
        train_source = _open(config, config.source, config.split, base_dir)
    else:
        train_source = wrap_object(obj, "the data given in Python", config.text_column)
    tokenizer = open_tokenizer(config.tokenizer, base_dir) if isinstance(train_source, Documents) else None
    train = _table(train_source, tokenizer, config)
    max_length = config.seq_len if isinstance(train, PaddedText) else 0
    if config.val_source is not None:
        val = _table(_open(config, config.val_source, config.val_split, base_dir), tokenizer, config)
        if val.columns != train.columns:
            raise UserError(
                f"data.val_source {config.val_source!r} has the columns {_names(val)} but the training data "
                f"has {_names(train)}; both need the same"
            )
        return Dataset(
            train, val, num_rows=train.num_rows, val_start=0, seed=seed, tokenizer=tokenizer, max_length=max_length
        )
    num_val = num_val_rows(train.num_rows, config.val_fraction)
    cut = train.num_rows - num_val
    return Dataset(train, train, num_rows=cut, val_start=cut, seed=seed, tokenizer=tokenizer, max_length=max_length)


def num_val_rows(num_rows: int, val_fraction: float) -> int:
    """Rows kept for validation: at least one when any are asked for, and never the last training row."""
    if val_fraction == 0:
        return 0
    return min(max(1, round(num_rows * val_fraction)), num_rows - 1)


def _open(config: DataConfig, source: str, split: str, base_dir: Path) -> Documents | Rows:
    return open_source(source, text_column=config.text_column, split=split, base_dir=base_dir)


def _names(table: RowTable) -> str:
    return ", ".join(f"{name}: {spec}" for name, spec in table.columns.items())


def _table(source: Documents | Rows, tokenizer: Tokenizer | None, config: DataConfig) -> RowTable:
    if isinstance(source, Rows):
        if config.documents != "joined":
            raise UserError(
                f"data.documents is {config.documents!r}, which is for text; {source.name} is rows of arrays"
            )
        return ArrayRows(source.rows, source.name)
    if tokenizer is None:
        raise UserError(f"{source.name} is text but the training data is rows of arrays; both must be of one kind")
    ids, starts = tokenize(source.texts, tokenizer)
    if config.documents == "padded":
        if len(ids) < 2:
            raise UserError(f"{source.name} has {len(ids)} tokens; a row needs at least 2")
        return PaddedText(ids, config.seq_len, starts)
    if len(ids) < config.seq_len:
        raise UserError(
            f"{source.name} has {len(ids)} tokens, fewer than one row of data.seq_len = {config.seq_len}; "
            f"give more text or lower data.seq_len"
        )
    return PackedText(ids, config.seq_len, starts if config.documents == "apart" else None)
