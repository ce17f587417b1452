"""The whole scoreboard from a file of rows (`wan --records`): every scenario and method, how good predictions were,
where one host or one site alone wins, and what failed.

    python -m benchmarks wan-report FILE --json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.wan import SETTINGS, medians, read_records

#: What ours is measured against where it is there, and what is no pipeline over the network.
BASELINE, ALONE = "torch-bf16", ("one-host", "one-site")


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks wan-report", description=__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args(argv).file
    if not file.is_file():
        raise SystemExit(f"no such file: {file}")
    return report(read_records(file, {}))


def report(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows by settings, each a median of its rounds, with its speedup over torch's and its prediction's error.

    Errors are summed up over all rows and by what computes: ``emulated``, or the precision of real compute.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(repr([record.get(key) for key in SETTINGS]), []).append(record)
    boards: list[dict[str, Any]] = []
    errors: dict[str, list[float]] = {}
    for group in groups.values():
        rows = medians(group)
        base = next((row["step_s"] for row in rows if row["method"] == BASELINE and "failed" not in row), None)
        for row in rows:
            if "failed" in row:
                continue
            row["speedup"] = base / row["step_s"] if base else None
            if row.get("predicted_step_s"):
                row["prediction_error"] = abs(row["predicted_step_s"] / row["step_s"] - 1)
                errors.setdefault(group[0].get("precision") or "emulated", []).append(row["prediction_error"])
        boards.append({key: group[0].get(key) for key in SETTINGS} | {"runs": rows, "alone_wins": alone_wins(rows)})
    return {
        "boards": boards,
        "predictions": _summary([error for some in errors.values() for error in some]),
        "predictions_by_compute": {name: _summary(errors[name]) for name in sorted(errors)},
    }


def _summary(errors: list[float]) -> dict[str, Any]:
    return {"pairs": len(errors)} | ({"median": median(errors), "worst": max(errors)} if errors else {})


def alone_wins(rows: list[dict[str, Any]]) -> str:
    """The method that needs no slow link and is the fastest of all; empty for none."""
    good = sorted((row for row in rows if "failed" not in row), key=lambda row: row["step_s"])
    return good[0]["method"] if good and good[0]["method"] in ALONE else ""


def table(result: dict[str, Any]) -> str:
    lines = []
    for board in result["boards"]:
        given = [f"{key} {board[key]}" for key in SETTINGS[1:] if board[key] not in (None, "", 0)]
        lines.append(f"{board['scenario']} ({', '.join(given)})")
        lines += [_line(row) for row in board["runs"]]
        if board["alone_wins"]:
            lines.append(f"  {board['alone_wins']} is the fastest here: no other device is worth its links")
    lines.append(f"predicted against measured step time: {_errors(result['predictions'])}")
    lines += [f"  compute {name}: {_errors(found)}" for name, found in result["predictions_by_compute"].items()]
    return "\n".join(lines)


def _errors(found: dict[str, Any]) -> str:
    worst = f", median error {found['median']:.1%}, worst {found['worst']:.1%}" if found["pairs"] else ""
    return f"{found['pairs']} pairs{worst}"


def _line(row: dict[str, Any]) -> str:
    name = f"  {row['method']:14}"
    if "failed" in row:
        return f"{name} failed: {row['failed']}"
    parts = [f"{row['tokens_per_s']:9.0f} tokens/s {row['step_s']:8.2f} s, {len(row['rounds_step_s'])} rounds"]
    if row.get("stretch", 1) != 1:
        parts.append(f"stretch {row['stretch']:g}")
    if row["speedup"]:
        parts.append(f"{row['speedup']:.2f} times {BASELINE}")
    if row.get("limit_step_s"):
        parts.append(f"{row['step_s'] / row['limit_step_s']:.2f} of its limit ({row['bottleneck']})")
    if row.get("prediction_error") is not None:
        parts.append(f"predicted {row['predicted_step_s']:.2f} s, off by {row['prediction_error']:.0%}")
    if row.get("val_loss") is not None:
        parts.append(f"validation loss {row['val_loss']:.4f}")
    if row.get("seconds_to_target"):
        parts.append(f"{row['seconds_to_target']:.0f} s to {row['target_loss']:g}")
    return name + "; ".join(parts)
