"""From a graph and the nodes at hand to stages on nodes. Pure; on the path between `schedule` and the wire."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf

import msgspec

from fusionllm.broker.links import Tuner, codecs_by_hand, ladder_of, link_choices, link_codecs
from fusionllm.errors import PlanError, known_names
from fusionllm.estimate.device import DeviceRates
from fusionllm.estimate.flops import anchored_flops, graph_costs
from fusionllm.estimate.memory import OPTIMIZER_COPIES
from fusionllm.ir.cluster import Precision
from fusionllm.ir.codec import CodecSpec, CodecSpeed, parse_codec
from fusionllm.ir.cuts import anchored_ops, split_graph
from fusionllm.ir.graph import OpGraph, encode_graph
from fusionllm.ir.plan import Plan, StagePlan, tied_params
from fusionllm.protocol.membership import Member
from fusionllm.protocol.messages import (
    MAX_MICROBATCHES,
    MAX_ROWS,
    MAX_STAGES,
    Assign,
    FenceLine,
    JobOptions,
    LinkChoice,
    LinkShape,
    Peer,
    Planned,
)
from fusionllm.schedule.coded import Coded, backward_codec, best_coded, ladder_factors, propose
from fusionllm.schedule.partition import SURVEYED, partition_graph
from fusionllm.schedule.pipeline import pipeline_name
from fusionllm.schedule.placement import BASELINES, Cluster, NodeModel, Placement, Share, find_fences
from fusionllm.schedule.planner import place_exhaustive
from fusionllm.schedule.workload import StepOptions, build_workload

#: Ways to plan that choose among all idle nodes.
CHOOSING = ("dp", "exhaustive")


class Surveyed(msgspec.Struct, frozen=True):
    """What was measured of the nodes at hand: the cluster in their order; by a node's name rates and codecs' speeds."""

    cluster: Cluster
    rates: dict[str, DeviceRates]
    speeds: dict[str, dict[str, CodecSpeed]] = {}

    def coding(self, spec: CodecSpec, node: NodeModel) -> CodecSpeed | None:
        """Seconds of a codec on a node, by its core; None where that was not measured."""
        return self.speeds.get(node.name, {}).get(str(spec.core))


class PlannedJob(msgspec.Struct, frozen=True):
    """A plan ready to be sent: the owner's share and one assignment per node that it uses.

    ``tuner``: chooses codecs again while the job runs, where its rule is to be.
    """

    owner: Planned
    assignments: dict[str, Assign]
    tuner: Tuner | None = None


#: Where a backend lacks the precision of a run.
_PRECISION_FIX = "set train.precision = 'float32', or let a torch or JAX node join"


class _Layout(msgspec.Struct, frozen=True):
    """Nodes in path order, where to cut, the codecs of neighbours' links, and what the replay says."""

    nodes: tuple[Member, ...]
    boundaries: tuple[int, ...]
    pipeline: str
    codecs: tuple[tuple[CodecSpec, CodecSpec], ...]
    step_s: float = 0.0
    others: dict[str, float] = {}
    found_fences: tuple[tuple[str, ...], ...] = ()
    tuner: Tuner | None = None


def needs_survey(options: JobOptions) -> bool:
    """Whether the job is planned by measurements."""
    return options.partition in SURVEYED or bool(options.compression.rule)


class _Compute(msgspec.Struct):
    precision: Precision = "float32"


def precision_of(options: JobOptions) -> Precision:
    """What the job's stages compute in. Raises PlanError."""
    try:
        return msgspec.json.decode(options.compute, type=_Compute).precision
    except msgspec.MsgspecError as error:
        raise PlanError(f"how stages compute is not what this broker knows: {error}") from None


def plan_job(
    job: str, graph: OpGraph, options: JobOptions, nodes: Sequence[Member], owner: Member,
    surveyed: Surveyed | None = None,
) -> PlannedJob:  # fmt: skip
    """Cut the graph into stages on these nodes, in the order given or, with ``dp``, on the best of them.

    Raises PlanError.
    """
    symbols = graph.sizes(options.microbatch_size, options.max_length)
    if surveyed is None:
        layout = _plain_layout(graph, options, nodes, symbols)
    else:
        layout = _surveyed_layout(graph, options, nodes, surveyed)
    unused, nodes = [node for node in nodes if node not in layout.nodes], layout.nodes
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
    codecs = link_codecs(layout.codecs)
    choices = link_choices(codecs, len(nodes), options.compression)
    for i, (node, stage) in enumerate(zip(nodes, stages)):
        _check_offer(i, node, stage, options, [choice for pair, choice in choices.items() if i in pair])
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
            codecs={k if i == j else j: choice for (j, k), choice in choices.items() if i in (j, k)},
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
        found_fences=layout.found_fences,
        backends={node.name: node.backend for node in nodes},
        left_out={node.name: _why_unused(node, graph, _dtype(options)) for node in unused},
    )
    return PlannedJob(planned, assignments, layout.tuner)


