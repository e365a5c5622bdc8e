"""Completion of names that live on a rank, without running any of the user's code."""

from __future__ import annotations

import contextlib
import inspect
import re
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["complete", "describe"]

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


def describe(namespace: Mapping[str, Any], code: str, cursor: int) -> dict[str, Any]:
    """Describe the name under the cursor: type, shape, signature, documentation. Nothing of the user's code is run.

    Returns
    -------
    dict
        ``text``: the description; empty where there is no such name.
    """
    end = cursor
    while end < len(code) and (code[end].isalnum() or code[end] == "_"):
        end += 1
    found = DOTTED.search(code[:end])
    path = found.group(0).split(".") if found is not None and found.group(0) else []
    value = _resolve(namespace, path)
    if value is None:
        return {"text": ""}
    lines = [f"Type:      {type(value).__name__}"]
    for name in ("shape", "dtype", "device"):
        member = getattr(value, name, None) if type(value).__module__.split(".")[0] in ("torch", "numpy") else None
        if member is not None and not callable(member):
            lines.append(f"{name.capitalize() + ':':<11}{member}")
    if callable(value):
        with contextlib.suppress(TypeError, ValueError):  # a builtin may have none
            lines.append(f"Signature: {path[-1]}{inspect.signature(value)}")
    documentation = inspect.getdoc(value if callable(value) else type(value))
    if documentation:
        lines.append(f"Docstring:\n{documentation}")
    return {"text": "\n".join(lines)}


def _attributes(namespace: Mapping[str, Any], path: list[str]) -> list[str]:
    value = _resolve(namespace, path)
    return [] if value is None else [name for name in dir(value) if name.isidentifier()]


def _resolve(namespace: Mapping[str, Any], path: list[str]) -> Any:
    """Give the object at a dotted path; None where there is none."""
    if not path or path[0] not in namespace:
        return None
    value = namespace[path[0]]
    for name in path[1:]:
        # a property is not run for a completion: it may compute, wait, or join a collective
        value = getattr(value, name, None) if isinstance(value, types.ModuleType) else _plain(value, name)
    return value


def _plain(value: Any, name: str) -> Any:
    for registry in ("_modules", "_parameters", "_buffers"):  # where torch modules keep their members
        members = getattr(value, "__dict__", {}).get(registry) or {}
        if name in members:
            return members[name]
    found = inspect.getattr_static(value, name, None)
    return None if isinstance(found, property) else found
