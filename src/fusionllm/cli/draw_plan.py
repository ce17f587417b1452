"""The picture of `fusionllm plan --svg`: the step as a stage-by-time grid, and the cluster with the plan's path.

Uses matplotlib's objects, not pyplot, so it needs no screen. Nodes are drawn by fence on a circle; filled ones have a
stage, an arrow leads from each stage to the next, and lines between fences are as wide as the logarithm of their rate.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

from fusionllm.errors import UserError
from fusionllm.schedule.placement import Cluster, find_fences
from fusionllm.schedule.timeline import Timeline
from fusionllm.sim.study import Best, Study
from fusionllm.units import format_bandwidth, format_duration

_COLOURS = {"F": "#1f5fa8", "B": "#d1495b", "W": "#edae49", "UPDATE": "#3d3d3d"}
_WORDS = {"F": "forward", "B": "backward", "W": "gradients of weights", "UPDATE": "update, with tied gradients"}
#: Nodes of a fence that are drawn; of more, those with a stage and as many others.
_MAX_DOTS = 24


def draw_plan(file: Path, cluster: Cluster, best: Best, found: Study) -> None:
    """Draw into an SVG file. Raises UserError: no matplotlib, or the file cannot be written."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "the picture of a plan needs the 'matplotlib' package; install it with: pip install 'fusionllm[train]'"
        ) from None
    rows = len(best.line.spans)
    height = max(2.0, min(0.3 * rows, 12.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph the font lacks is no concern of the plan's
        figure = Figure(figsize=(11.0, height + 6.5), layout="constrained")
        FigureCanvasSVG(figure)
        above, below = figure.subplots(2, 1, height_ratios=[height, 6.0])
        _draw_step(above, best.line, [found.stages[k].node for k in range(rows)], found)
        _draw_cluster(below, cluster, best, found)
        try:
            figure.savefig(file, format="svg")
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror or error}") from error


def _draw_step(axes: Any, line: Timeline, names: list[str], found: Study) -> None:
    for row, spans in enumerate(line.spans):
        for kind, colour in _COLOURS.items():
            bars = [(s.start_s, s.end_s - s.start_s) for s in spans if s.action.kind == kind and s.end_s > s.start_s]
            if bars:
                axes.broken_barh(
                    bars, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.2,
                    label=_WORDS[kind],
                )  # fmt: skip
    axes.set_yticks(range(len(names)), [_plain(f"{k} {name}") for k, name in enumerate(names)], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, line.step_s)
    axes.set_xlabel("seconds")
    title = (
        f"{format_duration(line.step_s)} a step, predicted; bubble {line.bubble:.0%}; bottleneck: {found.bottleneck}"
    )
    axes.set_title(_plain(title), fontsize=9)
    labels = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(labels.values(), labels.keys(), fontsize=7, loc="upper right")


def _draw_cluster(axes: Any, cluster: Cluster, best: Best, found: Study) -> None:
    fences = find_fences(cluster)
    used = set(best.placement.nodes)
    centre = [_on_circle(k, len(fences), 3.0 if len(fences) > 1 else 0.0) for k in range(len(fences))]
    at: dict[int, tuple[float, float]] = {}
    spread = min(1.0, 2.2 * math.pi / max(len(fences), 1) / 1.6)
    for fence, (x, y), name in zip(fences, centre, found.fences):
        shown = [i for i in fence if i in used]
        shown += [i for i in fence if i not in used][: max(_MAX_DOTS - len(shown), 0)]
        for k, node in enumerate(sorted(shown)):
            dx, dy = _on_circle(k, len(shown), 0.55 * spread if len(shown) > 1 else 0.0)
            at[node] = x + dx, y + dy
        axes.text(x, y + 0.85 * spread, _plain(f"{name} ({len(fence)})"), ha="center", fontsize=8)
    _draw_links(axes, cluster, fences, centre)
    for group, style in (
        (used, {"color": _COLOURS["F"]}),
        (set(at) - used, {"facecolor": "white", "edgecolor": "grey"}),
    ):
        points = [at[i] for i in group]
        if points:
            axes.scatter([x for x, _ in points], [y for _, y in points], s=45, zorder=3, **style)
    for a, b in zip(best.placement.nodes, best.placement.nodes[1:]):
        arrow = {"arrowstyle": "-|>", "color": _COLOURS["B"], "shrinkA": 4, "shrinkB": 4}
        axes.annotate("", at[b], at[a], arrowprops=arrow, zorder=4)
    for k, node in enumerate(dict.fromkeys(best.placement.nodes)):
        axes.text(*at[node], str(k), ha="center", va="center", fontsize=6, color="white", zorder=5)
    axes.set_title("filled: nodes with a stage; arrows: the path; lines: rate between fences", fontsize=9)
    axes.set_aspect("equal")
    axes.margins(0.08)
    axes.axis("off")


def _draw_links(axes: Any, cluster: Cluster, fences: list[list[int]], centre: list[tuple[float, float]]) -> None:
    for a in range(len(fences)):
        for b in range(a):
            rate = cluster.bandwidth_bytes_per_s[fences[a][0]][fences[b][0]]
            if rate <= 0:
                continue
            (x, y), (u, v) = centre[a], centre[b]
            axes.plot([x, u], [y, v], color="lightgrey", linewidth=max(0.3, math.log10(rate / 1e5)), zorder=1)
            if len(fences) <= 8:
                words = format_bandwidth(rate)
                axes.text(x + (u - x) * 0.4, y + (v - y) * 0.4, words, fontsize=6, color="grey", ha="center", zorder=2)


def _on_circle(index: int, count: int, radius: float) -> tuple[float, float]:
    angle = math.pi / 2 - 2 * math.pi * index / max(count, 1)
    return radius * math.cos(angle), radius * math.sin(angle)


def _plain(text: str) -> str:
    """``$`` has no meaning in a name."""
    return text.replace("$", r"\$")
