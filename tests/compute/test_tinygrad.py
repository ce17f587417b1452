"""What is tinygrad's alone."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import psutil
import pytest

pytest.importorskip("tinygrad")


def test_it_leaves_no_process_that_would_outlive_a_killed_node():
    from fusionllm.compute.tinygrad.backend import run_alone

    before, new = set(psutil.Process().children(recursive=True)), random.random()  # never compiled before
    made = run_alone("cpu", lambda x: (x * new).softmax(-1), np.ones((64, 64), np.float32))
    assert made == pytest.approx(1 / 64)
    assert set(psutil.Process().children(recursive=True)) == before


def test_a_device_is_found_where_everything_else_runs():
    """In a process of its own: the cache of compiled code is of the thread that first asks for it."""
    words = "from fusionllm.compute.tinygrad.backend import TinygradBackend as B; print(B().warm_up('auto').device)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
