"""Where training data comes from: text files, folders, JSON Lines, Hugging Face datasets, Python objects.

Turns the ``source`` of a config, or an object given in Python, into either documents (strings) or rows (dicts
of arrays). Knows no tokenizer, no batch and no tensor framework; runs on the owner only, so a ``python:``
source may import the owner's own module. On the path: file or object -> **documents or rows** -> tokens ->
batches.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fusionllm.errors import UserError, near_hint, near_names
from fusionllm.store.hub import asking_hub

#: What a folder is searched for, at any depth.
TEXT_SUFFIXES = (".txt", ".md", ".jsonl")

_FORMS = "a text file, a folder of .txt, .md or .jsonl files, hf:DATASET[:CONFIG], or python:module:function"


@dataclass(frozen=True)
class Documents:
    """Texts, each tokenized on its own and joined with an end-of-text token.

    Attributes:
        name: where they came from, for messages.
        texts: the documents, in a fixed order; may be read lazily, and more than once.
    """

    name: str
    texts: Sequence[str]


@dataclass(frozen=True)
class Rows:
    """Ready rows: a map-style sequence of dicts of arrays, one dict per sample, for any model.

    Attributes:
        name: where they came from, for messages.
        rows: ``len(rows)`` samples; ``rows[index]`` is a mapping of column name to array, number or list.
    """

    name: str
    rows: Any


def open_source(source: str, *, text_column: str, split: str, base_dir: Path) -> Documents | Rows:
    """Open what the ``source`` of a data config names.

    Args:
        source: a path (relative to ``base_dir``), ``hf:DATASET[:CONFIG]`` or ``python:module:function``.
        text_column: the column of a dataset, or the key of a JSON line, that holds the text.
        split: the split of a Hugging Face dataset, such as ``train`` or ``train[:1000]``.
        base_dir: folder of the config file, or the working folder of a Python call.

    Raises:
        UserError: not found, not readable, empty, or of an unknown form.
    """
    if source.startswith("hf:"):
        return wrap_object(_load_hub(source, split), source, text_column)
    if source.startswith("python:"):
        return wrap_object(_call_python(source, base_dir), source, text_column)
    if not source:
        raise UserError(f"data.source is empty; give {_FORMS}")
    path = Path(source).expanduser()
    return _read_path(path if path.is_absolute() else base_dir / path, source, text_column)


def wrap_object(obj: Any, name: str, text_column: str) -> Documents | Rows:
    """Recognise an object given in Python: a list of texts, a Hugging Face dataset, or map-style rows.

    Raises:
        UserError: not a sequence, empty, or without a usable column.
    """
    if isinstance(obj, (str, bytes)) or not (hasattr(obj, "__len__") and hasattr(obj, "__getitem__")):
        hint = "; turn an iterable dataset into a list first" if hasattr(obj, "__iter__") else ""
        raise UserError(
            f"{name}: a {type(obj).__name__} is no data; give a list of texts, a Hugging Face Dataset, or a "
            f"sequence of dicts of arrays{hint}"
        )
    if isinstance(obj, Mapping):
        known = ", ".join(map(repr, obj)) or "none"
        raise UserError(f"{name}: a mapping with the keys {known} is no data; choose one of its values")
    if len(obj) == 0:
        raise UserError(f"{name}: the data is empty; give at least one document or row")
    first = obj[0]
    if isinstance(first, str):
        return Documents(name, obj)
    if not isinstance(first, Mapping):
        raise UserError(f"{name}: row 0 is a {type(first).__name__}; a row is a text or a dict of column name to array")
    if isinstance(first.get(text_column), str):
        return Documents(name, _Column(obj, text_column, name))
    return _numeric_rows(obj, first, name, text_column)


def _numeric_rows(obj: Any, first: Mapping[str, Any], name: str, text_column: str) -> Rows:
    """Rows of arrays; a row with text in it but not in ``text_column`` is a wrong column name."""
    texts = [column for column, value in first.items() if isinstance(value, str)]
    if texts or not first:
        columns = ", ".join(map(repr, first)) or "none"
        close = near_hint(text_column, texts) or (f"; set data.text_column to {texts[0]!r}" if texts else "")
        raise UserError(f"{name}: no text in column {text_column!r}; its columns are {columns}{close}")
    return Rows(name, obj)


class _Column(Sequence[str]):
    """One text column of a map-style dataset, read row by row."""

    def __init__(self, rows: Any, column: str, name: str) -> None:
        self._rows, self._column, self._name = rows, column, name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._text(self._rows[index], index)

    def __iter__(self) -> Iterator[str]:
        for index, row in enumerate(self._rows):  # a Hugging Face dataset reads ahead here, but not by index
            yield self._text(row, index)

    def _text(self, row: Mapping[str, Any], index: int) -> str:
        value = row.get(self._column)
        if value is not None and not isinstance(value, str):
            raise UserError(
                f"{self._name}: row {index} has a {type(value).__name__} in column {self._column!r}, not a text"
            )
        return value or ""


def _read_path(path: Path, source: str, text_column: str) -> Documents:
    if not path.exists():
        raise UserError(f"data.source {source!r}: no such file or folder{_nearest_entry(path)}; give {_FORMS}")
    texts: list[str] = []
    files = _files_in(path, source) if path.is_dir() else [path]
    for file in files:
        texts.extend(_read_jsonl(file, text_column) if file.suffix == ".jsonl" else [_read_text(file)])
    if not any(texts):
        raise UserError(f"data.source {source!r}: the text is empty; give a file with some text in it")
    return Documents(source, texts)


def _files_in(folder: Path, source: str) -> list[Path]:
    """Every text file below a folder, hidden ones left out, in an order that no file system decides."""
    found = [
        file
        for file in folder.rglob("*")
        if file.suffix in TEXT_SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]
    if not found:
        raise UserError(
            f"data.source {source!r}: the folder holds no {', '.join(TEXT_SUFFIXES)} file; name a file in it"
        )
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _read_text(file: Path) -> str:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{file}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start} (line {line}); "
            f"convert it, for example with: iconv -f latin1 -t utf-8"
        ) from None


def _read_jsonl(file: Path, text_column: str) -> Iterator[str]:
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UserError(f"{file}:{number}: not a JSON object: {error}; a line is one object") from None
        if not isinstance(row, dict):
            raise UserError(f"{file}:{number}: a line must be a JSON object, not a {type(row).__name__}")
        if text_column not in row:
            close = near_hint(text_column, list(row)) or "; set data.text_column"
            keys = ", ".join(map(repr, row)) or "none"
            raise UserError(f"{file}:{number}: no key {text_column!r}; its keys are {keys}{close}")
        if not isinstance(row[text_column], str):
            kind = type(row[text_column]).__name__
            raise UserError(f"{file}:{number}: {text_column!r} must be a text, not a {kind}")
        yield row[text_column]


def _nearest_entry(path: Path) -> str:
    """What stands where a missing path was looked for: the closest names in its nearest existing folder."""
    missing, folder = path.name, path.parent
    while not folder.is_dir() and folder != folder.parent:
        missing, folder = folder.name, folder.parent
    try:
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        names = []
    close = near_names(missing, names, 3)
    where = f" ({missing!r} is not in {folder})"
    return f"{where}; did you mean {' or '.join(repr(str(folder / name)) for name in close)}?" if close else where


def _load_hub(source: str, split: str) -> Any:
    dataset, _, config = source[len("hf:") :].partition(":")
    if not dataset:
        raise UserError(f"data.source {source!r}: no dataset id; write hf:DATASET or hf:DATASET:CONFIG")
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data.source {source!r} needs the 'datasets' package; install it with: pip install 'fusionllm[datasets]'"
        ) from None
    try:
        with asking_hub():
            return datasets.load_dataset(dataset, config or None, split=split)
    except Exception as error:  # the library raises a dozen unrelated types for a bad id or a dead network
        reason = str(error).strip().split("\n")[0][:300]
        raise UserError(
            f"data.source {source!r} (split {split!r}): {type(error).__name__}: {reason}; check the id, the "
            f"config, the split and the network, or save the text to a local file"
        ) from error


def _call_python(source: str, base_dir: Path) -> Any:
    """Import the owner's module, looked for beside the config first, and call its function."""
    parts = source.split(":")
    if len(parts) != 3 or not all(parts):
        raise UserError(f"data.source {source!r}: write python:module:function, as in python:my_data:train_rows")
    _, module_name, function_name = parts
    sys.path.insert(0, str(base_dir.resolve()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"data.source {source!r}: cannot import {module_name!r}: {error}; it is looked for in {base_dir} "
            f"and among the installed packages"
        ) from error
    finally:
        sys.path.remove(str(base_dir.resolve()))
    function = getattr(module, function_name, None)
    if not callable(function):
        near = near_hint(function_name, [name for name in vars(module) if not name.startswith("_")])
        raise UserError(f"data.source {source!r}: {module_name!r} has no function {function_name!r}{near}")
    return function()
