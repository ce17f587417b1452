"""From a graph and the nodes at hand to stages on nodes. Pure; on the path between `schedule` and the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations

import msgspec

from fusionllm.errors import PlanError
from fusionllm.estimate.device import DeviceRates
from fusionllm.estimate.flops import anchored_flops, graph_costs
from fusionllm.estimate.memory import OPTIMIZER_COPIES
from fusionllm.ir.codec import IDENTITY
from fusionllm.ir.cuts import anchored_ops, split_graph
from fusionllm.ir.graph import OpGraph, encode_graph
from fusionllm.ir.plan import Plan, StagePlan, tied_params
from fusionllm.ir.tensor import TensorSpec
from fusionllm.protocol.membership import Member
from fusionllm.protocol.messages import Assign, Compression, JobOptions, LinkCodecs, LinkShape, Peer, Planned
from fusionllm.schedule.coding import LinkRule, backward_codec, coded_step_s, plan_coded
from fusionllm.schedule.partition import partition_graph
from fusionllm.schedule.pipeline import pipeline_name
from fusionllm.schedule.placement import BASELINES, Cluster, Workload, build_models, link_rates
from fusionllm.schedule.ratios import LinkLoad, check_rule
from fusionllm.schedule.workload import StepOptions, build_workload

#: Ways to plan that look at devices and links: the paper's, and ours.
SURVEYED = ("op-fence", "dp")


class Surveyed(msgspec.Struct, frozen=True):
    """What was measured of the nodes at hand: the cluster in their order, and rates by the name of a node."""

    cluster: Cluster
    rates: dict[str, DeviceRates]


class PlannedJob(msgspec.Struct, frozen=True):
    """A plan ready to be sent: the owner's share and one assignment per node that it uses."""

    owner: Planned
    assignments: dict[str, Assign]


class _Layout(msgspec.Struct, frozen=True):
    """Nodes in path order and where to cut; ``rates`` [stage][stage], and what the replay says."""

    nodes: tuple[Member, ...]
    boundaries: tuple[int, ...]
    pipeline: str
    rates: tuple[tuple[float, ...], ...] = ()
    deadline_s: float = 0.0
    step_s: float = 0.0
    others: dict[str, float] = {}


def needs_survey(options: JobOptions) -> bool:
    """Whether the job is planned by measurements."""
    return options.partition in SURVEYED or bool(options.compression.rule)


def plan_job(
    job: str, graph: OpGraph, options: JobOptions, nodes: Sequence[Member], owner: Member,
    surveyed: Surveyed | None = None,
) -> PlannedJob:  # fmt: skip
    """Cut the graph into stages on these nodes, in the order given or, with ``dp``, on the best of them.

    Raises PlanError.
    """
    symbols = dict.fromkeys(graph.symbols, options.microbatch_size)
    if surveyed is None:
        layout = _plain_layout(graph, options, nodes, symbols)
    else:
        layout = _surveyed_layout(graph, options, nodes, surveyed)
    nodes = layout.nodes
    stages = split_graph(graph, list(layout.boundaries))
    tied = tied_params([stage.params for stage in stages])
    producer = {value: i for i, stage in enumerate(stages) for value in stage.send}
    names = tuple(node.name for node in nodes)
    edges = [0, *layout.boundaries, len(anchored_ops(graph))]
    stage_plans = tuple(
        _stage_plan(i, node, stage, symbols, edges[i : i + 2]) for i, (node, stage) in enumerate(zip(nodes, stages))
    )
    plan = Plan(
        stages=stage_plans,
        pipeline=layout.pipeline,
        num_microbatches=options.num_microbatches,
        tied=tied,
    )
    options = msgspec.structs.replace(options, pipeline=layout.pipeline)
    codecs = _link_codecs(layout, stages, symbols, options.compression)
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
            codecs={k if i == j else j: link for (j, k), link in codecs.items() if i in (j, k)},
        )
        for i, (node, stage) in enumerate(zip(nodes, stages))
    }
    planned = Planned(
        job=job,
        plan=plan,
        inputs=tuple(tuple(v.id for v in s.inputs) for s in stages),
        tensors=tuple(tuple(s.held) for s in stages),
        peers={m.name: _peer(m, owner, options, owner) for m in nodes},
        codecs={f"{names[j]}->{names[k]}": link for (j, k), link in codecs.items()},
        predicted_step_s=layout.step_s,
        others=layout.others,
    )
    return PlannedJob(planned, assignments)


def _plain_layout(graph: OpGraph, options: JobOptions, nodes: Sequence[Member], symbols: Mapping[str, int]) -> _Layout:
    costs = anchored_flops(graph, symbols)
    boundaries = partition_graph(graph, len(nodes), options.partition, symbols, costs=costs)
    return _Layout(tuple(nodes), tuple(boundaries), options.pipeline)


