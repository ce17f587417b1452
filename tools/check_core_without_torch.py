"""Check that what plans, brokers and simulates imports with no tensor framework. Exit code 1 names what does not.

Each module is imported by a fresh interpreter in which the frameworks cannot be found, as on a machine that installed
the core package alone.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

BLOCKED = ("torch", "transformers", "jax", "safetensors")
ROOMS = ("estimate", "schedule", "protocol", "transport", "store", "telemetry", "broker", "sim")
MODULES = ("fusionllm", "fusionllm.ir", *(f"fusionllm.{room}" for room in ROOMS), "fusionllm.cli.main")

_CHILD = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
        return None

sys.meta_path.insert(0, Blocker())
module = importlib.import_module({name!r})
if {name!r} != "fusionllm":
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), {name!r} + "."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
"""


def main() -> int:
    """Try every room with all its modules; print one line per failure."""
    failed = []
    for name in MODULES:
        if name.endswith(".main") and importlib.util.find_spec(name) is None:
            failed.append(f"{name}: not found")
            continue
        child = [sys.executable, "-c", _CHILD.format(blocked=BLOCKED, name=name)]
        result = subprocess.run(child, capture_output=True, text=True, timeout=120, check=False)
        if result.returncode:
            failed.append(f"{name}: {(result.stderr.strip().splitlines() or ['?'])[-1]}")
    for line in failed:
        print(line, file=sys.stderr)
    if not failed:
        print(f"{len(MODULES)} rooms import without {', '.join(BLOCKED)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
