"""RunConfig: a whole run as one tree, read from one TOML or one Python call, checked once, saved with the results.

Each room owns the struct of its own table; this module joins them and turns what msgspec says into sentences that name
the key, the value and the nearest known key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import tomli_w

from fusionllm.capture.options import ModelConfig
from fusionllm.compute import OptimConfig, check_optimizer
from fusionllm.errors import PlanError, UserError, known_names
from fusionllm.ir.cluster import Precision
from fusionllm.ir.codec import IDENTITY, parse_codec
from fusionllm.protocol.messages import (
    MAX_MICROBATCHES,
    MAX_ROWS,
    MAX_STAGES,
    NAME,
    FenceLine,
    FenceLink,
    LinkShape,
    parse_ticket,
)
from fusionllm.schedule.partition import PARTITIONERS, SURVEYED
from fusionllm.schedule.pipeline import find_pipeline
from fusionllm.schedule.ratios import DEADLINE, check_rule
from fusionllm.store.dataset import DataConfig
from fusionllm.store.toml import convert_tree, parse_value, read_toml
from fusionllm.telemetry.sinks import SINKS
from fusionllm.units import parse_bandwidth_bytes_per_s, parse_duration_s

#: What torch takes.
MAX_SEED = (1 << 63) - 1


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RunTable(_Table, frozen=True, kw_only=True):
    """The run itself.

    Attributes:
        name: empty for the next free run-NNN. root: the folder of all runs.
        base_dir: what relative paths in the other tables are relative to; empty: the TOML's folder.
        resume: go on from the latest checkpoint of the run ``name``.
    """

    name: str = ""
    root: str = "runs"
    base_dir: str = ""
    seed: int = 0
    resume: bool = False


class TrainTable(_Table, frozen=True, kw_only=True):
    """How long and how.

    Attributes:
        steps: optimizer steps. global_batch: rows per step. microbatch_size: rows per microbatch.
        pipeline: ``gpipe``, ``1f1b``, ``1f1b-ahead`` (or ``1f1b-ahead:7,5,3,1``, microbatches in flight per stage).
        precision: ``float32``; ``bfloat16`` or ``float16`` (autocast, the latter with a scaled loss);
            ``bfloat16-weights`` (weights and values in it, masters in float32).
        recompute: keep only a stage's inputs and run its forward again in the backward.
        tied: ``step`` sums a tied gradient over the stages once a step, ``microbatch`` for every microbatch, which
            costs that many times the bytes and equals a single process bit for bit.
        eval_every, checkpoint_every: in steps, 0 for only at the end.
        eval_batches: microbatches per evaluation, 0: all.
        prefetch: steps whose data is sent ahead.
    """

    steps: int = 100
    global_batch: int = 16
    microbatch_size: int = 4
    pipeline: str = "1f1b"
    precision: str = "float32"
    recompute: bool = False
    tied: str = "step"
    eval_every: int = 0
    eval_batches: int = 0
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    prefetch: int = 2


class CompressionTable(_Table, frozen=True, kw_only=True):
    """What links do to what crosses them. Codecs are written as in docs/codecs.md, e.g. ``tangent(hadamard:bits=2)``.

    Attributes:
        forward: codec of activations. backward: of their gradients.
        links: ``slow``: between fences; ``all``.
        tied_codec: codec of gradients that stages which share a parameter exchange, such as ``ef(powersgd)``.
        rule: choose the codec of each link instead, from what was measured: ``deadline`` (just enough that no link is
            waited for), ``adatopk-paper`` or ``uniform-topk`` (with ``ratio``).
        floor: the most lossy codec that ``deadline`` may choose; empty: by whether the model begins at random.
        rule_every: steps after which ``deadline`` is applied again to what was measured meanwhile; 0: never.
        band: how far the validation loss may rise above its best, in nats, before all links go dense; 0: as far as it
            likes. A link whose own error runs away goes dense by itself.
        dense_last: share of the last steps that travel dense, so that the model is good without the codecs.
    """

    forward: str = "identity"
    backward: str = "identity"
    links: Literal["slow", "all"] = "slow"
    tied_codec: str = "identity"
    rule: str = ""
    ratio: float = 100.0
    floor: str = ""
    rule_every: int = 20
    band: float = 0.2
    dense_last: float = 0.0


class SlowLink(_Table, frozen=True, kw_only=True):
    """An emulated link between fences, e.g. ``bandwidth = "100 Mbps"``, ``latency = "20 ms"``."""

    bandwidth: str = ""
    latency: str = "0 ms"


class SiteLine(_Table, frozen=True, kw_only=True):
    """What all nodes of the fence ``name`` share towards others. ``downlink``: default as ``uplink``."""

    name: str
    uplink: str
    downlink: str = ""


class ClusterTable(_Table, frozen=True, kw_only=True):
    """Where it runs.

    Attributes:
        broker: a join ticket; empty: a broker and ``nodes`` node processes on this machine.
        nodes: one stage each; with ``dp`` that many at least are waited for.
        partition: ``equal-compute``, ``equal-number``, the paper's ``op-fence``, or ``dp``: devices and links are
            measured, and the best of all idle nodes get the stages that suit them; ``exhaustive``: of a few nodes.
        fences: sizes of the groups of local nodes, e.g. ``[2, 2]``; empty: one fence.
        slow_link: what stands between the fences (emulated).
        site: declared lines of fences, one message after another in each; counted where links are measured.
        threads: of compute per node, 0: the machine's cores shared out among local nodes.
        device: of local nodes: ``auto``, ``cpu``, ``cuda``, ...; a machine that joins chooses its own.
        join_timeout_s, stall_s: how long to wait for nodes, and before a wait is reported.
        max_restarts: how often a run that fails, as when a node is lost, goes on by itself from its latest checkpoint,
            with the nodes that are there then or join within ``join_timeout_s``.
    """

    broker: str = ""
    nodes: int = 2
    partition: str = "equal-compute"
    fences: tuple[int, ...] = ()
    slow_link: SlowLink = SlowLink()
    site: tuple[SiteLine, ...] = ()
    threads: int = 0
    device: str = "auto"
    join_timeout_s: float = 300.0
    stall_s: float = 60.0
    max_restarts: int = 0


class OutputTable(_Table, frozen=True, kw_only=True):
    """``sinks``: where metrics go. ``sample_prompt``: text to continue at the end (language models), empty for none."""

    sinks: tuple[str, ...] = ("jsonl", "tensorboard")
    plot: bool = True
    sample_prompt: str = ""
    sample_tokens: int = 120


class RunConfig(_Table, frozen=True, kw_only=True):
    """A run. Table names are the TOML's."""

    run: RunTable = RunTable()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainTable = TrainTable()
    optimizer: OptimConfig = OptimConfig()
    compression: CompressionTable = CompressionTable()
    cluster: ClusterTable = ClusterTable()
    output: OutputTable = OutputTable()

    @property
    def num_microbatches(self) -> int:
        return -(-self.train.global_batch // self.train.microbatch_size)

    def fence_names(self) -> list[str]:
        """Fence of each local node."""
        sizes = self.cluster.fences or (self.cluster.nodes,)
        return [f"fence{i}" for i, size in enumerate(sizes) for _ in range(size)]

    def fence_links(self) -> tuple[FenceLink, ...]:
        """The emulated links, one per pair of fences."""
        slow = self.cluster.slow_link
        if not slow.bandwidth:
            return ()
        shape = LinkShape(parse_bandwidth_bytes_per_s(slow.bandwidth), parse_duration_s(slow.latency))
        names = sorted(set(self.fence_names()))
        return tuple(FenceLink(a, b, shape) for i, a in enumerate(names) for b in names[i + 1 :])

    def fence_lines(self) -> tuple[FenceLine, ...]:
        """The declared lines. Raises UserError for what is no rate."""
        pairs = [(site.name, site.uplink, site.downlink or site.uplink) for site in self.cluster.site]
        rate = parse_bandwidth_bytes_per_s
        return tuple(FenceLine(name, rate(up), rate(down)) for name, up, down in pairs)


def load_config(path: Path | None, overrides: Sequence[str] = (), tables: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a run's configuration and check it.

    Args:
        path: the TOML; None for ``tables`` alone.
        overrides: ``table.key=value`` texts, values as in TOML (a bare word is a string).

    Raises:
        UserError: names the key, the value, and what would be right.
    """
    raw: dict[str, Any] = read_toml(path, "run file") if path is not None else {}
    for table, values in (tables or {}).items():
        raw.setdefault(table, {}).update(values)
    for text in overrides:
        _override(raw, text)
    return build_config(raw)


def build_config(raw: dict[str, Any]) -> RunConfig:
    """Check a plain tree and make the frozen one. Raises UserError."""
    config = convert_tree(raw, RunConfig)
    _check_values(config)
    return config


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as TOML."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return tree


def _override(raw: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or len(names) < 2 or not all(names):
        raise UserError(f"--set {text!r}: write it like --set train.steps=20")
    table = raw
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {text!r}: {name} is a value, not a table")
    table[names[-1]] = parse_value(value)


def _check_finite(tree: Any, where: str) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            _check_finite(value, f"{where}.{key}" if where else key)
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise UserError(f"{where} is {tree}; it must be a finite number")


def _check_values(config: RunConfig) -> None:
    train, cluster = config.train, config.cluster
    _check_finite(msgspec.to_builtins(config), "")
    for name, value, least, most in (
        ("train.steps", train.steps, 1, math.inf),
        ("train.global_batch", train.global_batch, 1, MAX_MICROBATCHES * train.microbatch_size),
        ("train.microbatch_size", train.microbatch_size, 1, MAX_ROWS),
        ("train.eval_every", train.eval_every, 0, math.inf),
        ("train.eval_batches", train.eval_batches, 0, math.inf),
        ("train.checkpoint_every", train.checkpoint_every, 0, math.inf),
        ("train.keep_checkpoints", train.keep_checkpoints, 1, math.inf),
        ("train.prefetch", train.prefetch, 0, 32),
        ("cluster.nodes", cluster.nodes, 1, MAX_STAGES),
        ("cluster.threads", cluster.threads, 0, 1024),
        ("cluster.join_timeout_s", cluster.join_timeout_s, 1, math.inf),
        ("cluster.stall_s", cluster.stall_s, 1, math.inf),
        ("cluster.max_restarts", cluster.max_restarts, 0, math.inf),
        ("compression.dense_last", config.compression.dense_last, 0, 1),
        ("compression.band", config.compression.band, 0, math.inf),
        ("compression.rule_every", config.compression.rule_every, 0, math.inf),
        ("optimizer.warmup_steps", config.optimizer.warmup_steps, 0, math.inf),
        ("optimizer.min_lr_ratio", config.optimizer.min_lr_ratio, 0, 1),
        ("optimizer.clip_norm", config.optimizer.clip_norm, 0, math.inf),
        ("model.bottleneck.rank", config.model.bottleneck.rank, 0, math.inf),
        ("model.bottleneck.cuts", config.model.bottleneck.cuts, 1, MAX_STAGES),
        ("model.bottleneck.anneal", config.model.bottleneck.anneal, 0, math.inf),
        ("output.sample_tokens", config.output.sample_tokens, 1, math.inf),
        ("run.seed", config.run.seed, 0, MAX_SEED),
    ):
        if value < least:
            raise UserError(f"{name} is {value}; it must be at least {least}")
        if value > most:
            raise UserError(f"{name} is {value}; it must be at most {most}")
    for name, word, known in (
        ("cluster.partition", cluster.partition, (*PARTITIONERS, *SURVEYED)),
        ("train.precision", train.precision, get_args(Precision)),
        ("train.tied", train.tied, ("step", "microbatch")),
        *(("output.sinks", sink, tuple(SINKS)) for sink in config.output.sinks),
    ):
        if word not in known:
            raise UserError(f"{name} is {word!r}; {known_names(word, known)}")
    try:
        pipeline = find_pipeline(train.pipeline)
        if ":" in train.pipeline and cluster.partition in PARTITIONERS:
            pipeline(0, cluster.nodes, 1)
    except (UserError, PlanError) as error:
        raise UserError(f"train.pipeline is {train.pipeline!r}: {error}") from None
    check_optimizer(config.optimizer)
    if config.run.name and NAME.fullmatch(config.run.name) is None:
        raise UserError(f"run.name is {config.run.name!r}; use letters, digits, dots, dashes and underscores")
    if cluster.broker:
        parse_ticket(cluster.broker)
    if cluster.fences and (sum(cluster.fences) != cluster.nodes or min(cluster.fences) < 1):
        raise UserError(
            f"cluster.fences {list(cluster.fences)} adds up to {sum(cluster.fences)}, not to "
            f"cluster.nodes = {cluster.nodes}; give the nodes of each fence, so that they add up to cluster.nodes"
        )
    _check_compression(config.compression)
    _check_tied(config.compression.tied_codec, train)
    config.fence_links()
    _check_one_fence(config)
    names, fences = [line.fence for line in config.fence_lines()], sorted(set(config.fence_names()))
    for index, name in enumerate(names):
        if name not in fences and not cluster.broker:
            raise UserError(f"cluster.site[{index}].name is {name!r}; {known_names(name, fences)}")
    if len(set(names)) < len(names):
        raise UserError(f"cluster.site names {', '.join(names)}; give each fence one [[cluster.site]]")
    if names and cluster.partition not in SURVEYED and not config.compression.rule:
        raise UserError(
            f"cluster.site would not count: cluster.partition = {cluster.partition!r} looks at no links; set it to 'dp'"
        )
    if config.num_microbatches < cluster.nodes:
        raise UserError(
            f"fewer microbatches than stages: train.global_batch {train.global_batch} by train.microbatch_size "
            f"{train.microbatch_size} makes {config.num_microbatches} for {cluster.nodes} nodes, some of which would "
            f"idle all the time; set train.global_batch to {cluster.nodes * train.microbatch_size} or more, or "
            f"cluster.nodes (--nodes) to {config.num_microbatches}"
        )


def _check_one_fence(config: RunConfig) -> None:
    """Nothing that lies between fences, where several nodes are local and in one."""
    if config.cluster.broker or config.cluster.nodes == 1 or len(set(config.fence_names())) > 1:
        return
    fix = "set cluster.fences to the nodes of each, e.g. [2, 2] for 4 nodes"
    if config.cluster.slow_link.bandwidth:
        raise UserError(f"cluster.slow_link lies between fences, and all nodes are in one; {fix}")
    table = config.compression
    if table.links == "slow" and (table.rule or {table.forward, table.backward} != {str(IDENTITY)}):
        what = "compression.rule is" if table.rule else "compression.forward and backward are"
        raise UserError(
            f"{what} for links between fences, and all nodes are in one; {fix}, or compression.links = 'all'"
        )


def _check_tied(text: str, train: TrainTable) -> None:
    try:
        spec = parse_codec(text)
    except UserError as error:
        raise UserError(f"compression.tied_codec = {text!r}: {error}") from None
    if spec == IDENTITY:
        return
    if spec.name != "ef" or spec.needs_reference or spec.core.name.startswith("klt"):
        raise UserError(
            f"compression.tied_codec is {text!r}; what it loses must come later and no message may lean on another: "
            "use ef(powersgd), ef(topk:ratio=100), ef(hadamard) or the like"
        )
    if train.tied != "step" or train.precision == "float16":
        raise UserError(
            f"compression.tied_codec is {text!r}, train.tied {train.tied!r}, train.precision {train.precision!r}: "
            "error feedback adds up one gradient a step of one scale; use train.tied = 'step' and another precision"
        )


def _check_compression(table: CompressionTable) -> None:
    try:
        check_rule(table.rule or DEADLINE, table.ratio, table.floor)
    except UserError as error:
        raise UserError(f"compression.{error}") from None
    if table.rule:
        if {table.forward, table.backward} != {str(IDENTITY)}:
            raise UserError(
                f"compression.rule is {table.rule!r} and a codec is set for forward or backward; choose one of them"
            )
    for name, text in (("forward", table.forward), ("backward", table.backward)):
        try:
            spec = parse_codec(text)
        except UserError as error:
            raise UserError(f"compression.{name} = {text!r}: {error}") from None
        if spec.for_replicas:
            raise UserError(
                f"compression.{name} is {text!r}, which is for gradients summed over replicas, not for links"
            )
        if name == "forward" and spec.needs_reference:
            raise UserError(f"compression.forward is {text!r}, which is for gradients; see docs/codecs.md")
