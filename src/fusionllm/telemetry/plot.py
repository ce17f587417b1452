"""The loss curve of a run as a PNG: every step faint, a smoothed line over it, the validations as points.

Uses matplotlib's objects directly, not pyplot, so it touches no global state, no screen and no other figure
of the process. On the path, aside: events -> **loss.png**.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fusionllm.errors import UserError
from fusionllm.telemetry.events import Event, StepMetrics, ValMetrics
from fusionllm.telemetry.sinks import read_events

_TRAIN, _VALIDATION = "#1f5fa8", "#d1495b"
_SIZE_INCHES = (8.0, 4.5)
_DPI = 120
#: The smoothed line is an exponential mean over about this share of the run.
_SMOOTHING_SHARE = 1 / 40


def plot_loss(events: Path | Iterable[Event], png: Path, title: str) -> None:
    """Draw the loss curve.

    Args:
        events: a metrics.jsonl, or the events themselves.
        png: file to write.
        title: above the plot; shown as it is, ``$`` has no meaning.

    Raises:
        UserError: matplotlib is not installed, or a file cannot be read or written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "the loss curve needs the 'matplotlib' package; install it with: pip install 'fusionllm[train]'"
        ) from None
    found = read_events(events) if isinstance(events, Path) else list(events)
    steps = [event for event in found if isinstance(event, StepMetrics) and math.isfinite(event.loss)]
    validations = [event for event in found if isinstance(event, ValMetrics) and math.isfinite(event.loss)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph the font lacks is no concern of the run's
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.add_subplot(), steps, validations, title)
        try:
            figure.savefig(png)
        except OSError as error:
            raise UserError(f"cannot write {png}: {error.strerror or error}") from error


def _draw(axes: Any, steps: Sequence[StepMetrics], validations: Sequence[ValMetrics], title: str) -> None:
    if steps:
        numbers, losses = [event.step for event in steps], [event.loss for event in steps]
        axes.plot(numbers, losses, color=_TRAIN, alpha=0.3, linewidth=1.0, label="training, each step")
        axes.plot(numbers, smooth(losses), color=_TRAIN, linewidth=2.0, label="training, smoothed")
    if validations:
        axes.plot(
            [event.step for event in validations],
            [event.loss for event in validations],
            color=_VALIDATION,
            marker="o",
            markersize=5,
            linewidth=1.2,
            linestyle="--",
            label="validation",
        )
        last = validations[-1]
        axes.annotate(
            f"{last.loss:.3f}",
            (last.step, last.loss),
            textcoords="offset points",
            xytext=(0, 8),
            ha="right",
            color=_VALIDATION,
        )
    axes.set_title(title, loc="left", parse_math=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if steps or validations:
        axes.legend(frameon=False)


def smooth(losses: Sequence[float]) -> list[float]:
    """Exponential mean over a share of the run; without bias: the first value is the first loss."""
    keep = 1 - 1 / max(1.0, len(losses) * _SMOOTHING_SHARE)
    smoothed, mean, weight = [], 0.0, 0.0
    for loss in losses:
        mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
        smoothed.append(mean / weight)
    return smoothed
