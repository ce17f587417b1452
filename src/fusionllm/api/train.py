"""`train`: from a model and data to a trained model, over node processes here or machines of a broker.

Prepares a job (data, capture, cluster, plan), runs it through `run.Trainer`, writes the results into ``runs/NAME``.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from fusionllm.api.config import RunConfig, dump_config, load_config
from fusionllm.api.local import LocalCluster
from fusionllm.api.options import tables_from_options
from fusionllm.api.owner import OwnerLink
from fusionllm.api.run import State, Trainer
from fusionllm.capture.export import Captured, capture_module
from fusionllm.capture.sources import Source, resolve_model
from fusionllm.capture.weights import write_back
from fusionllm.compute import ComputeOptions, tensor_from_buffer, tensor_to_bytes
from fusionllm.errors import UserError
from fusionllm.ir.graph import encode_graph
from fusionllm.protocol import messages as m
from fusionllm.store.checkpoint import load_checkpoint, save_checkpoint
from fusionllm.store.dataset import Dataset, open_dataset
from fusionllm.store.manifest import CheckpointMeta
from fusionllm.store.run_dir import RunDir
from fusionllm.store.sources import open_source
from fusionllm.store.tensorfile import Blob
from fusionllm.store.tokens import open_tokenizer
from fusionllm.telemetry.events import Event, Note, StepMetrics
from fusionllm.telemetry.plot import plot_loss
from fusionllm.telemetry.sinks import Fanout, open_sinks, read_events
from fusionllm.telemetry.summary import Summary, build_summary, encode_summary

log = logging.getLogger(__name__)
Progress = Callable[[Any], None]


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
    plan: Any
    stopped_early: bool = False

    @property
    def losses(self) -> list[float]:
        """Training loss of every step."""
        return [event.loss for event in self.history if isinstance(event, StepMetrics)]


@dataclass
class Job:
    """Everything known before a node is asked: config, data, model, graph."""

    config: RunConfig
    base_dir: Path
    dataset: Dataset
    source: Source
    captured: Captured


def train(
    model: torch.nn.Module | str | Mapping[str, Any] | None = None,
    data: Any = None,
    *,
    config: RunConfig | str | os.PathLike[str] | None = None,
    overrides: tuple[str, ...] = (),
    base_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> TrainResult:
    """Train a model across node processes or machines.

    Args:
        model: an ``nn.Module`` whose forward returns the loss (or has it as ``.loss``), or a source as in a TOML's
            ``model.source``, or that table. None: as the config says.
        data: a path, an id, the table of the TOML, a ``datasets.Dataset``, a list of texts, or a sequence of dicts
            of arrays. None: as the config says.
        config: a RunConfig or the path of a TOML.
        overrides: ``table.key=value`` texts on top of it.
        base_dir: what relative paths are relative to; the TOML's folder by default.
        progress: called with every event.
        **options: keys of the config by their own name (``steps=20``, ``nodes=2``, ``lr=1e-3``) or whole tables
            (``train={"steps": 20}``).

    Returns:
        TrainResult with the history and the trained model.

    Raises:
        UserError: something given cannot be used. FusionError: the run failed.

    Example:
        >>> result = fusionllm.train("gpt2", "book.txt", steps=100, nodes=2, lr=1e-3)
        >>> result.summary.val_loss
    """
    path = None if config is None or isinstance(config, RunConfig) else Path(config)
    given = {"model": model, "data": data}
    options |= {table: value for table, value in given.items() if isinstance(value, Mapping)}
    data = None if isinstance(data, Mapping) else data
    tables = tables_from_options(options, RunConfig)
    if isinstance(config, RunConfig):
        base = msgspec.to_builtins(config)
        for table, values in tables.items():
            base[table] = {**base.get(table, {}), **values}
        tables = base
    if isinstance(model, str):
        tables.setdefault("model", {})["source"] = model
    if isinstance(data, (str, os.PathLike)):
        tables.setdefault("data", {})["source"] = os.fspath(data)
    resolved = load_config(path, overrides, tables)
    where = Path(base_dir or resolved.run.base_dir or (path.parent if path is not None else Path.cwd())).resolve()
    run = msgspec.structs.replace(resolved.run, base_dir=str(where))
    resolved = msgspec.structs.replace(resolved, run=run)
    module = model if isinstance(model, torch.nn.Module) else None
    obj = None if data is None or isinstance(data, (str, os.PathLike)) else data
    return _Run(resolved, where, module, obj, progress or (lambda event: None)).run()


def check_files(config: RunConfig, base_dir: Path) -> None:
    """Refuse a data file or tokenizer that is not there, before any process is started. Raises UserError."""
    data = config.data
    is_path = not data.source.startswith(("hf:", "python:"))
    if is_path and not (data.source and (base_dir / Path(data.source).expanduser()).exists()):
        open_source(data.source, text_column=data.text_column, split=data.split, base_dir=base_dir)
    if data.tokenizer.endswith(".json") and not (base_dir / data.tokenizer).exists():
        open_tokenizer(data.tokenizer, base_dir)


def prepare(config: RunConfig, base_dir: Path, module: torch.nn.Module | None, obj: Any) -> Job:
    """Open the data, build the model, capture it. Raises UserError, CaptureError."""
    dataset = open_dataset(config.data, seed=config.run.seed, base_dir=base_dir, obj=obj)
    model = config.model
    if module is None and dataset.vocab_size and model.source in ("gpt2", "llama") and "vocab_size" not in model.config:
        model = msgspec.structs.replace(model, config={**model.config, "vocab_size": dataset.vocab_size})
        config = msgspec.structs.replace(config, model=model)
    source = resolve_model(model, base_dir=base_dir, seed=config.run.seed, module=module)
    if dataset.vocab_size:
        if source.max_seq_len is not None and config.data.seq_len > source.max_seq_len:
            raise UserError(
                f"data.seq_len is {config.data.seq_len}, the model's context is {source.max_seq_len} tokens; "
                f"set data.seq_len to at most {source.max_seq_len} or give the model a longer context"
            )
        if source.vocab_size is not None and dataset.vocab_size > source.vocab_size:
            raise UserError(
                f"the tokenizer has {dataset.vocab_size} ids, the model's vocabulary {source.vocab_size}; "
                "set model.config.vocab_size to the tokenizer's"
            )
    first = dataset.microbatches(0, global_batch=2, microbatch_size=2)[0]
    example = {name: torch.from_numpy(array) for name, array in first.items()}
    return Job(config, base_dir, dataset, source, capture_module(source.module, example, mode="train"))


class _Run:
    """One call of `train`."""

    def __init__(
        self, config: RunConfig, base_dir: Path, module: torch.nn.Module | None, obj: Any, progress: Progress
    ) -> None:
        self._config, self._base_dir, self._module, self._obj, self._progress = config, base_dir, module, obj, progress
        self._started = time.perf_counter()
        self._history: list[Event] = []
        self._stop = _Stop()

    def run(self) -> TrainResult:
        config = self._config
        if self._obj is None:
            check_files(config, self._base_dir)
        root = Path(config.run.root)
        root_is_new = not root.exists()
        run_dir = RunDir.create(root, config.run.name or None, config.run.resume)
        training = False
        try:
            with self._stop.listening(), ExitStack() as stack:
                cluster, ticket = self._start_cluster(run_dir, stack)
                if self._threads():
                    torch.set_num_threads(self._threads())
                job = prepare(config, self._base_dir, self._module, self._obj)
                state, first_step = self._initial_state(job, run_dir)
                link = self._open_link(ticket, cluster)
                stack.callback(link.close)
                link.open()
                trainer, plan = self._submit(job, link)
                trainer.send_state(state)
                training = True
                run_dir.write_config(dump_config(job.config))
                final, stopped = self._train(job, trainer, run_dir, first_step)
            return self._finish(job, run_dir, final, plan, stopped)
        except BaseException:
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
        cluster = LocalCluster(self._config.fence_names(), run_dir.path / "logs", self._threads())
        stack.callback(cluster.close)
        return cluster, cluster.start()

    def _open_link(self, ticket: m.Ticket, cluster: LocalCluster | None) -> OwnerLink:
        if cluster is None:
            return OwnerLink(ticket)
        return OwnerLink(ticket, self._config.fence_names()[0], "127.0.0.1", cluster.check)

    def _initial_state(self, job: Job, run_dir: RunDir) -> tuple[State, int]:
        if not job.config.run.resume:
            return State({n: _blob(t) for n, t in job.captured.tensors.items()}, {}), 0
        checkpoint = load_checkpoint(run_dir.checkpoints)
        checkpoint.require(graph_hash=job.captured.graph.content_hash(), data_fingerprint=job.dataset.fingerprint)
        manifest = checkpoint.manifest
        weights = {n: _blob(t) for n, t in job.captured.tensors.items()}
        weights |= {n: checkpoint.read_weight(n) for n in manifest.weights}
        self._history = (
            [e for e in read_events(run_dir.metrics) if e.step <= manifest.step] if run_dir.metrics.exists() else []
        )
        return State(weights, {n: checkpoint.read_optimizer(n) for n in manifest.optimizer}), manifest.step

    def _submit(self, job: Job, link: OwnerLink) -> tuple[Trainer, Any]:
        config = self._config
        options = m.JobOptions(
            num_stages=config.cluster.nodes,
            partition=config.cluster.partition,
            pipeline=config.train.pipeline,
            num_microbatches=config.num_microbatches,
            microbatch_size=config.train.microbatch_size,
            num_steps=config.train.steps,
            optim=msgspec.json.encode(config.optimizer),
            compute=msgspec.json.encode(
                ComputeOptions(
                    precision=config.train.precision,  # type: ignore[arg-type]
                    recompute=config.train.recompute,
                    seed=config.run.seed,
                    num_threads=self._threads(),
                    tied=config.train.tied,  # type: ignore[arg-type]
                )
            ),
            fence_links=config.fence_links(),
            owner_fence=config.fence_names()[0] if not config.cluster.broker else "",
            stall_s=config.cluster.stall_s,
        )

        def waiting(message: m.Waiting) -> None:
            self._progress(Note(step=0, kind="waiting", text=f"{message.idle} of {message.needed} nodes are here"))

        planned = link.submit(encode_graph(job.captured.graph), options, config.cluster.join_timeout_s, waiting)
        self._progress(planned.plan)
        return Trainer(config, job.dataset, link, planned, self._stop_wanted), planned.plan

    def _stop_wanted(self) -> bool:
        """Whether to order no more steps; says so the first time."""
        if self._stop.wanted and not self._stop.said:
            self._stop.said = True
            text = "finishing the steps under way, then a checkpoint; again: at once"
            self._progress(Note(step=0, kind="stopping", text=text))
        return self._stop.wanted

    # during

    def _train(self, job: Job, trainer: Trainer, run_dir: RunDir, first_step: int) -> tuple[State, bool]:
        train = self._config.train
        resume_step = first_step if self._config.run.resume else None
        elapsed = sum(getattr(e, "seconds", 0.0) for e in self._history)
        sinks = open_sinks(self._config.output.sinks, run_dir.path, resume_step)
        state: State | None = None
        with closing(sinks), self._stop.graceful():
            done = first_step
            while done < train.steps and not self._stop_wanted():
                last = min(
                    [train.steps]
                    + [(done // every + 1) * every for every in (train.eval_every, train.checkpoint_every) if every]
                )
                for event in trainer.train_steps(done, last):
                    elapsed += event.seconds
                    self._emit(msgspec.structs.replace(event, elapsed_s=elapsed), sinks)
                    done = event.step
                if train.eval_every and done % train.eval_every == 0 and done < train.steps and done == last:
                    self._evaluate(trainer, done, sinks)
                if train.checkpoint_every and done % train.checkpoint_every == 0 and done == last:
                    state = self._checkpoint(job, trainer, run_dir, done)
            stopped = done < train.steps
            if not stopped:
                self._evaluate(trainer, done, sinks)
            state = self._checkpoint(job, trainer, run_dir, done)
        return state, stopped

    def _emit(self, event: Event, sinks: Fanout) -> None:
        self._history.append(event)
        sinks.write(event)
        self._progress(event)

    def _evaluate(self, trainer: Trainer, step: int, sinks: Fanout) -> None:
        event = trainer.evaluate(step)
        if event is not None:
            self._emit(event, sinks)

    def _checkpoint(self, job: Job, trainer: Trainer, run_dir: RunDir, step: int) -> State:
        state = trainer.fetch_state()
        persistent = {*job.captured.graph.params, *(n for n, b in job.captured.graph.buffers.items() if b.persistent)}
        unused = {n: _blob(t) for n, t in job.captured.tensors.items() if n in persistent and n not in state.weights}
        weights = unused | {n: b for n, b in state.weights.items() if n in persistent}
        aliases = {alias: name for name, p in job.captured.graph.params.items() for alias in p.aliases}
        meta = CheckpointMeta(
            graph_hash=job.captured.graph.content_hash(),
            seed=job.config.run.seed,
            data_step=step,
            data_fingerprint=job.dataset.fingerprint,
            aliases=aliases,
        )
        path = save_checkpoint(
            run_dir.checkpoints, step, weights, state.optimizer, meta, keep_last=job.config.train.keep_checkpoints
        )
        self._progress(Note(step=step, kind="checkpoint", text=str(path)))
        return State(weights, state.optimizer)

    # after

    def _finish(self, job: Job, run_dir: RunDir, state: State, plan: Any, stopped: bool) -> TrainResult:
        module = job.source.module
        write_back(module, {n: tensor_from_buffer(b.data, b.dtype, b.shape) for n, b in state.weights.items()})
        module.eval()
        output = self._config.output
        if output.plot and any(hasattr(e, "lr") for e in self._history):
            plot_loss(self._history, run_dir.loss_curve, run_dir.name)
        extra = {
            "stopped_early": stopped,
            "num_params": job.captured.graph.num_params,
            "graph_hash": job.captured.graph.content_hash(),
            "nodes": [stage.node for stage in plan.stages],
            "pipeline": plan.pipeline,
        }
        if output.sample_prompt and not stopped:
            from fusionllm.api.sample import continue_text

            extra["sample"] = continue_text(module, job.dataset, output.sample_prompt, output.sample_tokens)
        summary = build_summary(self._history, wall_s=time.perf_counter() - self._started, extra=extra)
        run_dir.summary.write_bytes(encode_summary(summary))
        return TrainResult(run_dir.path, self._history, summary, module, plan, stopped)


def _blob(tensor: torch.Tensor) -> Blob:
    return Blob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor_to_bytes(tensor.detach()))


class _Stop:
    """Ctrl-C and SIGTERM: at once before and after the training, else after the steps under way and a checkpoint.

    A second signal stops at once. The handler only sets a flag: it may run in the middle of a print.
    """

    def __init__(self) -> None:
        self.wanted = self.said = self._graceful = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle both signals in here; only the main thread can, elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: Mapping[int, Any] = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    @contextmanager
    def graceful(self) -> Iterator[None]:
        self._graceful = True
        try:
            yield
        finally:
            self._graceful = False

    def _handle(self, signum: int, frame: Any) -> None:
        if self.wanted or not self._graceful:
            raise KeyboardInterrupt
        self.wanted = True
