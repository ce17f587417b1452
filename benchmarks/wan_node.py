"""`fusionllm join ...` that meters what its stages compute: ``python -m benchmarks.wan_node FILE join ...``."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.wan_meter import BACKWARD, FORWARD, Meter
from fusionllm.compute import BACKENDS
from fusionllm.compute.torch_backend import TorchBackend


class MeteredProgram:
    """A stage's program whose training is metered."""

    meter = Meter()

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._train = self.meter.around(FORWARD, inner.forward)
        self.backward = self.meter.around(BACKWARD, inner.backward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # all but computing is the inner one's

    def forward(self, *args: Any, **options: Any) -> Any:
        forward = self._train if options.get("keep") else self._inner.forward
        return forward(*args, **options)


class MeteredBackend(TorchBackend):
    """Torch with metered programs."""

    def program(self, *args: Any, **options: Any) -> Any:
        return MeteredProgram(super().program(*args, **options))


def run_node(words: list[str]) -> None:
    """``words``: the meter's file, then those of `fusionllm`."""
    from fusionllm.cli.main import main

    MeteredProgram.meter = Meter(words[0])
    BACKENDS["torch"] = "benchmarks.wan_node:MeteredBackend"
    main(words[1:])


if __name__ == "__main__":
    import benchmarks.wan_node as module  # the worker loads the class from there, not from __main__

    module.run_node(sys.argv[1:])
