"""An operator of a person's own library, through a whole run."""

from __future__ import annotations

import numpy as np
import pytest
from tests.capture.test_library_ops import NAME, Model

import fusionllm
from fusionllm.errors import CaptureError, UserError
from fusionllm.node.agent import NodeAgent
from fusionllm.node.operators import import_operators
from fusionllm.node.options import NodeConfig
from fusionllm.protocol.messages import Ticket

ROWS = [{"x": row} for row in np.random.default_rng(0).normal(size=(32, 4)).astype("float32")]
OPTIONS = {"steps": 3, "nodes": 2, "global_batch": 8, "microbatch_size": 4, "threads": 1, "plot": False}


def train(tmp_path, **options):
    run = {"root": str(tmp_path)}
    return fusionllm.train(Model(), ROWS, run=run, partition="equal-number", lr=1e-2, **OPTIONS, **options)


def test_it_trains_where_it_is_allowed(tmp_path):
    result = train(tmp_path, allow_ops=[NAME], imports=["tests.capture.test_library_ops"])
    assert len(result.losses) == 3 and np.isfinite(result.losses).all()


def test_it_is_refused_where_it_is_not(tmp_path):
    with pytest.raises(CaptureError, match="swish"):
        train(tmp_path)
    ticket = Ticket("127.0.0.1", 1, "0" * 64, "token123")
    with pytest.raises(UserError, match="cannot be allowed"):
        NodeAgent(NodeConfig(ticket=ticket, allow_ops=("aten.add_.Tensor",)))
    with pytest.raises(UserError, match="cannot import 'no_such_module'"):
        import_operators(["no_such_module"])
