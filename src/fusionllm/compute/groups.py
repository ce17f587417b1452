"""Which parameters are norms, biases, embeddings or the output layer: read off the whole graph, by the owner.

A stage sees only its own part (a tied embedding looks like an output layer from the last stage), so the owner writes
what it found into the optimizer's groups by name, and any partition makes the same updates. Pure: no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fusionllm.compute.options import OptimConfig, ParamGroup
from fusionllm.errors import UserError
from fusionllm.ir.graph import OpGraph

_NORMS = ("layer_norm", "group_norm", "native_group_norm", "rms_norm")
_PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm")
_DECOUPLED = ("adamw", "muon")


def parameter_kinds(graph: OpGraph) -> dict[str, str]:
    """Kind of every parameter: ``norms``, ``biases``, ``embeddings``, ``head`` (of the last product), ``weights``."""
    names = {param.id: name for name, param in graph.params.items()}
    kinds: dict[str, str] = {}
    head = None
    for op in graph.ops:
        base = op.name.split(".")[1] if op.name.count(".") else op.name
        for key, arg in op.args.items():
            name = names.get(arg.get("r", "")) if isinstance(arg, dict) else None
            if name is None:
                continue
            if base == "embedding" and key == "weight":
                kinds[name] = "embeddings"
            elif base in _NORMS or "batch_norm" in base or (base == "mul" and len(graph.params[name].spec.shape) <= 1):
                kinds.setdefault(name, "norms")
            elif (base in _PRODUCTS and len(graph.params[name].spec.shape) == 2) or base == "t":
                head = name
    if head is not None:
        kinds.setdefault(head, "head")
    for name, param in graph.params.items():
        kinds.setdefault(name, "biases" if len(param.spec.shape) <= 1 else "weights")
    return kinds


def resolve_groups(config: OptimConfig, graph: OpGraph) -> OptimConfig:
    """The same optimizer with every group written out by the names of ``graph``, the whole model's.

    Raises:
        UserError: a group that matches no parameter.
    """
    kinds = parameter_kinds(graph)
    for group in config.groups:
        if not any(group.has(name) for name in graph.params):
            raise UserError(
                f"optimizer.groups {list(group.match)} matches no parameter; e.g. {next(iter(kinds), '')!r}"
            )
    kept: Sequence[str] = ("norms", "biases", "embeddings") if config.name in _DECOUPLED else ()
    if config.no_decay is not None:
        kept = config.no_decay
    made: dict[bytes, list[str]] = {}
    for name, kind in kinds.items():
        group = next((g for g in config.groups if g.has(name)), ParamGroup(match=()))
        if kind in kept and group.weight_decay is None:
            group = msgspec.structs.replace(group, weight_decay=0.0)
        if kind in ("embeddings", "head") and config.name == "muon" and not group.name:
            group = msgspec.structs.replace(group, name="adamw", options={})
        key = msgspec.json.encode(msgspec.structs.replace(group, match=()), order="deterministic")
        made.setdefault(key, []).append(name)
    groups = (
        msgspec.structs.replace(msgspec.json.decode(key, type=ParamGroup), match=tuple(names))
        for key, names in made.items()
    )
    return msgspec.structs.replace(config, groups=tuple(groups), no_decay=())