def _check_offer(
    stage_index: int, node: Member, stage: OpGraph, options: JobOptions, codecs: Sequence[LinkChoice]
) -> None:  # fmt: skip
    """Refuse a stage for a node that lacks an operator, a dtype, an optimizer or a codec of it. Raises PlanError."""
    if node.opset < stage.opset:
        raise PlanError(
            f"stage {stage_index} would go to {node.name}, which knows operators up to opset {node.opset}; the model "
            f"was captured with opset {stage.opset}: upgrade fusionllm on {node.name}"
        )
    if node.offer is None:
        return
    who = f"stage {stage_index} would go to {node.name}, whose backend {node.backend}"
    if missing := sorted({op.name for op in stage.ops} - set(node.offer.operators)):
        raise PlanError(
            f"{who} lacks {len(missing)} of its operators: {', '.join(missing[:8])}; "
            "let a node of another backend join instead (fusionllm join --backend torch)"
        )
    dtypes = {s.dtype for s in stage.specs().values() if s.is_tensor} | {_dtype(options)}
    if missing := sorted(dtypes - set(node.offer.dtypes)):
        fix = "; " + _PRECISION_FIX if missing == [_dtype(options)] else ""
        raise PlanError(f"{who} has no {missing[0]}; it has {', '.join(node.offer.dtypes)}{fix}")
    if missing := sorted(_optimizers(options.optim) - set(node.offer.optimizers)):
        raise PlanError(f"{who} has no optimizer {missing[0]!r}; it has {', '.join(node.offer.optimizers)}")
    if codecs and not node.offer.codecs:
        raise PlanError(
            f"{who} has no codecs, but its links compress (by {', '.join(codecs[0].forward)}): codecs need "
            "torch; install it there (pip install 'fusionllm[torch]') or leave out [compression]"
        )


def _plain_layout(graph: OpGraph, options: JobOptions, nodes: Sequence[Member], symbols: Mapping[str, int]) -> _Layout:
    """As asked, nothing measured: the codecs set by hand, on links between fences or on all."""
    costs = anchored_flops(graph, symbols)
    boundaries = partition_graph(graph, len(nodes), options.partition, symbols, costs=costs)
    return _Layout(tuple(nodes), tuple(boundaries), options.pipeline, codecs_by_hand(nodes, options.compression))


def _surveyed_layout(graph: OpGraph, options: JobOptions, nodes: Sequence[Member], surveyed: Surveyed) -> _Layout:
    dtype = _dtype(options)
    if all(node.offer is not None and dtype not in node.offer.dtypes for node in nodes):
        raise PlanError(f"none of {', '.join(node.name for node in nodes)} has {dtype}; {_PRECISION_FIX}")
    cluster = _with_lines(_with_lacks(surveyed.cluster, graph, nodes, dtype), options.fence_lines)
    base, compression = options.pipeline.partition(":")[0], options.compression
    step = StepOptions(
        microbatch_size=options.microbatch_size, max_length=options.max_length,
        num_microbatches=options.num_microbatches, pipeline=base,
        precision="float32", optimizer=_optimizer(options.optim), tied=parse_codec(compression.tied),
    )  # fmt: skip
    workload, ladder = build_workload(graph, step, surveyed.rates), ladder_of(compression)

    def code(placements: Iterable[Placement]) -> Coded:
        return best_coded(
            placements, compression.rule, workload, cluster, ratio=compression.ratio, coding=surveyed.coding,
            ladder=ladder, slow_only=compression.links == "slow",
        )  # fmt: skip

    factors = ladder_factors(workload, ladder) if compression.rule else [1.0]
    found = {"dp": code(propose(workload, cluster, factors))}
    for method, place in BASELINES.items():
        with suppress(PlanError):
            found[method] = code([place(workload, cluster)])
    if options.partition == "exhaustive":
        found["exhaustive"] = code([place_exhaustive(workload, cluster).placement])
    if options.partition not in found:
        raise PlanError(
            f"cluster.partition = {options.partition!r} finds no plan that fits these nodes' memory; set it to 'dp', "
            f"which does"
        )
    best = found[options.partition]
    chosen = tuple(nodes[i] for i in best.placement.nodes)
    return _Layout(
        nodes=chosen,
        boundaries=best.placement.boundaries,
        pipeline=pipeline_name(base, best.placement.depths),
        codecs=tuple((out, backward_codec(back)) for out, back in best.codecs)
        if compression.rule
        else codecs_by_hand(chosen, compression),
        step_s=best.step_s,
        others={method: coded.step_s for method, coded in found.items()},
        found_fences=tuple(
            tuple(nodes[i].name for i in fence) for fence in find_fences(cluster) if not nodes[fence[0]].fence
        ),
        tuner=Tuner(workload, cluster, best, surveyed.coding, compression)
        if compression.rule == "deadline" and compression.rule_every
        else None,
    )


