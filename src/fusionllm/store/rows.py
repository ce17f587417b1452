"""Rows: samples that can be taken by index and stacked into a batch.

Three tables: packed text, texts of their own length, ready rows of arrays. Knows no order, no split and no tensor
framework. On the path: tokens or Python rows -> **table of rows** -> batches of numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from fusionllm.errors import UserError
from fusionllm.ir.tensor import DTYPES, TensorSpec

#: Ready rows may be computed on access, so their fingerprint reads this many of them, spread evenly.
FINGERPRINT_ROWS = 16
#: Label of a position that counts in no loss; torch's cross entropy leaves it out unless told otherwise.
IGNORED = -100


class RowTable(Protocol):
    """Samples by index.

    Attributes:
        num_rows: how many.
        columns: name -> dtype and shape of one row, without the batch dimension; a size that differs from batch to
            batch is called ``T``.
        fingerprint: a hash of the content.
    """

    num_rows: int
    columns: dict[str, TensorSpec]
    fingerprint: str

    def take(self, indices: Sequence[int]) -> dict[str, np.ndarray]: ...


class PackedText:
    """One flat array of ids cut into rows of ``seq_len``; what is left at the end, less than a row, is
    dropped.

    A batch of B rows is ``{"input_ids": int64 [B, seq_len], "labels": int64 [B, seq_len]}`` with equal
    contents: the models of Hugging Face shift the labels themselves.

    Args:
        starts: where documents begin, to keep them apart: then there are ``position_ids``, int64 [B, seq_len], which
            begin at 0 with every document, and a document's first token is no label.
    """

    def __init__(self, ids: np.ndarray, seq_len: int, starts: np.ndarray | None = None) -> None:
        self.num_rows = len(ids) // seq_len
        self._rows_NT = ids[: self.num_rows * seq_len].reshape(self.num_rows, seq_len)
        self._starts = starts
        names = ("input_ids", "labels") + ("position_ids",) * (starts is not None)
        self.columns = {name: TensorSpec("int64", (seq_len,)) for name in names}
        self.fingerprint = _text_hash(ids, starts)

    def take(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        rows = np.asarray(indices, dtype=np.int64)
        ids_BT = self._rows_NT[rows].astype(np.int64)
        batch = {"input_ids": ids_BT, "labels": ids_BT.copy()}
        if self._starts is not None:
            seq_len = ids_BT.shape[1]
            places_BT = rows[:, None] * seq_len + np.arange(seq_len)
            first_BT = self._starts[np.searchsorted(self._starts, places_BT, side="right") - 1]
            batch["labels"][places_BT == first_BT] = IGNORED
            batch["position_ids"] = places_BT - np.maximum(first_BT, places_BT[:, :1])
        return batch


class PaddedText:
    """A document a row, a longer one in pieces of ``seq_len``; padded on the right to the longest row of the batch.

    A batch of B rows is ``{"input_ids", "attention_mask", "labels"}``, each int64 [B, T] with T at most ``seq_len``.
    Padding has id 0, mask 0 and no label. A piece of one token, which predicts nothing, is left out.
    """

    def __init__(self, ids: np.ndarray, seq_len: int, starts: np.ndarray) -> None:
        self._ids = ids
        ends = [*starts[1:].tolist(), len(ids)]
        pieces = [
            (at, min(at + seq_len, end))
            for start, end in zip(starts.tolist(), ends)
            for at in range(start, end, seq_len)
            if end - at > 1
        ]
        self._pieces_N2 = np.array(pieces, dtype=np.int64).reshape(-1, 2)
        self.num_rows = len(pieces)
        self.columns = {name: TensorSpec("int64", ("T",)) for name in ("input_ids", "attention_mask", "labels")}
        self.fingerprint = _text_hash(ids, starts)

    def take(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        pieces_B2 = self._pieces_N2[np.asarray(indices, dtype=np.int64)]
        lengths_B1 = pieces_B2[:, 1:] - pieces_B2[:, :1]
        offsets_T = np.arange(lengths_B1.max())
        mask_BT = offsets_T < lengths_B1
        ids_BT = np.where(mask_BT, self._ids[np.minimum(pieces_B2[:, :1] + offsets_T, len(self._ids) - 1)], 0)
        ids_BT = ids_BT.astype(np.int64)
        return {
            "input_ids": ids_BT,
            "attention_mask": mask_BT.astype(np.int64),
            "labels": np.where(mask_BT, ids_BT, IGNORED),
        }


def _text_hash(ids: np.ndarray, starts: np.ndarray | None) -> str:
    digest = xxhash.xxh3_128(ids.astype("<u4", copy=False).data)
    if starts is not None:
        digest.update(starts.data)
    return digest.hexdigest()


class ArrayRows:
    """A map-style sequence of dicts of arrays; every row has the columns, dtypes and shapes of row 0."""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows, self._name = rows, name
        self.num_rows = len(rows)
        first = {column: self._array(column, value, 0) for column, value in rows[0].items()}
        self.columns = {column: TensorSpec(array.dtype.name, array.shape) for column, array in first.items()}
        digest = xxhash.xxh3_128(f"{self.num_rows} {self.columns}".encode())
        for index in np.unique(np.linspace(0, self.num_rows - 1, FINGERPRINT_ROWS).astype(np.int64)):
            for array in self._row(int(index)).values():
                digest.update(np.ascontiguousarray(array).tobytes())
        self.fingerprint = digest.hexdigest()

    def take(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        rows = [self._row(int(index)) for index in indices]
        return {column: np.stack([row[column] for row in rows]) for column in self.columns}

    def _row(self, index: int) -> dict[str, np.ndarray]:
        row = self._rows[index]
        if not isinstance(row, Mapping) or set(row) != set(self.columns):
            keys = ", ".join(map(repr, row)) if isinstance(row, Mapping) else type(row).__name__
            raise UserError(
                f"{self._name}: row {index} has {keys}, row 0 has {', '.join(map(repr, self.columns))}; "
                f"every row needs the same columns"
            )
        arrays = {column: self._array(column, row[column], index) for column in self.columns}
        for column, array in arrays.items():
            spec = self.columns[column]
            if array.dtype.name != spec.dtype or array.shape != spec.shape:
                found = TensorSpec(array.dtype.name, array.shape)
                raise UserError(
                    f"{self._name}: column {column!r} is {found} in row {index} but {spec} in row 0; pad or "
                    f"crop the rows to one shape and dtype"
                )
        return arrays

    def _array(self, column: str, value: Any, index: int) -> np.ndarray:
        """One value as an array; Python floats become float32, the dtype models are built in."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{self._name}: column {column!r} of row {index} is no array: {error}; give numbers of one shape"
            ) from None
        if array.dtype == np.float64 and isinstance(value, (float, list, tuple)):
            array = array.astype(np.float32)
        if array.dtype.name not in DTYPES:
            raise UserError(
                f"{self._name}: column {column!r} of row {index} has dtype {array.dtype}; use one of "
                f"{', '.join(DTYPES)}"
            )
        return array
