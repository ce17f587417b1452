"""Many programs on many hosts of a testbed from one import: loads what they need once, then forks one for each.

``python -m benchmarks.wan_fork SPEC.json``; two dozen nodes so take the time and the memory of one. The first child has
this process's standard output. Ends with the first that fails, or when all have ended; its children end with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import msgspec

_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """A program: ``function`` of ``words``, in a namespace and in control groups; what it writes goes to ``log``."""

    namespace: str
    entrances: list[str]
    log: str
    function: str
    words: list[str]


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """``prepare``: a function of ``options`` that the common process calls first."""

    prepare: str
    options: dict[str, Any] = {}
    children: list[Child]


def find(name: str) -> Callable[..., Any]:
    """A function written ``module:name``."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found


def main(path: Path) -> int:
    spec = msgspec.json.decode(path.read_bytes(), type=Spec)
    find(spec.prepare)(spec.options)
    gc.collect()
    gc.freeze()  # what is loaded stays shared between the processes
    running = set()
    for index, child in enumerate(spec.children):
        pid = os.fork()
        if pid == 0:
            be(child, keeps_output=index == 0)
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if code := os.waitstatus_to_exitcode(status):
            return abs(code)
    return 0


def be(child: Child, *, keeps_output: bool) -> NoReturn:
    """Become the child, in its place; never returns."""
    code = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(child.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 2)
        if not keeps_output:
            os.dup2(log, 1)
        for entrance in child.entrances:
            Path(entrance).write_text(str(os.getpid()))
        namespace = os.open(child.namespace, os.O_RDONLY)
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {child.namespace}")
        find(child.function)(child.words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
