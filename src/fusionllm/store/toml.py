"""TOML files that people write: a run, a cluster, a scenario. Read as hostile, told apart, their keys checked.

Knows no key of them beyond the tables they are told apart by: each room owns the structs of its own file. On the path:
file -> **plain tree** -> struct.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from fusionllm.errors import UserError, known_names, near_hint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T", bound=msgspec.Struct)

MAX_FILE_BYTES = 4 << 20


class FileKind(NamedTuple):
    """``tables``: those that no other kind has. ``has``: what to say it is made of. ``described``: where."""

    tables: frozenset[str]
    has: str
    described: str


#: What the command line reads, by name.
FILES = {
    "run file": FileKind(frozenset({"model", "data", "train"}), "[model], [data] and [train]", "README.md"),
    "cluster file": FileKind(frozenset({"node"}), "[[fence]] and [[node]]", "docs/planning.md"),
    "scenario": FileKind(frozenset({"host"}), "[[fence]] and [[host]]", "docs/testbed.md"),
}


def read_text(path: Path) -> str:
    """A file's text. Raises UserError: it is not there, no text, or of no sensible size."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, the limit of a file of settings")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = near_hint(path.name, [other.name for other in path.parent.glob("*.toml")])
        raise UserError(f"no such file: {path}{near}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def parse_toml(text: str, path: Path, kind: str) -> dict[str, Any]:
    """The plain tree of a file's text. Raises UserError: no TOML, or a file of another of ``FILES``."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    wanted = FILES[kind]
    if not wanted.tables & raw.keys():
        for name, other in FILES.items():
            if other.tables & raw.keys():
                raise UserError(f"{path} is a {name}, not a {kind}; a {kind} has {wanted.has}, see {wanted.described}")
    return raw


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The plain tree of a file. Raises UserError as `read_text` and `parse_toml` do."""
    return parse_toml(read_text(path), path, kind)


def parse_value(text: str) -> Any:
    """A value as TOML writes it; a text that is none stands for itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def convert_tree(raw: Any, struct: type[T]) -> T:
    """The struct of a plain tree. Raises UserError that names the key, the value, and what would be right."""
    _check_keys(raw, struct)
    try:
        return msgspec.convert(raw, struct, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(_sentence(str(error), raw, struct)) from None


def _sentence(message: str, raw: Any, struct: type[msgspec.Struct]) -> str:
    match = re.search(r"(.*) - at `\$\.?(.*)`", message)
    if match is None:
        lacks = re.fullmatch(r"Object missing required field `(.*)`", message)
        return f"the file has no {lacks[1]}, which it needs" if lacks else message
    what, path = f"{match[1][0].lower()}{match[1][1:]}", match[2]
    value: Any = raw
    kind: Any = struct
    for name in re.findall(r"[^.\[\]]+", path):
        try:
            value, kind = (value[int(name)] if isinstance(value, (list, tuple)) else value[name]), _kind_of(kind, name)
        except (KeyError, IndexError, TypeError, ValueError):
            return f"{path}: {match[1]}"
    if get_origin(kind) is Literal:
        what = known_names(str(value), get_args(kind))
    elif kind is str and isinstance(value, (int, float)):
        what += ", so write it in quotes, with its unit if it has one"
    elif kind in (int, float) and isinstance(value, str):
        what += ", so write a number without quotes or unit"
    return f"{path} = {value!r:.80}: {what}"


def _kind_of(kind: Any, name: str) -> Any:
    """The type of a struct's field or of a tuple's entries; None for others."""
    inner = next((t for t in (kind, *get_args(kind)) if _is_struct(t)), None)
    if get_origin(kind) is tuple:
        return get_args(kind)[0]
    return None if inner is None else get_type_hints(inner).get(name)


def _check_keys(raw: Any, struct: type[msgspec.Struct], where: str = "") -> None:
    """Refuse a key that a struct, or one within it, does not have. Raises UserError with the nearest.

    Args:
        where: what stands before the key in the file, such as ``"node[2]."``.
    """
    if not isinstance(raw, Mapping):
        raise UserError(f"{where.rstrip('.') or 'the file'} must be a table, it is {raw!r:.80}")
    fields = {f.encode_name: f.type for f in msgspec.structs.fields(struct)}
    for key, value in raw.items():
        if key not in fields:
            raise UserError(f"unknown key {where}{key[:80]} = {value!r:.80}; {known_names(key, fields, where)}")
        kind = fields[key]
        inner = next((t for t in (kind, *get_args(kind)) if _is_struct(t)), None)
        if inner is None:
            continue
        if get_origin(kind) is not tuple:
            _check_keys(value, inner, f"{where}{key}.")
        elif not isinstance(value, (list, tuple)):
            raise UserError(f"{where}{key} must be written as [[{where}{key}]], once per entry")
        else:
            for index, entry in enumerate(value):
                _check_keys(entry, inner, f"{where}{key}[{index}].")


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
