"""One run from a checked configuration to the results in ``runs/NAME``: cluster, job, training, checkpoint, summary.

Checks first what can be told without torch, the data included; then starts the node processes and imports torch itself,
so that both load at once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fusionllm.api.config import RunConfig, dump_config
from fusionllm.api.interrupt import Interrupt
from fusionllm.api.local import LocalCluster
from fusionllm.api.memory import estimated_bytes
from fusionllm.api.owner import OwnerLink
from fusionllm.api.trainer import State, Trainer
from fusionllm.capture.options import check_context, check_source, written_context
from fusionllm.compute import ComputeOptions
from fusionllm.errors import FusionError, UserError
from fusionllm.ir.cuts import anchored_ops
from fusionllm.ir.graph import OpGraph, encode_graph
from fusionllm.ir.plan import Plan
from fusionllm.protocol import messages as m
from fusionllm.schedule.partition import PARTITIONERS
from fusionllm.schedule.ratios import default_floor
from fusionllm.store.checkpoint import Checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from fusionllm.store.dataset import Dataset, open_dataset
from fusionllm.store.manifest import CheckpointMeta
from fusionllm.store.run_dir import RunDir
from fusionllm.store.scratch import Scratch
from fusionllm.store.tensorfile import Reading
from fusionllm.telemetry.events import Event, Note, StepMetrics, ValMetrics
from fusionllm.telemetry.plot import plot_loss
from fusionllm.telemetry.sinks import Fanout, open_sinks, read_events
from fusionllm.telemetry.summary import Summary, build_summary, encode_summary

if TYPE_CHECKING:
    import torch

    from fusionllm.api.prepare import Job

Progress = Callable[[Any], None]

#: A plan is named as the faster one when its step takes this part of ours or less.
FASTER = 0.9
#: So many nodes are named while others are waited for.
MAX_NAMES = 8


@dataclass(frozen=True)
class TrainResult:
    """What a run gave.

    Attributes:
        run_dir: the folder with everything.
        history: all events in order: StepMetrics, ValMetrics, Note.
        summary: the run in numbers.
        model: the trained module, in eval mode.
        plan: who ran what.
        stopped_early: ended by Ctrl-C before the last step, with a checkpoint.
    """

    run_dir: Path
    history: list[Event]
    summary: Summary
    model: torch.nn.Module
    plan: Plan
    stopped_early: bool = False

    @property
    def losses(self) -> list[float]:
        """Training loss of every step."""
        return [event.loss for event in self.history if isinstance(event, StepMetrics)]


def _check_installed(config: RunConfig, named_model: bool) -> None:
    """Before nodes start: what the run needs here in the end too. Raises UserError."""
    needs = {
        "training": "torch",
        "model.source": "transformers" if named_model and not config.model.source.startswith("python:") else "",
        "output.plot": "matplotlib" if config.output.plot else "",
        "output.sinks": "tensorboardX" if "tensorboard" in config.output.sinks else "",
    }
    for what, package in needs.items():
        if package and find_spec(package) is None:
            raise UserError(f"{what} needs the package {package!r}; install it with: pip install 'fusionllm[train]'")


def _open_data(config: RunConfig, base_dir: Path, obj: Any) -> Dataset:
    """The data, with enough of it for a step. Raises UserError."""
    dataset = open_dataset(config.data, seed=config.run.seed, base_dir=base_dir, obj=obj)
    dataset.steps_per_epoch(config.train.global_batch)
    return dataset


def _open_checkpoint(run_dir: RunDir, num_steps: int, dataset: Dataset) -> Checkpoint:
    """What a run goes on from. Raises UserError: it has all its steps; CheckpointError: none, torn, of other data."""
    checkpoint = load_checkpoint(run_dir.checkpoints)
    if checkpoint.manifest.step >= num_steps:
        raise UserError(
            f"run {run_dir.name!r} has its {num_steps} steps; to go on raise train.steps (--set train.steps=N)"
        )
    checkpoint.require(data_fingerprint=dataset.fingerprint)
    return checkpoint


def _check_stages(config: RunConfig, graph: OpGraph) -> None:
    """Before nodes are asked: an operator for each stage. Raises UserError."""
    num_ops = len(anchored_ops(graph))
    if config.cluster.nodes > num_ops and config.cluster.partition in PARTITIONERS:
        raise UserError(
            f"cluster.nodes is {config.cluster.nodes}, and the model has {num_ops} operators to share out; "
            f"set it (--nodes) to at most {num_ops}"
        )


def describe_plan(planned: m.Planned) -> list[str]:
    """Which frameworks compute, where they differ, and what measuring came to: the step, what travels coded."""
    frameworks = ", ".join(f"{node} computes with {backend}" for node, backend in planned.backends.items())
    backends = [frameworks] * (len(set(planned.backends.values())) > 1)
    if not planned.predicted_step_s:
        return backends
    others = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in planned.others.items())
    unused = _first_names([f"{node} ({reason})" for node, reason in planned.left_out.items()])
    left_out = [f"left out: {unused}"] * bool(unused)
    best = min(planned.others, key=lambda name: planned.others[name], default="")
    faster = planned.others.get(best, planned.predicted_step_s) < FASTER * planned.predicted_step_s
    found = " | ".join(map(", ".join, planned.found_fences))
    fences = [f"fences found by their links: {found}"] if found else []
    links = [f"{link}: {codecs.forward}, back {codecs.backward}" for link, codecs in planned.codecs.items()]
    return [
        *backends,
        f"predicted {planned.predicted_step_s:.3g} s a step (plans: {others})",
        *left_out,
        *[f"faster, as predicted: cluster.partition = {best!r}"] * faster,
        *fences,
        *links,
    ]


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + ", ..." * (len(names) > MAX_NAMES)


def describe_waiting(news: m.Waiting, left_s: float) -> str:
    """Who is here, who is missing, and how long they are waited for."""
    names = _first_names(news.names)
    busy = f", {news.busy} more have another job" * bool(news.busy)
    here = f"{news.idle} of {news.needed} nodes are here" + f" ({names})" * bool(names) + busy
    if news.idle >= news.needed:
        return f"{here}; the broker measures and plans"
    return f"{here}; waiting {max(0.0, left_s):.0f} s more for the others (cluster.join_timeout_s)"


class Run:
    """One call of `train`."""

    def __init__(
        self, config: RunConfig, base_dir: Path, module: torch.nn.Module | None, obj: Any, progress: Progress
    ) -> None:
        self._config, self._base_dir, self._module, self._obj = config, base_dir, module, obj
        self._listener: Progress | None = progress
        self._deaf: OSError | None = None
        self._started, self._before_s = time.perf_counter(), 0.0
        self._history: list[Event] = []
        self._interrupt, self._told_stopping = Interrupt(), False
        self._predicted_step_s = 0.0
        self._peak_bytes: dict[str, int] = {}
        self._codecs_layout: Any = None
        self._dense_from: int | None = None
        #: The name of the run, once it has failed behind a checkpoint.
        self.broken = ""

    def _progress(self, event: Any) -> None:
        """Tell whoever listens. One that cannot hear any more, a closed pipe or a full disk, ends the run in order."""
        if self._listener is None:
            return
        try:
            self._listener(event)
        except OSError as error:
            self._listener, self._deaf, self._interrupt.wanted = None, error, True

    def run(self) -> TrainResult:
        config = self._config
        if self._module is None:
            check_source(config.model, self._base_dir)
            if self._obj is None and not config.data.source.startswith("python:"):
                check_context(config.data.seq_len, written_context(config.model, self._base_dir))
        elif config.model.lazy:
            raise UserError("model.lazy is for a model named by model.source; the one given is built already")
        _check_installed(config, self._module is None)
        root = Path(config.run.root)
        root_is_new = not root.exists()
        run_dir = RunDir.create(root, config.run.name or None, config.run.resume)
        training = False
        try:
            with self._interrupt.listening(), ExitStack() as stack:
                dataset = _open_data(config, self._base_dir, self._obj)
                checkpoint = _open_checkpoint(run_dir, config.train.steps, dataset) if config.run.resume else None
                cluster, ticket = self._start_cluster(run_dir, stack)
                from fusionllm.api.lazy import LazyWeights
                from fusionllm.api.prepare import prepare

                job = prepare(config, self._base_dir, self._module, dataset, self._threads())
                _check_stages(config, job.captured.graph)
                if job.source.notice:
                    self._progress(Note(step=0, kind="model", text=job.source.notice))
                state, first_step = self._initial_state(job, run_dir, checkpoint)
                if checkpoint is not None:
                    text = f"from the checkpoint of step {first_step} of {config.train.steps}"
                    self._progress(Note(step=first_step, kind="resume", text=text))
                link = self._open_link(ticket, cluster)
                stack.callback(link.close)
                link.open()
                trainer, plan = self._submit(job, link)
                offers = state.weights.offer if isinstance(state.weights, LazyWeights) else None
                if state.codecs and self._codecs_layout != trainer.layout:
                    text = "the links or their codecs are others than in the checkpoint; codecs begin anew"
                    self._progress(Note(step=first_step, kind="codecs", text=text))
                    state.codecs = {}
                if self._dense_from is not None:
                    trainer.travel_dense(self._dense_from)
                trainer.send_state(state, offers)
                training = True
                fresh = msgspec.structs.replace(job.config.run, resume=False)  # of a run that begins anew
                run_dir.write_config(dump_config(msgspec.structs.replace(job.config, run=fresh)))
                final, stopped = self._train(job, trainer, run_dir, first_step)
            result = self._finish(job, run_dir, final, plan, stopped)
            if self._deaf is not None:
                raise FusionError(
                    f"the output could not be written any more ({self._deaf.strerror or self._deaf}); the run stopped "
                    f"with a checkpoint; go on with: fusionllm train {run_dir.config} --resume --name {run_dir.name}"
                )
            return result
        except BaseException as error:
            if isinstance(error, FusionError) and training and not self._interrupt.wanted:
                self.broken = run_dir.name if list_checkpoints(run_dir.checkpoints) else ""
            if not training and not config.run.resume:
                shutil.rmtree(run_dir.path, ignore_errors=True)
                if root_is_new:
                    with suppress(OSError):  # another run may have begun there
                        root.rmdir()
            raise

    # before

    def _threads(self) -> int:
        config = self._config
        if config.cluster.threads:
            return config.cluster.threads
        return 0 if config.cluster.broker else max(1, (os.cpu_count() or 1) // config.cluster.nodes)

    def _start_cluster(self, run_dir: RunDir, stack: ExitStack) -> tuple[LocalCluster | None, m.Ticket]:
        if self._config.cluster.broker:
            return None, m.parse_ticket(self._config.cluster.broker)
        cluster = LocalCluster(
            self._config.fence_names(), run_dir.path / "logs", self._threads(), self._config.cluster.device,
            self._config.model,
        )  # fmt: skip
        stack.callback(cluster.close)
        return cluster, cluster.start()

    def _open_link(self, ticket: m.Ticket, cluster: LocalCluster | None) -> OwnerLink:
        if cluster is None:
            return OwnerLink(ticket)
        return OwnerLink(ticket, self._config.fence_names()[0], "127.0.0.1", cluster.check)

    def _initial_state(self, job: Job, run_dir: RunDir, checkpoint: Checkpoint | None) -> tuple[State, int]:
        if checkpoint is None:
            return State(job.weights(), {}), 0
        checkpoint.require(graph_hash=job.graph_hash)
        manifest = checkpoint.manifest
        initial, saved = job.weights(), manifest.weights  # each is read when a stage wants it
        weights = Reading([*initial], lambda n: checkpoint.read_weight(n) if n in saved else initial[n])
        self._history = (
            [e for e in read_events(run_dir.metrics) if e.step <= manifest.step] if run_dir.metrics.exists() else []
        )
        self._before_s = float(manifest.meta.extra.get("wall_s", 0.0))
        self._codecs_layout, self._dense_from = manifest.meta.extra.get("codecs"), manifest.meta.dense_from
        optimizer, codecs = manifest.optimizer, manifest.codecs
        return State(
            weights, Reading(optimizer, checkpoint.read_optimizer), Reading(codecs, checkpoint.read_codec)
        ), manifest.step

    def _submit(self, job: Job, link: OwnerLink) -> tuple[Trainer, Plan]:
        config = self._config
        options = m.JobOptions(
            num_stages=config.cluster.nodes,
            partition=config.cluster.partition,
            pipeline=config.train.pipeline,
            num_microbatches=config.num_microbatches,
            microbatch_size=config.train.microbatch_size,
            max_length=job.dataset.max_length,
            num_steps=config.train.steps,
            optim=msgspec.json.encode(job.optim),
            compute=msgspec.json.encode(
                ComputeOptions(
                    precision=config.train.precision,  # type: ignore[arg-type]
                    recompute=config.train.recompute,
                    seed=config.run.seed,
                    num_threads=self._threads(),
                    tied=config.train.tied,  # type: ignore[arg-type]
                )
            ),
            compression=m.Compression(
                forward=config.compression.forward,
                backward=config.compression.backward,
                links=config.compression.links,
                tied=config.compression.tied_codec,
                rule=config.compression.rule,
                ratio=config.compression.ratio,
                floor=config.compression.floor or default_floor(pretrained=not job.source.from_scratch),
                rule_every=config.compression.rule_every,
            ),
            fence_links=config.fence_links(),
            fence_lines=config.fence_lines(),
            owner_fence=config.fence_names()[0] if not config.cluster.broker else "",
            stall_s=config.cluster.stall_s,
            allow_ops=config.model.allow_ops,
        )

        def waiting(message: m.Waiting, left_s: float) -> None:
            self._progress(Note(step=0, kind="waiting", text=describe_waiting(message, left_s)))

        graph = job.captured.graph
        planned = link.submit(encode_graph(graph), options, config.cluster.join_timeout_s, waiting)
        self._progress(planned.plan)
        for text in describe_plan(planned):
            self._progress(Note(step=0, kind="plan", text=text))
        self._predicted_step_s = planned.predicted_step_s
        return Trainer(config, job.dataset, link, planned, graph.outputs, self._stop_wanted), planned.plan

    def _stop_wanted(self) -> bool:
        """Whether to order no more steps; says so the first time."""
        if self._interrupt.wanted and not self._told_stopping:
            self._told_stopping = True
            text = "finishing the steps under way, then a checkpoint; again: at once"
            self._progress(Note(step=0, kind="stopping", text=text))
        return self._interrupt.wanted

    # during

    def _train(self, job: Job, trainer: Trainer, run_dir: RunDir, first_step: int) -> tuple[State, bool]:
        train = self._config.train
        resume_step = first_step if self._config.run.resume else None
        elapsed = sum(e.seconds for e in self._history if not isinstance(e, Note))
        sinks = open_sinks(self._config.output.sinks, run_dir.path, resume_step)
        saved: tuple[int, State] | None = None
        with closing(sinks), self._interrupt.graceful():
            done = first_step
            while done < train.steps and not self._stop_wanted():
                last = min(
                    [train.steps]
                    + [(done // every + 1) * every for every in (train.eval_every, train.checkpoint_every) if every]
                )
                for event in trainer.train_steps(done, last):
                    if isinstance(event, Note):
                        self._emit(event, sinks)
                        continue
                    elapsed += event.seconds
                    self._emit(msgspec.structs.replace(event, elapsed_s=elapsed), sinks)
                    done = event.step
                if train.eval_every and done % train.eval_every == 0 and done < train.steps and done == last:
                    self._evaluate(trainer, done, sinks)
                if train.checkpoint_every and done % train.checkpoint_every == 0 and done == last:
                    saved = done, self._checkpoint(job, trainer, run_dir, done)
            stopped = done < train.steps
            if not stopped:
                self._evaluate(trainer, done, sinks)
            if saved is None or saved[0] != done:
                saved = done, self._checkpoint(job, trainer, run_dir, done)
        self._peak_bytes = dict(trainer.peak_bytes)
        return saved[1], stopped

    def _emit(self, event: Event, sinks: Fanout) -> None:
        self._history.append(event)
        sinks.write(event)
        self._progress(event)

    def _evaluate(self, trainer: Trainer, step: int, sinks: Fanout) -> None:
        event = trainer.evaluate(step, lambda text: self._progress(Note(step=step, kind="validating", text=text)))
        if event is None:
            return
        self._emit(event, sinks)
        best = min(e.loss for e in self._history if isinstance(e, ValMetrics))
        band = self._config.compression.band
        if band and event.coded_loss is not None and not event.loss <= best + band and trainer.travel_dense(step):
            text = (
                f"validation loss {event.loss:.4f} is {event.loss - best:.4f} above its best; links go dense from here"
            )
            self._emit(Note(step=step, kind="quality", text=text), sinks)
            self._dense_from = step

    def _checkpoint(self, job: Job, trainer: Trainer, run_dir: RunDir, step: int) -> State:
        lazy = job.config.model.lazy
        scratch = Scratch(run_dir.path) if lazy else None
        state, graph, initial = trainer.fetch_state(scratch), job.captured.graph, job.weights()
        # frozen parameters are the model's own, as it comes from its source; of a LoRA run only the adapters are kept
        kept = {n for n, p in graph.params.items() if p.trainable} | {
            n for n, b in graph.buffers.items() if b.persistent
        }
        # a tensor that no stage holds, since no operator reads it, is as it was
        weights = {n: state.weights[n] if n in state.weights else initial[n] for n in initial if n in kept}
        meta = CheckpointMeta(
            graph_hash=job.graph_hash,
            seed=job.config.run.seed,
            data_step=step,
            data_fingerprint=job.dataset.fingerprint,
            aliases={alias: name for name, p in graph.params.items() for alias in p.aliases},
            dense_from=self._dense_from,
            extra={"wall_s": self._before_s + self._part_s()} | ({"codecs": trainer.layout} if state.codecs else {}),
        )
        path = save_checkpoint(
            run_dir.checkpoints, step, weights, state.optimizer, meta, codecs=state.codecs,
            keep_last=job.config.train.keep_checkpoints,
        )  # fmt: skip
        if scratch is not None:
            scratch.close()
        self._progress(Note(step=step, kind="checkpoint", text=str(path)))
        return State({}, {}) if lazy else State(weights, state.optimizer)

    def _part_s(self) -> float:
        """Wall time of this part of the run; those before a resume are in its checkpoint."""
        return time.perf_counter() - self._started

    # after

    def _finish(self, job: Job, run_dir: RunDir, state: State, plan: Plan, stopped: bool) -> TrainResult:
        module = job.restore(state.weights)
        output = self._config.output
        if output.plot and any(isinstance(e, StepMetrics) for e in self._history):
            plot_loss(self._history, run_dir.loss_curve, run_dir.name)
        extra = {
            "stopped_early": stopped,
            "num_params": job.captured.graph.num_params,
            "graph_hash": job.graph_hash,
            "nodes": [stage.node for stage in plan.stages],
            "pipeline": plan.pipeline,
        }
        if self._peak_bytes:
            expected = estimated_bytes(job.captured.graph, plan, self._config)
            extra["memory"] = {
                node: {"estimated_bytes": expected.get(node, 0), "peak_bytes": peak}
                for node, peak in self._peak_bytes.items()
            }
        if self._predicted_step_s:
            extra["predicted_step_s"] = self._predicted_step_s
        if output.sample_prompt and not stopped and not self._config.model.lazy:
            from fusionllm.api.sample import continue_text

            extra["sample"] = continue_text(module, job.dataset, output.sample_prompt, output.sample_tokens)
        part_s = self._part_s()
        summary = build_summary(self._history, wall_s=self._before_s + part_s, part_s=part_s, extra=extra)
        run_dir.summary.write_bytes(encode_summary(summary))
        return TrainResult(run_dir.path, self._history, summary, module, plan, stopped)
