"""The wide-area scoreboard as a picture: tokens per second of each method, and how many its own limit would allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a picture of a result; its kind is the file's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result["runs"] if "failed" not in row]
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        ours = row["method"].startswith("ours")
        axes.barh(place, row["tokens_per_s"], color="tab:blue" if ours else "tab:gray")
        axes.text(row["tokens_per_s"], place, f" {row['tokens_per_s']:.0f}", va="center", fontsize=8)
        if row.get("limit_step_s"):
            most = row["tokens_per_s"] * row["step_s"] / row["limit_step_s"]
            axes.plot([most, most], [place - 0.4, place + 0.4], color="black", lw=1)
    axes.set_yticks(range(len(rows)), [row["method"] for row in reversed(rows)])
    axes.set_xlabel("tokens/s (line: what devices and links allow for the bytes and work of that method)")
    emulated = ", compute emulated" * bool(result.get("emulated_compute"))
    axes.set_title(f"{result['scenario']} {result['bandwidth']}".strip() + emulated)
    figure.savefig(path)
