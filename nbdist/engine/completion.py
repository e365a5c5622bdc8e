"""Completion of names that live on a rank, without running any of the user's code."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["complete"]

DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\.)?([A-Za-z_]\w*)?$")
MOST = 500


def complete(namespace: Mapping[str, Any], code: str, cursor: int) -> dict[str, Any]:
    """Give the names or attributes that continue ``code`` at ``cursor``.

    Returns
    -------
    dict
        ``matches``: the continuations of the last name; ``start``: where in ``code`` that name begins.
    """
    found = DOTTED.search(code[:cursor])
    assert found is not None  # the pattern matches the empty string
    path, prefix = found.group(1) or "", found.group(2) or ""
    if path:
        names = _attributes(namespace, path.rstrip(".").split("."))
    elif prefix:
        names = [name for name in namespace if not name.startswith("_")]
    else:
        names = []
    matches = sorted(name for name in names if name.startswith(prefix) and (prefix or not name.startswith("_")))
    return {"matches": matches[:MOST], "start": cursor - len(prefix)}


def _attributes(namespace: Mapping[str, Any], path: list[str]) -> list[str]:
    if path[0] not in namespace:
        return []
    value = namespace[path[0]]
    for name in path[1:]:
        # a property is not run for a completion: it may compute, wait, or join a collective
        value = getattr(value, name, None) if isinstance(value, types.ModuleType) else _plain(value, name)
        if value is None:
            return []
    return [name for name in dir(value) if name.isidentifier()]


def _plain(value: Any, name: str) -> Any:
    for registry in ("_modules", "_parameters", "_buffers"):  # where torch modules keep their members
        members = getattr(value, "__dict__", {}).get(registry) or {}
        if name in members:
            return members[name]
    found = inspect.getattr_static(value, name, None)
    return None if isinstance(found, property) else found
