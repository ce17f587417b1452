"""What a person sees while a run goes on: one changing line on a terminal, plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fusionllm.ir.plan import Plan
from fusionllm.telemetry.events import Event, Note, StepMetrics, ValMetrics, encode_event
from fusionllm.units import format_bandwidth, format_count, format_duration, format_num_bytes


class JsonReporter:
    """Events as JSON lines on standard output, the summary last."""

    def __enter__(self) -> JsonReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __call__(self, event: Event | Plan) -> None:
        if isinstance(event, Plan):
            print(msgspec.json.encode({"type": "plan", **msgspec.to_builtins(event)}).decode(), flush=True)
        else:
            print(encode_event(event).decode(), flush=True)

    def finish(self, result: Any) -> None:
        summary = {**msgspec.to_builtins(result.summary), "run_dir": str(result.run_dir)}
        print(msgspec.json.encode({"type": "summary", **summary}).decode(), flush=True)


class LiveReporter:
    """A progress bar on a terminal; in a pipe one line for a step now and then.

    Args:
        num_steps: of the run. starting: what is said before there is anything else to say.
    """

    def __init__(self, num_steps: int, starting: str = "capturing the model") -> None:
        self._num_steps, self._starting = num_steps, starting
        self._console = Console(stderr=False, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal
        self._bar = Progress(
            BarColumn(bar_width=20), TextColumn("{task.description}"), console=self._console, transient=False
        )
        self._task = self._bar.add_task(starting, total=num_steps)
        self._started = time.perf_counter()
        self._first_step: int | None = None
        self._last_line_s = 0.0

    def __enter__(self) -> LiveReporter:
        if self._live:
            self._bar.start()
        else:
            self._print(self._starting)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def __call__(self, event: Event | Plan) -> None:
        if isinstance(event, StepMetrics):
            self._step(event)
        elif isinstance(event, ValMetrics):
            self._print(
                f"step {event.step}: validation loss {event.loss:.4f}, perplexity {event.perplexity:.1f}"
                + (f", accuracy {event.accuracy:.1%}" if event.accuracy is not None else "")
                + (f" (through the codecs {event.coded_loss:.4f})" if event.coded_loss is not None else "")
                + f" ({event.tokens} tokens, {format_duration(event.seconds)})"
            )
        elif isinstance(event, Plan):
            for stage in event.stages:
                self._print(
                    f"stage {stage.stage_index} on {stage.node}: {stage.num_ops} operators, "
                    f"{format_num_bytes(stage.param_bytes)} of parameters, {format_count(stage.flops)}FLOP a microbatch"
                )
        elif isinstance(event, Note):
            self._print(f"{event.kind}: {event.text}")

    def _step(self, event: StepMetrics) -> None:
        now = time.perf_counter()
        if self._first_step is None:
            self._first_step, self._started = event.step, now
        done = event.step - self._first_step
        left = ""
        if done:  # the first one loads and compiles, and says little of the next
            left = f"  left {format_duration((now - self._started) / done * (self._num_steps - event.step))}"
        busiest = max(event.link_bytes.items(), key=lambda item: item[1], default=("", 0))
        line = (
            f"step {event.step}/{self._num_steps}  loss {event.loss:.4f}  {format_count(event.tokens_per_s)} tokens/s  "
            f"{busiest[0]} {format_bandwidth(busiest[1] / max(event.seconds, 1e-9))}{left}"
        )
        if self._live:
            self._bar.update(self._task, completed=event.step, description=line)
        elif now - self._last_line_s > 5 or event.step in (1, self._num_steps):
            self._last_line_s = now
            self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)
        sys.stdout.flush()

    def finish(self, result: Any) -> None:
        """The end: numbers, a sample, where things lie, what to do next."""
        summary, run = result.summary, result.run_dir
        part = f" ({format_duration(summary.part_s)} since it was resumed)" * (summary.part_s < summary.wall_s)
        rows = [
            f"{summary.steps} steps in {format_duration(summary.wall_s)}{part}, {summary.tokens_per_s:.0f} tokens/s"
        ]
        if summary.last_train_loss is not None:
            rows.append(f"train loss {summary.first_train_loss:.4f} -> {summary.last_train_loss:.4f}")
        if summary.val_loss is not None:
            rows.append(f"validation loss {summary.val_loss:.4f}")
        if summary.link_bytes:
            busiest = sorted(summary.link_bytes.items(), key=lambda item: -item[1])[:6]
            rows.append("bytes per link: " + ", ".join(f"{k} {format_num_bytes(n)}" for k, n in busiest))
        if summary.link_errors:
            worst = sorted(summary.link_errors.items(), key=lambda item: -item[1])[:6]
            rows.append("squared error by codec: " + ", ".join(f"{k} {error:.2g}" for k, error in worst))
        for row in ["", *rows]:
            self._print(row)
        if sample := summary.extra.get("sample"):
            self._print(f"\nthe model writes:\n{sample}\n")
        self._print(f"results:    {run}")
        if (run / "loss.png").exists():
            self._print(f"loss curve: {run / 'loss.png'}")
        if result.stopped_early:
            resume = f"{program()} train {run / 'config.toml'} --resume --name {run.name}"
            self._print(f"stopped early; go on with: {resume}")
        elif hasattr(result.model, "save_pretrained"):
            self._print(f"next:       {program()} export {run} my-model   (a Hugging Face folder)")
        else:
            self._print(f"weights:    {run / 'checkpoints'}   (safetensors, by the model's own names)")


def program() -> str:
    """How this program is called here: by its name where that is on the path, else as it was."""
    if shutil.which("fusionllm"):
        return "fusionllm"
    return "python -m fusionllm" if sys.argv[0].endswith(".py") else sys.argv[0]
