"""Ctrl-C, SIGTERM and a hang-up while a run goes on: at once before and after the training, else in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """While graceful, a first signal only sets ``wanted``; a second one, or any signal outside, stops at once.

    The handler does nothing else: it may run in the middle of a print.
    """

    def __init__(self) -> None:
        self.wanted = self._graceful = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals in here; only the main thread can, elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        before: Mapping[int, Any] = {s: signal.signal(s, self._handle) for s in numbers}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    @contextmanager
    def graceful(self) -> Iterator[None]:
        self._graceful = True
        try:
            yield
        finally:
            self._graceful = False

    def _handle(self, signum: int, frame: Any) -> None:
        if self.wanted or not self._graceful:
            raise KeyboardInterrupt
        self.wanted = True
