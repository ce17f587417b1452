"""Tensors put down on the disk while they are on their way to a file: memory that the system may take back.

A file of its own for each, mapped and unlinked at once where the system allows it. On the path: Blob -> **scratch** ->
a checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np

from fusionllm.store.tensorfile import Blob


class Scratch:
    """A folder for tensors, from its making to ``close``."""

    def __init__(self, parent: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=".scratch-", dir=parent))
        self._count = 0

    def put(self, blob: Blob) -> Blob:
        """The same tensor with its bytes on the disk."""
        view = memoryview(blob.data)
        if not view.nbytes:
            return blob
        path = self._folder / str(self._count)
        self._count += 1
        with path.open("xb") as file:
            file.write(view)
        return Blob(blob.dtype, blob.shape, np.memmap(path, np.uint8, "r"))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
