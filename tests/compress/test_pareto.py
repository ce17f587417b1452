"""The figure of loss against ratio says what the records say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.pareto import draw, front, points_of, table


def record(name: str, ratio: float, delta: float, lr: float = 1e-3, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "lr": lr, "true_ratio": ratio, "delta": delta, "delta_annealed": math.nan, "diverged": False,
        "seed": 0, "forward": "identity", "backward": "identity", **more,
    }  # fmt: skip


def test_a_method_is_its_mean_over_seeds_at_its_best_learning_rate(tmp_path: Path) -> None:
    runs = [
        record("dense", 1, 0.0), record("a", 8, 0.01, delta_annealed=-0.01), record("a", 8, 0.03, seed=1),
        record("a", 8, 0.5, lr=3e-3), record("a", 8, 0.4, forward="int8"), record("b", 30, 0.04), record("c", 20, 0.9),
        record("topk-paper-10", 3.3, math.inf, diverged=True),
    ]  # fmt: skip
    points = points_of(runs)
    assert [p["name"] for p in points] == ["topk-paper-10", "a", "c", "b"]
    paper, a, _, _ = points
    assert (a["seeds"], a["lr"], round(a["delta"], 9), a["delta_annealed"]) == (2, 1e-3, 0.02, -0.01)
    assert paper["from_paper"] and paper["diverged"] and paper["delta"] == 3.0
    assert [p["name"] for p in front(points)] == ["a", "b"]
    draw(points, tmp_path / "p.png", "a title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "front" in table({"points": points, "front": ["a", "b"]})
