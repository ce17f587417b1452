"""Run benchmarks: ``python -m benchmarks NAME [options] --json``.

Each compares side by side in one run and reports medians. A table for people comes first; with ``--json`` the last line
is one JSON object with the keys that the results table of the README names.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from fusionllm.errors import near_hint

#: name -> module with ``run(argv) -> dict`` and ``table(result) -> str``.
BENCHMARKS = {
    "equality": "benchmarks.equality",
    "overhead": "benchmarks.overhead",
    "pipeline": "benchmarks.pipeline",
    "session": "benchmarks.session",
    "startup": "benchmarks.startup",
    "codecs": "benchmarks.codecs",
    "planner": "benchmarks.planner",
    "paper": "benchmarks.paper",
    "convergence": "benchmarks.convergence",
    "pareto": "benchmarks.pareto",
    "capture": "benchmarks.capture",
    "bigmodel": "benchmarks.bigmodel",
    "vision": "benchmarks.vision",
    "finetune": "benchmarks.finetune",
    "endings": "benchmarks.endings",
    "wan": "benchmarks.wan",
    "wan-goodput": "benchmarks.wan_goodput",
    "wan-report": "benchmarks.wan_report",
    "wan-record": "benchmarks.wan_recorded",
    "mixed": "benchmarks.mixed",
    "backend-speed": "benchmarks.backend_speed",
}


def main(argv: list[str]) -> int:
    as_json = "--json" in argv
    rest = [word for word in argv if word != "--json"]
    if not rest or rest[0] in ("-h", "--help") or rest[0] not in (*BENCHMARKS, "all"):
        print(__doc__)
        near = near_hint(rest[0], BENCHMARKS) if rest and not rest[0].startswith("-") else ""
        print(f"NAME is one of: {', '.join(BENCHMARKS)}, or all{near}")
        return 0 if rest and rest[0] in ("-h", "--help") else 2
    names = list(BENCHMARKS) if rest[0] == "all" else [rest[0]]
    results = {}
    for name in names:
        module = import_module(BENCHMARKS[name])
        results[name] = module.run(rest[1:])
        print(module.table(results[name]), flush=True)
    if as_json:
        print(json.dumps(results[names[0]] if len(names) == 1 else results))
    return 1 if any(all_failed(result.get("runs")) for result in results.values()) else 0


def all_failed(runs: Any) -> bool:
    """Whether a benchmark of several methods has a result of none."""
    return bool(runs) and isinstance(runs, list) and all(isinstance(run, dict) and "failed" in run for run in runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
