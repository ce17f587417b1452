"""Operators of a machine's own: the modules that register them with its framework are imported when it joins.

Whose machine it is names them; nothing that comes from outside does.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from fusionllm.errors import UserError


def import_operators(modules: Iterable[str]) -> None:
    """Import modules that register operators. Raises UserError for one that cannot be."""
    for name in modules:
        try:
            import_module(name)
        except Exception as error:
            raise UserError(f"cannot import {name!r} for its operators: {type(error).__name__}: {error}") from error