def _dtype(options: JobOptions) -> str:
    """What products are computed in."""
    return precision_of(options).removesuffix("-weights")


def _lacks(node: Member, graph: OpGraph, dtype: str) -> set[str]:
    """Operators of the graph that a node's backend does not have; all of them where it has no ``dtype``."""
    names = {op.name for op in graph.ops}
    if node.offer is None:
        return set()
    return names - set(node.offer.operators) if dtype in node.offer.dtypes else names


def _why_unused(node: Member, graph: OpGraph, dtype: str) -> str:
    """Why a node has no stage of a plan, in words."""
    if node.offer is not None and dtype not in node.offer.dtypes:
        return f"its {node.backend} has no {dtype}"
    missing = len(_lacks(node, graph, dtype))
    return f"its {node.backend} lacks {missing} of the operators" if missing else "no faster with it"


def _with_lacks(cluster: Cluster, graph: OpGraph, nodes: Sequence[Member], dtype: str) -> Cluster:
    """With what a node's backend lacks, so that the plan keeps it from it."""
    lacks = [tuple(sorted(_lacks(node, graph, dtype))) for node in nodes]
    models = (msgspec.structs.replace(model, refuses=lack) for model, lack in zip(cluster.nodes, lacks, strict=True))
    return msgspec.structs.replace(cluster, nodes=tuple(models))


def _with_lines(cluster: Cluster, lines: Sequence[FenceLine]) -> Cluster:
    """With the lines of those fences of which nodes are here."""
    shares = []
    for line in lines:
        nodes = tuple(i for i, node in enumerate(cluster.nodes) if node.site == line.fence)
        if nodes:
            shares.append(
                Share(
                    name=line.fence,
                    nodes=nodes,
                    up_bytes_per_s=line.up_bytes_per_s,
                    down_bytes_per_s=line.down_bytes_per_s,
                )
            )
    return msgspec.structs.replace(cluster, shares=tuple(shares))


class _OptimizerName(msgspec.Struct):
    name: str = "adamw"


class _OptimizerNames(_OptimizerName):
    groups: tuple[_OptimizerName, ...] = ()


def _optimizers(optim: bytes) -> set[str]:
    """Names of all optimizers of a job, the run's own and its groups'."""
    names = _names(optim)
    own = {"muon", "adamw"} if names.name == "muon" else {names.name}
    return own | {group.name for group in names.groups if group.name}


def _optimizer(optim: bytes) -> str:
    """Its name, of one whose memory is known; any other is taken for the hungriest."""
    name = _names(optim).name
    return name if name in OPTIMIZER_COPIES else "adamw"


def _names(optim: bytes) -> _OptimizerNames:
    try:
        return msgspec.json.decode(optim, type=_OptimizerNames)
    except msgspec.MsgspecError:
        raise PlanError("the optimizer's options are not JSON; this is a fault of the owner's program") from None


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


def check_options(options: JobOptions, fences: Collection[str]) -> None:
    """Bounds of what an owner may ask, and fences that nodes joined with. Raises PlanError."""
    for name, value, limit in (
        ("num_stages", options.num_stages, MAX_STAGES),
        ("num_microbatches", options.num_microbatches, MAX_MICROBATCHES),
        ("microbatch_size", options.microbatch_size, MAX_ROWS),
        ("max_length", max(1, options.max_length), 1 << 24),
    ):
        if not 1 <= value <= limit:
            raise PlanError(f"{name} is {value}; it must lie between 1 and {limit}")
    for line in options.fence_lines:
        if line.fence not in fences:
            raise PlanError(
                f"cluster.site names {line.fence[:80]!r}, but no node joined with that --fence; "
                f"{known_names(line.fence, fences)}"
            )
        if not (0 < line.up_bytes_per_s < inf and 0 < line.down_bytes_per_s < inf):
            raise PlanError(f"the line of {line.fence[:80]!r} has a rate that is not finite and above zero")
