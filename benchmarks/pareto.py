"""Loss against true ratio, a figure of the convergence records: ``python -m benchmarks pareto --figure FILE.png``.

One point per method: mean over its seeds of validation loss minus the dense run of the same seed and size, through the
codecs (filled), and without them after a last tenth of dense steps, as a model is exported (hollow). Each method at its
best learning rate and, where its codecs were set anew, with those that served best; settings are never mixed. The
paper's operator and rule are marked apart; the line is the front: no method has less loss at as high a ratio.
Trains nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import figure_file
from benchmarks.convergence import RECORDS, _with_deltas

_OURS, _PAPER = "#1f5fa8", "#d1495b"
#: Beyond this a run has gone wrong, and how far says nothing: its point sits at the edge with an arrow.
_MOST_DELTA = 3.0
#: Below this the axis is linear, so that zero and gains over dense have a place.
_LINEAR_DELTA = 0.02


def run(argv: list[str]) -> dict[str, Any]:
    """Sum the records up and draw them. Returns ``points``, a list of one record per method, best ratio last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pareto", description=__doc__)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--steps", type=int, default=2500, help="of the runs to compare")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--figure", type=figure_file, help="picture to write")
    args = parser.parse_args(argv)
    records = [json.loads(line) for line in args.records.read_text(encoding="utf-8").splitlines()]
    runs = [r for r in _with_deltas(records) if (r["steps"], r["width"]) == (args.steps, args.width)]
    points = points_of(runs)
    if args.figure is not None:
        draw(points, args.figure, f"GPT, 4 stages, every cut compressed both ways, {args.steps} steps")
    return {"points": points, "front": [p["name"] for p in front(points)]}


def points_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One point per method but dense: means over its seeds at the learning rate and codecs that serve it best."""
    groups: dict[str, dict[tuple[float, str, str], list[dict[str, Any]]]] = {}
    for r in runs:
        if r["name"] != "dense" and not math.isnan(r["delta"]):
            groups.setdefault(r["name"], {}).setdefault((r["lr"], r["forward"], r["backward"]), []).append(r)
    points = []
    for name, by_rate in groups.items():
        (lr, _, _), rows = min(by_rate.items(), key=lambda item: mean(_capped(r["delta"]) for r in item[1]))
        deltas = [_capped(r["delta"]) for r in rows]
        annealed = [r["delta_annealed"] for r in rows if not math.isnan(r["delta_annealed"])]
        points.append(
            {
                "name": name, "lr": lr, "seeds": len({r["seed"] for r in rows}),
                "true_ratio": mean(r["true_ratio"] for r in rows),
                "delta": mean(deltas), "spread": stdev(deltas) if len(deltas) > 1 else 0.0,
                "delta_annealed": mean(annealed) if annealed else None,
                "diverged": any(r["diverged"] for r in rows), "from_paper": "paper" in name,
            }
        )  # fmt: skip
    return sorted(points, key=lambda p: (p["true_ratio"], p["name"]))


def _capped(delta: float) -> float:
    return min(delta, _MOST_DELTA) if math.isfinite(delta) else _MOST_DELTA


def front(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points that no other beats in both, by rising ratio."""
    kept: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (-p["true_ratio"], p["delta"])):
        if not kept or point["delta"] < kept[-1]["delta"]:
            kept.append(point)
    return kept[::-1]


def draw(points: Sequence[dict[str, Any]], png: Path, title: str) -> None:
    """Write the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    best = front(points)
    axes.plot([p["true_ratio"] for p in best], [p["delta"] for p in best], color=_OURS, alpha=0.35, linewidth=2)
    for p in points:
        color, marker = (_PAPER, "s") if p["from_paper"] else (_OURS, "o")
        away = p["diverged"] or p["delta"] >= _MOST_DELTA
        axes.errorbar(p["true_ratio"], p["delta"], yerr=p["spread"], color=color, marker="^" if away else marker)
        if p["delta_annealed"] is not None:
            axes.plot(p["true_ratio"], _capped(p["delta_annealed"]), color=color, marker=marker, fillstyle="none")
        axes.annotate(
            p["name"], (p["true_ratio"], p["delta"]), textcoords="offset points", xytext=(5, 6), fontsize=8
        )  # fmt: skip
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    ticks = [2**k for k in range(8)]
    axes.set_xticks(ticks, [f"{t}x" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.margins(0.08)
    axes.set_yscale("symlog", linthresh=_LINEAR_DELTA)
    axes.set_xlabel("true ratio: float32 bytes over bytes on the wire, both directions")
    axes.set_ylabel("validation loss minus dense, nats")
    axes.set_title(f"{title}\nfilled: through the codecs; hollow: without, after a dense last tenth", fontsize=10)
    axes.grid(alpha=0.25, which="both")
    figure.savefig(png)


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{'method':17} {'lr':>7} {'seeds':>5} {'true ratio':>10} {'minus dense':>11} {'spread':>7} {'annealed':>9}"
    ]
    for p in result["points"]:
        annealed = "" if p["delta_annealed"] is None else f"{p['delta_annealed']:+.4f}"
        lines.append(
            f"{p['name']:17} {p['lr']:7.0e} {p['seeds']:5} {p['true_ratio']:10.1f} {p['delta']:+11.4f} "
            f"{p['spread']:7.4f} {annealed:>9}"
            + ("  diverged" if p["diverged"] else "") + ("  front" if p["name"] in result["front"] else "")
        )  # fmt: skip
    return "\n".join(lines)
