"""The training loop as the owner sees it: order steps, feed them ahead, gather losses, evaluate, fetch the state.

Everything here is about one job that is already planned; `train` prepares it and writes its results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from fusionllm.api.config import RunConfig
from fusionllm.api.owner import OwnerLink, Received
from fusionllm.compute import learning_rate
from fusionllm.errors import FusionError, RemoteProtocolError, UserError
from fusionllm.ir.codec import IDENTITY
from fusionllm.protocol import messages as m
from fusionllm.store.dataset import Dataset
from fusionllm.store.scratch import Scratch
from fusionllm.store.tensorfile import Blob
from fusionllm.telemetry.events import Note, StepMetrics, ValMetrics

NO_NEWS_S = 600.0
#: How often a long evaluation says how far it is.
NEWS_S = 10.0


class State(msgspec.Struct):
    """What a run is: weights and optimizer tensors by name, tensors of the links' codecs by ``STAGE/NAME``."""

    weights: Mapping[str, Blob]
    optimizer: Mapping[str, Blob]
    codecs: Mapping[str, Blob] = {}


class _Step(msgspec.Struct):
    order: m.StepOrder
    batches: list[dict[str, np.ndarray]]
    outputs: tuple[str, ...]
    values: dict[str, dict[int, float]] = msgspec.field(default_factory=dict)
    commit: m.Commit | None = None

    def take(self, key: str, microbatch_index: int, value: float) -> None:
        """An output has come: the loss, and in an evaluation the metrics."""
        if key not in self.outputs or microbatch_index not in range(len(self.order.rows)):
            raise RemoteProtocolError(f"output {key[:80]!r} of microbatch {microbatch_index}, which nobody asked for")
        self.values.setdefault(key, {})[microbatch_index] = value

    @property
    def complete(self) -> bool:
        count = sum(len(values) for values in self.values.values())
        return count == len(self.order.rows) * len(self.outputs) and (self.commit is not None or not self.order.train)

    @property
    def loss(self) -> float:
        """Mean over the rows; the products and the order of the sum are those of a plain loop."""
        rows, losses = self.order.rows, self.values[self.outputs[0]]
        return float(sum(losses[i] * (rows[i] / sum(rows)) for i in range(len(rows))))

    @property
    def counts(self) -> list[float]:
        """Sums of the metrics over the microbatches; none when the graph has none."""
        return [sum(self.values[key].values()) for key in self.outputs[1:]]

    @property
    def num_tokens(self) -> int:
        """Of the first column, without padding; rows, where that is no column of tokens."""
        first = [next(iter(batch.values())) for batch in self.batches]
        masks = [batch.get("attention_mask") for batch in self.batches]
        if all(mask is not None and mask.shape == a.shape for mask, a in zip(masks, first)):
            return sum(int(np.count_nonzero(mask)) for mask in masks if mask is not None)
        return int(sum(a.size if np.issubdtype(a.dtype, np.integer) else a.shape[0] for a in first))


