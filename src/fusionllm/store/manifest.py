"""The manifest of a checkpoint: what it belongs to, its files and their hashes, and where each tensor is.

Knows no folder layout beyond its own file names and reads no tensor. On the path, aside: ``manifest.json``
<-> **Manifest**.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fusionllm.errors import CheckpointError

FORMAT = "fusionllm-checkpoint"
VERSION = 1
WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
CODECS_FILE = "codecs.safetensors"
MANIFEST_FILE = "manifest.json"

_MAX_MANIFEST_NUM_BYTES = 1 << 28


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint belongs to and where it stands.

    Attributes:
        graph_hash: content hash of the model's graph.
        seed: the run's seed.
        data_step: number of the step whose batch comes next, as given to ``Dataset.microbatches``.
        data_fingerprint: ``Dataset.fingerprint``.
        aliases: name of a tied parameter -> name it is stored under.
        dense_from: step from which links travel dense, since the validation loss left its band; None: it did not.
        extra: JSON values of the caller's: optimizer step count, metrics, versions.
    """

    graph_hash: str
    seed: int
    data_step: int
    data_fingerprint: str = ""
    aliases: dict[str, str] = {}
    dense_from: int | None = None
    extra: dict[str, Any] = {}


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and hash of one file of a checkpoint."""

    num_bytes: int
    xxh3_128: str


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one tensor is and what it is."""

    dtype: str
    shape: tuple[int, ...]
    file: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The contents of ``manifest.json``.

    Attributes:
        format: always ``fusionllm-checkpoint``.
        version: of the format; this code reads and writes 1.
        step: steps completed.
        meta: what it belongs to.
        files: file name -> size and hash.
        weights: parameter or buffer name -> tensor.
        optimizer: ``<state>/<parameter>`` -> tensor.
        codecs: ``<stage>/<state of a link's codec>`` -> tensor; none, and no file of them, where nothing is carried.
    """

    format: str
    version: int
    step: int
    meta: CheckpointMeta
    files: dict[str, FileEntry]
    weights: dict[str, TensorEntry]
    optimizer: dict[str, TensorEntry]
    codecs: dict[str, TensorEntry] = {}


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, indented."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def read_manifest(path: Path, way_out: str) -> Manifest:
    """Read the manifest in a checkpoint's folder; nothing in it is trusted.

    Args:
        path: the checkpoint's folder.
        way_out: what to add to the message when it is torn.

    Raises:
        CheckpointError: missing, torn, of another format or version, or naming files it may not.
    """
    file = path / MANIFEST_FILE
    try:
        if file.stat().st_size > _MAX_MANIFEST_NUM_BYTES:
            raise CheckpointError(f"{file} is larger than {_MAX_MANIFEST_NUM_BYTES} bytes: not a checkpoint's manifest")
        raw = msgspec.json.decode(file.read_bytes())
        version = (raw.get("format"), raw.get("version")) if isinstance(raw, dict) else None
        if version != (FORMAT, VERSION):
            raise CheckpointError(f"{file} is of format {version}; this release reads {(FORMAT, VERSION)}")
        manifest = msgspec.convert(raw, Manifest)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is torn or not a checkpoint's manifest: {error}{way_out}") from None
    known = {WEIGHTS_FILE, OPTIMIZER_FILE, CODECS_FILE}
    if not set(manifest.files) <= known:
        raise CheckpointError(f"{file} lists files of other names than {', '.join(sorted(known))}")
    return manifest
