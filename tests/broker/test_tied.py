"""Which parameters stages exchange gradients of."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.compute.test_stage import LENGTH, VOCAB, TiedLM

from fusionllm.broker.planning import plan_job
from fusionllm.capture.export import capture_module
from fusionllm.compute import ComputeOptions, OptimConfig
from fusionllm.protocol.membership import Member
from fusionllm.protocol.messages import JobOptions


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tied_parameter_is_exchanged_unless_it_is_frozen(frozen):
    """Nobody has a gradient of a frozen one: stages would wait for it for ever."""
    model = TiedLM()
    model.wte.weight.requires_grad_(not frozen)
    ids = torch.zeros(3, LENGTH, dtype=torch.int64)
    graph = capture_module(model, {"ids": ids, "labels": ids % VOCAB}).graph
    nodes = [Member(f"node{i}", "node", "", "torch", 1, "127.0.0.1", 2 + i) for i in range(2)]
    job = JobOptions(
        num_stages=2, partition="equal-number", pipeline="gpipe", num_microbatches=1, microbatch_size=3, num_steps=1,
        optim=msgspec.json.encode(OptimConfig()), compute=msgspec.json.encode(ComputeOptions()),
    )  # fmt: skip
    planned = plan_job("job1", graph, job, nodes, Member("owner", "owner", "", "", 1, "127.0.0.1", 1))
    for assign in planned.assignments.values():
        assert assign.tied == ({} if frozen else {"wte.weight": (0, 1)})
        assert "wte.weight" in msgspec.json.decode(assign.graph)["params"]
