"""Bytes of a file by range: on a disk, or on an HTTP server such as a model hub. Nothing is read whole.

A read over HTTP that breaks goes on at the byte where it stopped, and only with the very file it began with (``ETag``
and size). Blocking; knows no format. On the path: **file** -> `tensorfile`.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol

from fusionllm.errors import CheckpointError

#: Attempts in a row that bring nothing new, and the pause after each, doubled every time.
MAX_TRIES = 5
FIRST_PAUSE_S = 0.2
TIMEOUT_S = 30.0
_PART_NUM_BYTES = 1 << 20


class NoSuchFile(CheckpointError):
    """There is no file of that name."""


class ByteSource(Protocol):
    """A file by ranges.

    Attributes:
        name: for messages.
    """

    name: str

    @property
    def num_bytes(self) -> int: ...

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill ``view`` from byte ``start`` on. Raises CheckpointError when it cannot."""


class FileBytes:
    """A file on a disk, opened anew for every read, so that nothing stays open."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)

    @property
    def num_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            raise NoSuchFile(f"there is no {self.name}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {self.name}: {error.strerror or error}") from error

    def read_into(self, start: int, view: memoryview) -> None:
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(start)
                while view.nbytes:
                    num_read = file.readinto(view)
                    if not num_read:
                        raise CheckpointError(f"{self.name}: cut short at byte {os.fstat(file.fileno()).st_size}")
                    view = view[num_read:]
        except OSError as error:
            raise CheckpointError(f"cannot read {self.name}: {error.strerror or error}") from error


class HttpBytes:
    """A file on a server that answers ranges (RFC 9110, section 14).

    Attributes:
        num_resumed: reads that broke and went on where they stopped.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise CheckpointError(f"{url[:200]!r} is not an http or https address")
        self.name = url
        self.num_resumed = 0
        self._size: int | None = None
        self._tag: str | None = None

    @property
    def num_bytes(self) -> int:
        if self._size is None:
            self.read_into(0, memoryview(bytearray(1)))
        assert self._size is not None
        return self._size

    def read_into(self, start: int, view: memoryview) -> None:
        done = tries = 0
        while done < view.nbytes:
            before = done
            try:
                done += self._read_some(start + done, view[done:])
                reason = "the connection ended early"
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 404:
                    raise NoSuchFile(f"{self.name}: the server answers 404 {error.reason}") from None
                if error.code < 500 and error.code != 429:
                    raise CheckpointError(f"{self.name}: the server answers {error.code} {error.reason}") from None
                reason = f"{error.code} {error.reason}"
            except _Broken as error:
                done, reason = done + error.num_bytes, error.reason
            except (OSError, http.client.HTTPException) as error:  # urllib's URLError is an OSError
                reason = str(error)
            if done == view.nbytes:
                return
            tries = 1 if done > before else tries + 1
            if tries >= MAX_TRIES:
                raise CheckpointError(f"{self.name}: stuck at byte {start + done} after {tries} tries: {reason}")
            self.num_resumed += 1
            time.sleep(FIRST_PAUSE_S * 2 ** (tries - 1))

    def _read_some(self, start: int, view: memoryview) -> int:
        """Bytes read in one request, all of ``view`` unless it breaks."""
        headers = {"Range": f"bytes={start}-{start + view.nbytes - 1}", "Accept-Encoding": "identity"}
        request = urllib.request.Request(self.name, headers=headers)  # checked above
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            self._check(answer, start)
            done = 0
            try:
                while done < view.nbytes:
                    num_read = answer.readinto(view[done : done + _PART_NUM_BYTES])
                    if not num_read:
                        break
                    done += num_read
            except (OSError, http.client.HTTPException) as error:
                raise _Broken(done, str(error)) from None
            return done

    def _check(self, answer: Any, start: int) -> None:
        """Refuse an answer that is not the range asked for of the file begun with."""
        unit, _, rest = (answer.headers.get("Content-Range") or "").partition(" ")
        span, _, total = rest.partition("/")
        if answer.status != 206 or unit != "bytes" or not span.startswith(f"{start}-") or not total.isdecimal():
            raise CheckpointError(f"{self.name}: the server does not send ranges (status {answer.status})")
        tag = answer.headers.get("ETag")
        if self._size is not None and (self._size, self._tag) != (int(total), tag):
            raise CheckpointError(f"{self.name}: the file changed on the server while it was read")
        self._size, self._tag = int(total), tag


class _Broken(Exception):
    """A body ended by an error after some bytes."""

    def __init__(self, num_bytes: int, reason: str) -> None:
        self.num_bytes, self.reason = num_bytes, reason
