"""From a graph and the nodes at hand to stages on nodes. Pure; on the path between `schedule` and the wire."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fusionllm.errors import PlanError
from fusionllm.estimate.flops import anchored_flops, graph_costs
from fusionllm.ir.codec import IDENTITY
from fusionllm.ir.cuts import anchored_ops, split_graph
from fusionllm.ir.graph import OpGraph, encode_graph
from fusionllm.ir.plan import Plan, StagePlan, tied_params
from fusionllm.protocol.membership import Member
from fusionllm.protocol.messages import Assign, Compression, JobOptions, LinkCodecs, LinkShape, Peer, Planned
from fusionllm.schedule.partition import partition_graph


class PlannedJob(msgspec.Struct, frozen=True):
    """A plan ready to be sent: the owner's share and one assignment per node."""

    owner: Planned
    assignments: dict[str, Assign]


def plan_job(job: str, graph: OpGraph, options: JobOptions, nodes: Sequence[Member], owner: Member) -> PlannedJob:
    """Cut the graph into one stage per node, in the order given. Raises PlanError."""
    symbols = dict.fromkeys(graph.symbols, options.microbatch_size)
    costs = anchored_flops(graph, symbols)
    boundaries = partition_graph(graph, len(nodes), options.partition, symbols, costs=costs)
    stages = split_graph(graph, boundaries)
    tied = tied_params([stage.params for stage in stages])
    producer = {value: i for i, stage in enumerate(stages) for value in stage.send}
    names = tuple(node.name for node in nodes)
    edges = [0, *boundaries, len(anchored_ops(graph))]
    stage_plans = tuple(
        _stage_plan(i, node, stage, symbols, edges[i : i + 2]) for i, (node, stage) in enumerate(zip(nodes, stages))
    )
    plan = Plan(
        stages=stage_plans,
        pipeline=options.pipeline,
        num_microbatches=options.num_microbatches,
        tied=tied,
    )
    assignments = {
        node.name: Assign(
            job=job,
            stage_index=i,
            stage_nodes=names,
            owner=owner.name,
            graph=encode_graph(stage),
            producers={v.id: producer[v.id] for v in stage.recv},
            consumers={
                v: tuple(k for k, other in enumerate(stages) if any(r.id == v for r in other.recv)) for v in stage.send
            },
            tied={name: holders for name, holders in tied.items() if i in holders},
            peers={m.name: _peer(m, node, options, owner) for m in (*nodes, owner) if m.name != node.name},
            options=options,
            codecs=_link_codecs(i, nodes, options.compression),
        )
        for i, (node, stage) in enumerate(zip(nodes, stages))
    }
    planned = Planned(
        job=job,
        plan=plan,
        inputs=tuple(tuple(v.id for v in s.inputs) for s in stages),
        tensors=tuple(tuple(s.held) for s in stages),
        peers={m.name: _peer(m, owner, options, owner) for m in nodes},
    )
    return PlannedJob(planned, assignments)


def _link_codecs(stage_index: int, nodes: Sequence[Member], compression: Compression) -> dict[int, LinkCodecs]:
    """The codecs of a stage's links with the others, where the job wants any."""
    codecs = LinkCodecs(compression.forward, compression.backward)
    if codecs == LinkCodecs(str(IDENTITY), str(IDENTITY)):
        return {}
    fence = nodes[stage_index].fence
    return {
        other: codecs
        for other, node in enumerate(nodes)
        if other != stage_index and (compression.links == "all" or node.fence != fence)
    }


def _stage_plan(index: int, node: Member, stage: OpGraph, symbols: dict[str, int], edges: list[int]) -> StagePlan:
    return StagePlan(
        stage_index=index,
        node=node.name,
        first_op=edges[0],
        end_op=edges[1],
        num_ops=len(stage.ops),
        flops=sum(cost.flops for cost in graph_costs(stage, symbols)),
        param_bytes=sum(p.spec.num_bytes({}) for p in stage.params.values()),
    )


def _peer(member: Member, seen_from: Member, options: JobOptions, owner: Member) -> Peer:
    """Where ``member`` listens and how the way there from ``seen_from`` is paced."""
    fences = {m.name: options.owner_fence if m.name == owner.name else m.fence for m in (member, seen_from)}
    pair = {fences[member.name], fences[seen_from.name]}
    shape: LinkShape | None = next(
        (link.shape for link in options.fence_links if {link.fence_a, link.fence_b} == pair and len(pair) == 2), None
    )
    return Peer(member.host, member.port, shape)


def check_options(options: JobOptions) -> None:
    """Bounds of what an owner may ask. Raises PlanError."""
    for name, value, limit in (
        ("num_stages", options.num_stages, 1024),
        ("num_microbatches", options.num_microbatches, 65536),
        ("microbatch_size", options.microbatch_size, 1 << 20),
    ):
        if not 1 <= value <= limit:
            raise PlanError(f"{name} is {value}; it must lie between 1 and {limit}")
