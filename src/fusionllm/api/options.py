"""Keyword arguments of the Python call, put into the tables of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fusionllm.errors import UserError, near_hint


def tables_from_options(options: Mapping[str, Any], config: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """``{"steps": 20, "optimizer": {"lr": 1e-3}}`` -> ``{"train": {"steps": 20}, "optimizer": {"lr": 1e-3}}``.

    A name that the table ``run`` has is the run's, whoever else has it: ``name`` is the name of the run.

    Raises:
        UserError: a name that no table has, or that several have.
    """
    tables = {f.name: f.type for f in msgspec.structs.fields(config)}
    homes: dict[str, list[str]] = {}
    for table, struct in tables.items():
        for field in msgspec.structs.fields(struct):
            homes.setdefault(field.name, []).append(table)
    homes |= {field.name: ["run"] for field in msgspec.structs.fields(tables["run"])} if "run" in tables else {}
    out: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name in tables and isinstance(value, Mapping):
            out.setdefault(name, {}).update(value)
        elif name not in homes:
            raise UserError(f"unknown option {name} = {value!r}{near_hint(name, [*homes, *tables])}")
        elif len(homes[name]) > 1:
            choices = " or ".join(f"{table}={{{name!r}: ...}}" for table in homes[name])
            raise UserError(f"option {name} = {value!r} could mean several things; write {choices}")
        else:
            out.setdefault(homes[name][0], {})[name] = value
    return out
