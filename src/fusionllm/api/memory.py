"""What each node's stage should need of memory, to stand beside what it has needed."""

from __future__ import annotations

from fusionllm.api.config import RunConfig
from fusionllm.estimate.memory import memory_of
from fusionllm.estimate.work import graph_work
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.plan import Plan
from fusionllm.schedule.pipeline import build_programs
from fusionllm.schedule.placement import most_held


def estimated_bytes(graph: OpGraph, plan: Plan, config: RunConfig) -> dict[str, int]:
    """Node -> bytes of weights, gradients, optimizer state and what microbatches in flight keep for their backward.

    Left out: the framework itself, values alive within an operator, buffers of messages. With ``train.recompute`` one
    microbatch's values are alive at a time; with ``optimizer.offload`` the state is not on the device.
    """
    works = graph_work(graph, graph.sizes(config.train.microbatch_size, config.data.seq_len))
    held = most_held(build_programs(plan.pipeline, plan.num_stages, plan.num_microbatches))
    out: dict[str, int] = {}
    for stage, most in zip(plan.stages, held, strict=True):
        memory = memory_of(works[stage.first_op : stage.end_op], config.optimizer.name)
        total = memory.total_bytes(1 if config.train.recompute else most)
        if config.optimizer.offload:
            total -= memory.optimizer_bytes
        out[stage.node] = out.get(stage.node, 0) + int(total)
    return out
