"""The weights of a model that the owner never holds: each is read, or computed, when a stage wants it, and forgotten.

A model with ``model.lazy`` is captured without weights. Its parameters begin in a folder of safetensors, or as the
model's constructor says, from (seed, name).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from fusionllm.api.weights import to_blobs
from fusionllm.capture.export import Captured
from fusionllm.errors import UserError
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.init import Init
from fusionllm.protocol.messages import TensorOffer, WeightOffer
from fusionllm.store.initial import initial_values
from fusionllm.store.tensorfile import Blob
from fusionllm.store.weights import WeightFolder, tensor_hash


class LazyWeights(Mapping[str, Blob]):
    """All tensors of a graph by name; one is in memory while it is looked at.

    Args:
        inits: how parameters begin that lie in no folder.
        places: where else the folder's tensors lie, for nodes that may read there.

    Raises:
        UserError: a parameter that nothing is known of, or of another shape in the folder.
    """

    def __init__(
        self, captured: Captured, folder: WeightFolder | None, inits: Mapping[str, Init],
        values: Mapping[str, torch.Tensor], seed: int, places: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._graph = captured.graph
        self._seed, self._places = seed, places
        self._ready = {n: t for n, t in captured.tensors.items() if not t.is_meta} | dict(values)
        self._inits, self._folder = inits, folder
        self._sources = _match(captured.graph, folder, self._ready) if folder is not None else {}
        lost = [n for n in self._graph.held if not self._known(n)]
        if lost:
            raise UserError(f"nothing says how {lost[0]!r} begins ({len(lost)} such); set model.lazy = false")

    def _known(self, name: str) -> bool:
        return name in self._ready or name in self._sources or name in self._inits

    def __iter__(self) -> Iterator[str]:
        return iter(self._graph.held)

    def __len__(self) -> int:
        return len(self._graph.held)

    def __getitem__(self, name: str) -> Blob:
        held = self._graph.held[name]
        if name in self._sources:
            assert self._folder is not None
            return self._folder.read(self._sources[name]).as_dtype(held.spec.dtype)
        if name in self._ready:
            return to_blobs({name: self._ready[name]})[name]
        first = initial_values(self._inits[name], self._seed, name, held.spec.concrete({}))
        return first.as_dtype(held.spec.dtype)

    def offer(self, names: Iterable[str]) -> WeightOffer:
        """What a node may get without us, of these. Reads the folder's tensors once, for their hashes."""
        tensors = []
        for name in names:
            if name in self._sources:
                assert self._folder is not None
                digest = tensor_hash(self._folder.read(self._sources[name]))
                tensors.append(TensorOffer(name, self._sources[name], digest))
            elif name not in self._ready:
                tensors.append(TensorOffer(name, "", "", self._inits[name]))
        return WeightOffer(places=self._places, seed=self._seed, tensors=tuple(tensors))


def _match(graph: OpGraph, folder: WeightFolder, ready: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Parameter or buffer -> its name in the folder, which may be an alias or lack the model's first prefix."""
    there = set(folder.names)
    found: dict[str, str] = {}
    for name, held in graph.held.items():
        names = [name, *getattr(held, "aliases", ())]
        for candidate in (*names, *(n.partition(".")[2] for n in names)):
            if candidate in there:
                shape = folder.spec(candidate)[1]
                if shape != held.spec.concrete({}):
                    raise UserError(
                        f"{folder.place}: {candidate!r} has shape {list(shape)}, the model wants {held.spec}"
                    )
                found[name] = candidate
                break
        else:
            if name in graph.params and name not in ready:
                raise UserError(f"{folder.place} has no tensor {name!r} of this model; set model.lazy = false")
    return found
