"""Logging of a process: one line an event, with time, level and the node's name.

    12:34:56.789 INFO    n3  node: stage 2 ready

Only the ``fusionllm`` loggers are touched: a program that calls us from Python keeps its own logging as it
is. Called again (another node name, another level), it replaces its own handler instead of adding a second
one.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from fusionllm.errors import UserError, known_names

LEVELS = ("debug", "info", "warning", "error")
_HANDLER_NAME = "fusionllm-console"
_ROOT = "fusionllm"


class _Formatter(logging.Formatter):
    """Adds the node's name, and drops the package's name from the logger's."""

    def __init__(self, node: str) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(node)s  %(short)s: %(message)s", "%H:%M:%S")
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        record.node = self._node
        record.short = record.name.removeprefix(_ROOT + ".")
        return super().format(record)


def configure_logging(node: str, level: str = "info", stream: TextIO | None = None) -> logging.Logger:
    """Send the package's log lines to a stream.

    Args:
        node: name of this process in every line: a node's name, ``owner`` or ``broker``.
        level: one of ``LEVELS``.
        stream: None for standard error.

    Returns:
        The package's logger.

    Raises:
        UserError: an unknown level.
    """
    if level.lower() not in LEVELS:
        raise UserError(f"unknown log level {level!r}; {known_names(level, LEVELS)}")
    logger = logging.getLogger(_ROOT)
    for handler in [h for h in logger.handlers if h.name == _HANDLER_NAME]:
        logger.removeHandler(handler)
        handler.close()
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.name = _HANDLER_NAME
    handler.setFormatter(_Formatter(node))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False  # else a handler on the root logger prints every line a second time
    for library in ("matplotlib", "tensorboardX"):
        logging.getLogger(library).setLevel(logging.ERROR)  # they report their font caches as warnings
    return logger
