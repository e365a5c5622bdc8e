"""A failed cell as a person should read it: the root cause first, what followed from it folded to a line."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from nbdist.ranks import named
from nbdist.records import RankError

__all__ = ["describe_end", "one_line", "render_errors"]

RED, BOLD, DIM, PLAIN = "\x1b[31m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


def render_errors(errors: Sequence[RankError]) -> list[str]:
    """Give the lines of the report; ``errors`` has the root cause first."""
    root, *others = errors
    same = [e for e in others if e.released is None and (e.ename, e.evalue) == (root.ename, root.evalue)]
    lines = [f"{BOLD}{RED}{named([root.rank, *(e.rank for e in same)])}{PLAIN}{RED} failed{PLAIN}"]
    if root.traceback:
        lines.extend(root.traceback)
    else:
        lines.append(f"{RED}{root.ename}{PLAIN}: {root.evalue}" + (f" at {root.location}" if root.location else ""))
    if root.hint:
        lines.append(f"{BOLD}Next:{PLAIN} {root.hint}")
    rest = [e for e in others if e not in same]
    groups: dict[str, list[int]] = {}
    for error in rest:
        groups.setdefault(one_line(error), []).append(error.rank)
    lines.extend(f"{DIM}{named(ranks)}: {text}{PLAIN}" for text, ranks in groups.items())
    return lines


def one_line(error: RankError) -> str:
    """Give an error without its traceback."""
    place = f" at {error.location}" if error.location else ""
    if error.released is not None:
        return f"released from {error.released}{place}" if error.released else f"interrupted{place}"
    first = error.evalue.strip().splitlines()[:1]
    return f"{error.ename}{': ' + first[0] if first else ''}{place}"


def describe_end(death: dict[str, Any], host: str = "") -> str:
    """Say how a process ended: ``exited with code 3``, ``was killed by signal 9 (SIGKILL): often out of memory``."""
    number = death.get("signal")
    if "why" in death:
        return str(death["why"])
    who = f"(pid {death['pid']}{', host ' + host if host else ''})"
    if number is None:
        return f"{who} exited with code {death.get('code')}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"{who} was killed by signal {number}"
    why = {"SIGKILL": ": often out of memory", "SIGABRT": ": often different shapes or dtypes in a collective"}
    return f"{who} was killed by signal {number} ({name}){why.get(name, '')}"
