"""The thread of a stage."""

from __future__ import annotations

import dis
import threading

from fusionllm.node.worker import StageWorker

#: Names of `threading.Thread` that not every Python we run on has: 3.13 (`_handle` ends a thread there) and 3.14.
NEWER = {"_handle", "_after_fork", "_os_thread_handle", "_context"}


def test_it_has_no_name_that_a_thread_has_in_some_python():
    own = {name for name, value in vars(StageWorker).items() if callable(value)} - {"__init__", "run"}
    own |= {line.argval for line in dis.get_instructions(StageWorker.__init__) if line.opname == "STORE_ATTR"}
    assert "_next_event" in own and "events" in own
    assert not own & {*dir(threading.Thread()), *NEWER}
