"""A node's own ways to its weights: what it computes from a seed, or reads where its owner of the machine allows.

The owner of a job says what each tensor is (`protocol.messages.WeightOffer`): how it begins, or its hash and where else
it lies. This machine reads only from places it was told it may, and believes a byte when the hash fits. The rest it
asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from fusionllm.errors import CheckpointError, RemoteProtocolError
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.tensor import FLOATS
from fusionllm.protocol.messages import TensorOffer, WeightOffer
from fusionllm.store.initial import initial_values
from fusionllm.store.tensorfile import Blob
from fusionllm.store.weights import WeightFolder, tensor_hash

log = logging.getLogger(__name__)


def is_remote(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def allowed_places(offered: Sequence[str], own: Sequence[str]) -> list[str]:
    """Where to look: this machine's own folders, then of the places offered those it may read from.

    Args:
        own: folders, and addresses under which everything may be read.
    """
    prefixes = [place.rstrip("/") for place in own if is_remote(place)]
    may = [
        place
        for place in offered
        if is_remote(place)
        and ".." not in place
        and any(place == prefix or place.startswith(f"{prefix}/") for prefix in prefixes)
    ]
    return [*(place for place in own if not is_remote(place)), *may]


def find_weights(offer: WeightOffer, graph: OpGraph, own: Sequence[str]) -> Iterator[tuple[str, Blob]]:
    """The tensors of ``graph`` that can be had without the job's owner, one after the other.

    Raises:
        RemoteProtocolError: the offer is of tensors this stage does not hold. GraphError: of nonsense initial values.
    """
    places = [p for p in allowed_places(offer.places, own) if any(t.sha256 for t in offer.tensors)]
    folders: dict[str, WeightFolder | None] = {}
    for tensor in offer.tensors:
        held = graph.held.get(tensor.name)
        if held is None:
            raise RemoteProtocolError(f"an offer of {tensor.name[:80]!r}, which this stage does not hold")
        shape = held.spec.concrete({})
        if tensor.init is not None:
            first = initial_values(tensor.init, offer.seed, tensor.name, shape)
            yield tensor.name, first.as_dtype(held.spec.dtype)
            continue
        for place in places:
            blob = _read(folders, place, tensor, shape)
            if blob is not None:
                yield tensor.name, blob.as_dtype(held.spec.dtype)
                break


def _read(
    folders: dict[str, WeightFolder | None], place: str, tensor: TensorOffer, shape: tuple[int, ...]
) -> Blob | None:
    """A tensor from a place; None when it is not there, or is another one."""
    try:
        if place not in folders:
            folders[place] = None
            folders[place] = WeightFolder(place)
        folder = folders[place]
        if folder is None or tensor.source_name not in folder.names:
            return None
        dtype, found = folder.spec(tensor.source_name)
        if found != shape or dtype not in FLOATS:
            return None
        blob = folder.read(tensor.source_name)
    except CheckpointError as error:
        log.warning("%s: %s; asking the owner instead", tensor.source_name, error)
        return None
    if tensor_hash(blob) != tensor.sha256:
        log.warning("%s from %s is not what the owner has; asking the owner instead", tensor.source_name, place)
        return None
    return blob