def _surveyed_layout(graph: OpGraph, options: JobOptions, nodes: Sequence[Member], surveyed: Surveyed) -> _Layout:
    cluster, base = surveyed.cluster, options.pipeline.partition(":")[0]
    step = StepOptions(
        microbatch_size=options.microbatch_size, num_microbatches=options.num_microbatches, pipeline=base,
        precision="float32", optimizer=_optimizer(options.optim),
    )  # fmt: skip
    workload = build_workload(graph, step, surveyed.rates)
    rule = _rule(options.compression)
    ranked = plan_coded(workload, cluster, rule)
    if options.partition == "dp":
        placement, step_s = ranked[0].placement, ranked[0].step_s
    else:
        placement = BASELINES[options.partition](workload, cluster)
        step_s = coded_step_s(workload, cluster, placement, rule)
    stages, _ = build_models(workload, cluster, placement)
    rates = link_rates(cluster)
    return _Layout(
        nodes=tuple(nodes[i] for i in placement.nodes),
        boundaries=placement.boundaries,
        pipeline=pipeline_name(base, placement.depths),
        rates=tuple(tuple(float(rates[a, b]) for b in placement.nodes) for a in placement.nodes),
        deadline_s=max(stage.forward_s + stage.backward_s for stage in stages),
        step_s=step_s,
        others={"dp": ranked[0].step_s, **_baseline_steps(workload, cluster, rule)},
    )


def _baseline_steps(workload: Workload, cluster: Cluster, rule: LinkRule | None) -> dict[str, float]:
    """Seconds of a step of each baseline that fits."""
    steps = {}
    for method, place in BASELINES.items():
        with suppress(PlanError):
            steps[method] = coded_step_s(workload, cluster, place(workload, cluster), rule)
    return steps


class _OptimizerName(msgspec.Struct):
    name: str = "adamw"


def _optimizer(optim: bytes) -> str:
    """Its name, of one whose memory is known; any other is taken for the hungriest."""
    try:
        name = msgspec.json.decode(optim, type=_OptimizerName).name
    except msgspec.MsgspecError:
        raise PlanError("the optimizer's options are not JSON; this is a fault of the owner's program") from None
    return name if name in OPTIMIZER_COPIES else "adamw"


def _rule(compression: Compression) -> LinkRule | None:
    if not compression.rule:
        return None
    check_rule(compression.rule, compression.ratio, compression.floor)
    return LinkRule(
        name=compression.rule, ratio=compression.ratio, floor=compression.floor, slow_only=compression.links == "slow"
    )


def _link_codecs(
    layout: _Layout, stages: Sequence[OpGraph], symbols: Mapping[str, int], compression: Compression
) -> dict[tuple[int, int], LinkCodecs]:
    """The codecs of pairs of stages, the earlier one first, between which anything is to be compressed."""
    nodes = layout.nodes
    pairs = [
        (j, k)
        for j, k in combinations(range(len(stages)), 2)
        if (compression.links == "all" or nodes[j].fence != nodes[k].fence) and _crossing(stages[j], stages[k])
    ]
    rule = _rule(compression)
    if rule is None:
        codecs = [LinkCodecs(compression.forward, compression.backward)] * len(pairs)
    else:
        there, back = ([_load(layout, stages, symbols, j, k, w) for j, k in pairs] for w in (True, False))
        out, home = rule.choose(there, layout.deadline_s), rule.choose(back, layout.deadline_s)
        codecs = [LinkCodecs(str(a), str(backward_codec(b))) for a, b in zip(out, home)]
    dense = LinkCodecs(str(IDENTITY), str(IDENTITY))
    return {pair: link for pair, link in zip(pairs, codecs) if link != dense}


def _crossing(sender: OpGraph, receiver: OpGraph) -> list[TensorSpec]:
    """Floating-point values that one stage sends another."""
    return [v.spec for v in receiver.recv if v.id in sender.send and v.spec.is_float]


def _load(
    layout: _Layout, stages: Sequence[OpGraph], symbols: Mapping[str, int], j: int, k: int, forward: bool
) -> LinkLoad:
    """What crosses between two stages, as its largest value on a link that is slower by what else crosses."""
    specs = _crossing(stages[j], stages[k])
    sizes = [spec.num_bytes(symbols) for spec in specs]
    largest = specs[sizes.index(max(sizes))]
    rate = layout.rates[j][k] if forward else layout.rates[k][j]
    return LinkLoad(
        shape=largest.concrete(symbols), dtype=largest.dtype, bandwidth_bytes_per_s=rate * max(sizes) / sum(sizes)
    )


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
    return Peer(member.host, member.port, emulated_link(options, fences[member.name], fences[seen_from.name]))


def emulated_link(options: JobOptions, fence_a: str, fence_b: str) -> LinkShape | None:
    """What the job puts between two fences, None for the network as it is."""
    pair = {fence_a, fence_b}
    return next(
        (link.shape for link in options.fence_links if {link.fence_a, link.fence_b} == pair and len(pair) == 2), None
    )


def check_options(options: JobOptions) -> None:
    """Bounds of what an owner may ask. Raises PlanError."""
    for name, value, limit in (
        ("num_stages", options.num_stages, 1024),
        ("num_microbatches", options.num_microbatches, 65536),
        ("microbatch_size", options.microbatch_size, 1 << 20),
    ):
        if not 1 <= value <= limit:
            raise PlanError(f"{name} is {value}; it must lie between 1 and {limit}")
