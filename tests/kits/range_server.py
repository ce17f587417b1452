"""A file server that answers ranges as a model hub does, and breaks as one does when it is told to."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class RangeServer(ThreadingHTTPServer):
    """Serves ``folder``.

    Attributes:
        break_after: bytes of a body after which the connection is dropped, None: never.
        fail_next: that many requests are answered 503 first.
        num_bytes: bytes of bodies sent. requests: (path, first byte, last byte) of each.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.break_after: int | None = None
        self.fail_next = 0
        self.ignore_ranges = False
        self.num_bytes = 0
        self.requests: list[tuple[str, int, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/org/model/resolve/main"


class _Handler(BaseHTTPRequestHandler):
    server: RangeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        path = server.folder / Path(self.path).name
        if server.fail_next:
            server.fail_next -= 1
            self.send_error(503)
            return
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        first, _, last = self.headers.get("Range", f"bytes=0-{len(data) - 1}").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last), len(data) - 1)
        body = data if server.ignore_ranges else data[start : end + 1]
        self.send_response(200 if server.ignore_ranges else 206)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", hashlib.sha256(data).hexdigest())
        if not server.ignore_ranges:
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        self.end_headers()
        server.requests.append((path.name, start, end))
        if server.break_after is not None and len(body) > server.break_after:
            body = body[: server.break_after]
            self.close_connection = True
        server.num_bytes += len(body)
        with contextlib.suppress(OSError):
            self.wfile.write(body)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[RangeServer]:
    server = RangeServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
