"""Rows: samples of fixed shape that can be taken by index and stacked into a batch.

Two tables, one for packed text and one for ready rows of arrays. Knows no order, no split and no tensor
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


class RowTable(Protocol):
    """Samples by index.

    Attributes:
        num_rows: how many.
        columns: name -> dtype and shape of one row, without the batch dimension.
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
    """

    def __init__(self, ids: np.ndarray, seq_len: int) -> None:
        self.num_rows = len(ids) // seq_len
        self._rows_NT = ids[: self.num_rows * seq_len].reshape(self.num_rows, seq_len)
        self.columns = {name: TensorSpec("int64", (seq_len,)) for name in ("input_ids", "labels")}
        self.fingerprint = xxhash.xxh3_128_hexdigest(ids.astype("<u4", copy=False).data)

    def take(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        ids_BT = self._rows_NT[np.asarray(indices, dtype=np.int64)].astype(np.int64)
        return {"input_ids": ids_BT, "labels": ids_BT.copy()}


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
