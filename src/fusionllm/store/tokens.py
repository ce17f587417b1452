"""Text to token ids and back: raw bytes, or any tokenizer of the ``tokenizers`` library.

Special tokens that a template would add around a text are left out: documents are packed one after the other,
with the end-of-text token between them when the tokenizer has one. Knows no rows and no batches. On the path:
documents -> **one flat array of ids** -> rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from fusionllm.errors import UserError
from fusionllm.store.hub import asking_hub, check_hub_id

#: Names under which the best-known tokenizers keep their end-of-text token, tried in order.
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")

#: Tokenizers that need no file.
BUILT_IN = ("bytes", "bytes+eos")

#: A long document is tokenized in pieces of about this many characters, cut after a line end, so that the
#: memory of a tokenizer's result (some 100 bytes a token) stays small beside the text.
PIECE_CHARS = 1 << 20


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        name: as written in the config.
        vocab_size: ids are in [0, vocab_size).
        eos_id: the end-of-text id put between documents, or None.
        fingerprint: a hash of everything that decides the ids.
    """

    name: str
    vocab_size: int
    eos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and id 256 for end of text when ``with_eos``."""

    def __init__(self, *, with_eos: bool) -> None:
        self.name = "bytes+eos" if with_eos else "bytes"
        self.vocab_size = 257 if with_eos else 256
        self.eos_id: int | None = 256 if with_eos else None
        self.fingerprint = self.name

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


def byte_tokenizer_json(*, with_eos: bool) -> bytes:
    """`ByteTokenizer` as a file of the ``tokenizers`` library: its byte-level alphabet, id by byte, and no merges."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the alphabet of GPT-2: printable bytes stand as is
    others = (byte for byte in range(256) if byte not in shown)
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + k) for k, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    eos = {
        "id": 256, "content": EOS_NAMES[0], "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    whole = {
        "version": "1.0", "added_tokens": [eos] if with_eos else [], "normalizer": None, "pre_tokenizer": level,
        "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    return msgspec.json.encode(whole)


def tokenizer_json(name: str, base_dir: Path) -> bytes | None:
    """The tokenizers JSON of a tokenizer that `open_tokenizer` knows; None for one that lies on a hub."""
    if name in BUILT_IN:
        return byte_tokenizer_json(with_eos=name != "bytes")
    path = base_dir / Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    return file.read_bytes() if file.is_file() else None


class JsonTokenizer:
    """A tokenizer of the ``tokenizers`` library; its own truncation and padding are switched off."""

    def __init__(self, name: str, inner: Any, eos_name: str | None) -> None:
        inner.no_truncation()
        inner.no_padding()
        self.name = name
        self._inner = inner
        self.vocab_size = int(inner.get_vocab_size(with_added_tokens=True))
        self.eos_id: int | None = next(
            (inner.token_to_id(e) for e in (eos_name, *EOS_NAMES) if e and inner.token_to_id(e) is not None),
            None,
        )
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"{inner.to_str()}/{self.eos_id}".encode())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        return str(self._inner.decode(known, skip_special_tokens=True))


def open_tokenizer(name: str, base_dir: Path) -> Tokenizer:
    """Open a tokenizer.

    Args:
        name: ``bytes`` (256 ids), ``bytes+eos`` (257), a tokenizers JSON file, a folder with
            ``tokenizer.json``, or a hub id; paths are relative to ``base_dir``.
        base_dir: folder of the config file.

    Raises:
        UserError: nothing of that name, or not a tokenizer.
    """
    if name in BUILT_IN:
        return ByteTokenizer(with_eos=name != "bytes")
    check_tokenizer(name, base_dir)
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            f"data.tokenizer {name!r} needs the 'tokenizers' package; install it with: pip install "
            f"'fusionllm[train]', or set data.tokenizer to 'bytes'"
        ) from None
    path = base_dir / Path(name).expanduser()
    if path.exists():
        return _open_local(name, path, tokenizers)
    try:
        with asking_hub():
            return JsonTokenizer(name, tokenizers.Tokenizer.from_pretrained(name), None)
    except Exception as error:  # the library raises a bare Exception for every failure
        reason = str(error).strip().split("\n")[0][:300]
        raise UserError(
            f"data.tokenizer {name!r}: neither a local file or folder in {base_dir} nor a tokenizer the hub "
            f"could give ({reason}); check the name and the network, or set data.tokenizer to 'bytes'"
        ) from error


def check_tokenizer(name: str, base_dir: Path) -> None:
    """Whether there may be a tokenizer of that name, by a look at the disk alone. Raises UserError."""
    if name in BUILT_IN or (name and (base_dir / Path(name).expanduser()).exists()):
        return
    if not name or name.endswith(".json") or name.count("/") > 1 or name.startswith((".", "~")):
        raise UserError(
            f"data.tokenizer {name!r}: no such file or folder in {base_dir}; give a tokenizers JSON file, a "
            f"folder with tokenizer.json, a hub id, or 'bytes'"
        )
    check_hub_id("data.tokenizer", name, BUILT_IN)


def _open_local(name: str, path: Path, tokenizers: Any) -> JsonTokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"data.tokenizer {name!r}: the folder has no tokenizer.json; save the tokenizer in the fast "
            f"format, or name the JSON file"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for every failure
        reason = str(error).strip().split("\n")[0][:200]
        raise UserError(f"data.tokenizer {name!r}: {file} is not a tokenizers JSON file: {reason}") from error
    return JsonTokenizer(name, inner, _configured_eos(file.parent / "tokenizer_config.json"))


def _configured_eos(config: Path) -> str | None:
    """The ``eos_token`` of a tokenizer_config.json: a text, or an object with its ``content``."""
    try:
        value = msgspec.json.decode(config.read_bytes()).get("eos_token")
    except (OSError, msgspec.DecodeError, AttributeError, RecursionError):
        return None
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def tokenize(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """All documents as one flat array of ids, an end-of-text id between two documents.

    Returns:
        (ids, starts): uint16 [num_tokens] when the vocabulary fits, uint32 otherwise; int64 [num_documents], where
        each document begins. Empty documents are left out.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    parts: list[np.ndarray] = []
    starts: list[int] = []
    num_ids = num_parts = 0
    for text in texts:
        if not text:
            continue
        if parts and tokenizer.eos_id is not None:
            parts.append(np.array([tokenizer.eos_id], dtype=dtype))
        num_ids += sum(map(len, parts[num_parts:]))
        num_parts = len(parts)
        starts.append(num_ids)
        for piece in _pieces(text):
            if isinstance(tokenizer, ByteTokenizer):
                parts.append(np.frombuffer(piece.encode(), dtype=np.uint8).astype(dtype))
            else:
                parts.append(np.asarray(tokenizer.encode(piece), dtype=dtype))
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
    return ids, np.array(starts, dtype=np.int64)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]