class Trainer:
    """Drives one job.

    Args:
        outputs: ids of the graph's outputs: the loss, then the metrics of `ir.modes`, if any.
        stop_wanted: asked before every order: True lets the steps under way be the last.
    """

    def __init__(
        self, config: RunConfig, dataset: Dataset, link: OwnerLink, planned: m.Planned, outputs: tuple[str, ...],
        stop_wanted: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._config, self._dataset, self._link, self._planned = config, dataset, link, planned
        self._outputs, self._stop_wanted = outputs, stop_wanted
        self._seq = 0
        self._first_dense = round(config.train.steps * (1 - config.compression.dense_last))
        self._codecs = dict(planned.codecs)
        self._stage_of = {stage.node: stage.stage_index for stage in planned.plan.stages}
        self._link_bytes: dict[str, int] = {}
        #: Memory each node has needed at most, in bytes.
        self.peak_bytes: dict[str, int] = {}

    # weights

    @property
    def layout(self) -> dict[str, Any]:
        """Where the model is cut and what the links' codecs are, by stage: what codecs' state belongs to."""
        boundaries, table = list(self._planned.plan.boundaries), self._config.compression
        if table.rule == "deadline" and table.rule_every:  # any link may use any codec of the ladder
            return {"boundaries": boundaries, "floor": table.floor, "tied": table.tied_codec}
        links = {"->".join(map(str, self._ends(k))): [c.forward, c.backward] for k, c in self._planned.codecs.items()}
        return {"boundaries": boundaries, "links": links, "tied": table.tied_codec}

    def _ends(self, link: str) -> tuple[int, int]:
        """Stages of a link ``"a->b"``."""
        a, b = link.split("->")
        return self._stage_of[a], self._stage_of[b]

    def send_state(self, state: State, offer: Callable[[Sequence[str]], m.WeightOffer] | None = None) -> None:
        """Give every stage its tensors, the optimizer's first; then wait until all hold theirs.

        Args:
            offer: what stages may get without us, for the tensors of one; they are sent what they still want.
        """
        for key in state.codecs:
            index, _, name = key.partition("/")
            self._send_blob(int(index), "codec", name, state.codecs[key])
        for stage_index, names in enumerate(self._planned.tensors):
            wanted = set(names)
            for key in state.optimizer:
                if key.partition("/")[2] in wanted:
                    self._send_blob(stage_index, "optimizer", key, state.optimizer[key])
            if offer is not None:
                payload = m.encode_message(offer(names))
                header = m.TensorHeader("offer", self._planned.job, 0, -1, "", "uint8", (len(payload),))
                self._link.send(stage_index, header, payload, m.Priority.STATE)
                continue
            for name in names:
                self._send_blob(stage_index, "weight", name, state.weights[name])
        for _ in self._planned.tensors if offer is not None else ():
            self._answer_wish(state)
        self._link.wait_start(NO_NEWS_S)

    def _answer_wish(self, state: State) -> None:
        event = self._link.next_event(NO_NEWS_S, "a stage to say which weights it wants")
        if not isinstance(event, Received) or event.header.kind != "want":
            raise RemoteProtocolError(f"unexpected {event!r:.80} while giving out the weights")
        for name in m.decode_wish(bytes(event.payload)).names:
            if name not in self._planned.tensors[event.stage_index]:
                raise RemoteProtocolError(f"stage {event.stage_index} wants {name[:80]!r}, which is not its own")
            self._send_blob(event.stage_index, "weight", name, state.weights[name])

    def fetch_state(self, scratch: Scratch | None = None) -> State:
        """Read all tensors back, after the last step ordered. A tied one is read from its first holder.

        Args:
            scratch: where they are put down; None: they stay in memory.
        """
        for stage_index in range(self._planned.plan.num_stages):
            header = m.TensorHeader("fetch", self._planned.job, self._seq - 1, -1, "", "uint8", (0,))
            self._link.send(stage_index, header, b"", m.Priority.STATE)
        weights: dict[str, Blob] = {}
        optimizer: dict[str, Blob] = {}
        codecs: dict[str, Blob] = {}
        waiting = set(range(self._planned.plan.num_stages))
        while waiting:
            event = self._link.next_event(NO_NEWS_S, f"the weights of stages {sorted(waiting)}")
            if not isinstance(event, Received) or event.header.kind not in ("weight", "optimizer", "codec", "done"):
                raise RemoteProtocolError(f"unexpected {event!r:.80} while reading the weights")
            header = event.header
            if header.kind == "done":
                waiting.discard(event.stage_index)
                continue
            target = {"weight": weights, "optimizer": optimizer, "codec": codecs}[header.kind]
            key = f"{event.stage_index}/{header.key}" if header.kind == "codec" else header.key
            if key not in target:
                blob = Blob(header.dtype, header.shape, event.payload)
                target[key] = blob if scratch is None else scratch.put(blob)
        return State(weights, optimizer, codecs)

    def _send_blob(self, stage_index: int, kind: m.TensorKind, key: str, blob: Blob) -> None:
        header = m.TensorHeader(kind, self._planned.job, 0, -1, key, blob.dtype, tuple(blob.shape))
        self._link.send(stage_index, header, blob.data, m.Priority.STATE)

    # steps

    def train_steps(self, first: int, last: int) -> Iterator[StepMetrics | Note]:
        """Train steps ``first`` up to ``last``, their data sent ahead; ends early when a stop is wanted.

        After a step come the notes about it: links that use other codecs from the next step ordered on.
        """
        train = self._config.train
        running: list[_Step] = []
        next_step = first
        started = time.perf_counter()
        while True:
            while next_step < last and len(running) <= train.prefetch and not self._stop_wanted():
                batches = self._dataset.microbatches(
                    next_step, global_batch=train.global_batch, microbatch_size=train.microbatch_size
                )
                running.append(self._order(next_step, batches, train=True, coded=next_step < self._first_dense))
                next_step += 1
            if not running:
                return
            step = running.pop(0)
            self._complete(step, running)
            assert step.commit is not None
            now = time.perf_counter()
            link_bytes = dict(step.commit.link_bytes)
            link_bytes |= {f"{self._link.name}->{peer}": n for peer, n in self._link.sent_bytes().items()}
            yield StepMetrics(
                step=step.order.step + 1,
                loss=step.loss,
                lr=learning_rate(self._config.optimizer, step.order.step, train.steps),
                grad_norm=step.commit.total_norm,
                tokens=step.num_tokens,
                seconds=now - started,
                tokens_per_s=step.num_tokens / max(now - started, 1e-9),
                link_bytes={k: n - self._link_bytes.get(k, 0) for k, n in link_bytes.items()},
                link_errors=step.commit.link_errors,
            )
            started, self._link_bytes = now, link_bytes
            self.peak_bytes |= step.commit.peak_bytes
            yield from self._recode(step, next_step)

    def _recode(self, step: _Step, next_step: int) -> Iterator[Note]:
        """Take over what the broker wants of links; tell of it unless they travel dense by now."""
        assert step.commit is not None
        dense = m.LinkCodecs(*(str(IDENTITY),) * 2)
        for change in step.commit.recoded:
            old, new = self._codecs.pop(change.link, dense), change.codecs
            if new != dense:
                self._codecs[change.link] = new
            if change.why and next_step < self._first_dense:
                text = (
                    f"{change.link}: {old.forward}, back {old.backward} becomes {new.forward}, back {new.backward} "
                    f"from step {next_step + 1} on: {change.why}"
                )
                yield Note(step=step.order.step + 1, kind="codecs", text=text)

    def travel_dense(self, step: int) -> bool:
        """Order steps from here on without codecs; False where they are already."""
        changes = step < self._first_dense
        self._first_dense = min(self._first_dense, step)
        return changes

    def evaluate(self, step: int, tell: Callable[[str], None]) -> ValMetrics | None:
        """Mean loss and accuracy over the validation rows, nothing changed; None when there are none.

        Links send dense, so that it is the loss of the model by itself; where they have codecs, once more with those.

        Args:
            tell: how far it is, now and then.
        """
        started = time.perf_counter()
        batches = list(
            self._dataset.val_batches(self._config.train.microbatch_size, self._config.train.eval_batches or None)
        )
        if not batches:
            return None
        found = self._look(step, batches, tell, coded=False)
        if self._codecs:
            coded_loss = self._look(step, batches, tell, coded=True).loss
            found = msgspec.structs.replace(found, coded_loss=coded_loss)
        return msgspec.structs.replace(found, seconds=time.perf_counter() - started)

    def _look(
        self, step: int, batches: Sequence[dict[str, np.ndarray]], tell: Callable[[str], None], *, coded: bool
    ) -> ValMetrics:
        """Loss and accuracy over the rows of some batches."""
        told_s = time.perf_counter()
        loss = correct = counted = 0.0
        rows = tokens = 0
        width = self._config.num_microbatches
        for start in range(0, len(batches), width):
            one = self._order(step, list(batches[start : start + width]), train=False, coded=coded)
            self._complete(one, [])
            loss += one.loss * sum(one.order.rows)
            rows += sum(one.order.rows)
            tokens += one.num_tokens
            if one.counts:
                correct, counted = correct + one.counts[0], counted + one.counts[1]
            if time.perf_counter() > told_s + NEWS_S:
                told_s = time.perf_counter()
                tell(f"{start + width} of {len(batches)} batches" + " through the codecs" * coded)
        accuracy = correct / counted if counted else None
        return ValMetrics(step=step, loss=loss / rows, accuracy=accuracy, tokens=tokens)

    def _order(self, step: int, batches: list[dict[str, np.ndarray]], *, train: bool, coded: bool) -> _Step:
        rows = tuple(len(next(iter(batch.values()))) for batch in batches)
        order = m.StepOrder(seq=self._seq, step=step, rows=rows, train=train, tied=coded)
        self._seq += 1
        codecs: dict[int, dict[int, m.LinkCodecs]] = {k: {} for k in range(self._planned.plan.num_stages)}
        for link, used in self._codecs.items() if coded else ():
            a, b = self._ends(link)
            codecs[a][b] = codecs[b][a] = used
        for stage_index in range(self._planned.plan.num_stages):
            payload = m.encode_message(msgspec.structs.replace(order, codecs=codecs[stage_index]))
            header = m.TensorHeader("step", self._planned.job, order.seq, -1, "", "uint8", (len(payload),))
            self._link.send(stage_index, header, payload, m.Priority.ORDER)
        for microbatch_index, batch in enumerate(batches):
            for stage_index, wanted in enumerate(self._planned.inputs):
                for name in wanted:
                    self._feed(stage_index, order.seq, microbatch_index, name, batch)
        return _Step(order, batches, self._outputs[:1] if train else self._outputs)

    def _feed(
        self, stage_index: int, seq: int, microbatch_index: int, name: str, batch: Mapping[str, np.ndarray]
    ) -> None:
        if name not in batch:
            raise UserError(f"the model wants the input {name!r}; the data has {', '.join(sorted(batch))}")
        array = np.ascontiguousarray(batch[name])
        header = m.TensorHeader(
            "input", self._planned.job, seq, microbatch_index, name, str(array.dtype), tuple(array.shape)
        )
        self._link.send(stage_index, header, memoryview(array.data).cast("B"), m.Priority.INPUT)

    def _complete(self, step: _Step, later: Sequence[_Step]) -> None:
        by_seq = {s.order.seq: s for s in (step, *later)}
        while not step.complete:
            event = self._link.next_event(NO_NEWS_S, f"step {step.order.step}")
            seq = event.seq if isinstance(event, m.Commit) else event.header.seq
            target = by_seq.get(seq)
            if target is None:
                raise RemoteProtocolError(f"news of step order {seq}, which is not running")
            if isinstance(event, m.Commit):
                target.commit = event
            else:
                target.take(event.header.key, event.header.microbatch_index, _scalar(event))


def _scalar(event: Received) -> float:
    kinds: dict[str, Any] = {
        "float32": np.float32, "float64": np.float64, "float16": np.float16, "int64": np.int64
    }  # fmt: skip
    header = event.header
    if header.kind != "output" or header.shape != () or header.dtype not in (*kinds, "bfloat16"):
        raise FusionError(
            f"stage {event.stage_index} sent {header.kind} {header.dtype}{list(header.shape)}, not a number"
        )
    if header.dtype == "bfloat16":
        return float((np.frombuffer(event.payload, np.uint16).astype(np.uint32) << 16).view(np.float32)[0])
    return float(np.frombuffer(event.payload, kinds[header.dtype])[0])
