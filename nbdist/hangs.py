"""The hang doctor: who did not come to the collective, told from the ranks' own counters. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbdist.ranks import fold, named
from nbdist.records import HangReport

__all__ = ["diagnose", "stuck"]

Counters = Mapping[str, tuple[int, int]]


def stuck(progress: Mapping[int, Counters], running: set[int]) -> bool:
    """Whether a rank that runs the cell is inside a collective."""
    return any(enqueued != completed for rank in running for enqueued, completed in progress.get(rank, {}).values())


def diagnose(states: Mapping[int, Mapping[str, Any]], progress: Mapping[int, Counters]) -> HangReport | None:
    """Say why ranks wait, or None when nothing is wrong but the time it takes.

    Parameters
    ----------
    states : mapping
        Rank to its answer to ``collectives``: ``running``, ``line``, ``called``, ``groups``.
    progress : mapping
        Rank to group name to (last collective enqueued, last completed).
    """
    for group in sorted({name for counters in progress.values() for name in counters}):
        report = _diagnose_group(group, states, progress)
        if report is not None:
            return report
    return None


def _diagnose_group(
    group: str, states: Mapping[int, Mapping[str, Any]], progress: Mapping[int, Counters]
) -> HangReport | None:
    last = {rank: state["groups"][group] for rank, state in states.items() if group in state["groups"]}
    counters = {rank: tuple(c[group]) for rank, c in progress.items() if group in c}
    waiting = [
        rank
        for rank, (enqueued, completed) in counters.items()
        if enqueued != completed and rank in last and states[rank]["running"]
    ]
    if not waiting:
        return None
    furthest = max(counters[rank][0] for rank in waiting)
    members = set(last[waiting[0]]["ranks"]) or set(counters)
    behind = sorted(rank for rank in members if counters.get(rank, (0, 0))[0] < furthest)
    first = last[max(waiting, key=lambda rank: counters[rank][0])]
    if not behind:
        calls = {rank: describe(last[rank]) for rank in waiting}
        if len(set(calls.values())) < 2:
            return None
        return _report("mismatch", group, waiting, [], first, _mismatch(calls, states))
    finished = [rank for rank in behind if rank not in states or not states[rank]["running"]]
    if finished:
        return _report("finished", group, waiting, finished, first, _finished(finished, waiting, first, last, states))
    return _report("missing", group, waiting, behind, first, _missing(behind, waiting, first, states))


def describe(entry: Mapping[str, Any]) -> str:
    """Write a collective as ``all_reduce [4] float``."""
    shapes = ", ".join(str(list(shape)) for shape in entry["shape"])
    dtypes = ", ".join(dict.fromkeys(entry["dtype"]))
    return " ".join(part for part in (entry["op"], shapes, dtypes) if part)


def _report(
    kind: str, group: str, waiting: list[int], missing: list[int], entry: Mapping[str, Any], lines: list[str]
) -> HangReport:
    return HangReport(
        kind=kind,
        group=group,
        waiting=tuple(sorted(waiting)),
        missing=tuple(missing),
        op=entry["op"],
        shape=", ".join(str(list(shape)) for shape in entry["shape"]),
        dtype=", ".join(dict.fromkeys(entry["dtype"])),
        seq=entry["seq"],
        lines=tuple(lines),
    )


def _place(state: Mapping[str, Any]) -> str:
    where = state["line"] or "outside of any cell"
    return f"{where}, in {state['called']}" if state["called"] else where


def _waiting_lines(waiting: list[int], states: Mapping[int, Mapping[str, Any]]) -> list[str]:
    return [
        f"{named(ranks)} wait{'s' if len(ranks) == 1 else ''} at {place}"
        for ranks, place in fold({rank: _place(states[rank]) for rank in waiting})
    ]


def _missing(
    missing: list[int], waiting: list[int], entry: Mapping[str, Any], states: Mapping[int, Mapping[str, Any]]
) -> list[str]:
    head = f"{named(missing)} {'has' if len(missing) == 1 else 'have'} not come to {describe(entry)}"
    where = [f"{named(ranks)} is at {place}" for ranks, place in fold({r: _place(states[r]) for r in missing})]
    return [f"{head} (collective {entry['seq']} of its group)", *_waiting_lines(waiting, states), *where]


def _finished(
    finished: list[int],
    waiting: list[int],
    entry: Mapping[str, Any],
    last: Mapping[int, Mapping[str, Any]],
    states: Mapping[int, Mapping[str, Any]],
) -> list[str]:
    counts = {rank: last[rank]["count"] if last[rank]["op"] == entry["op"] else 0 for rank in last}
    ran = [rank for rank in finished if counts.get(rank)]
    if ran:
        most = max(counts[rank] for rank in waiting)
        head = (
            f"{named(finished)} finished, {named(waiting)} wait{'s' if len(waiting) == 1 else ''} in "
            f"{describe(entry)}: uneven number of steps ({most} vs {min(counts[rank] for rank in ran)} {entry['op']})"
        )
    else:
        head = (
            f"{named(waiting)} called {describe(entry)} on a group of {len(entry['ranks']) or 'all'} ranks, and "
            f"{named(finished)} {'is' if len(finished) == 1 else 'are'} past the cell or not in it"
        )
    advice = (
        "Every rank of the group must make the same collectives: run the cell on all of them, or use ddp.module, "
        "a group of its own, or plain Python."
    )
    return [head, *_waiting_lines(waiting, states), advice]


def _mismatch(calls: Mapping[int, str], states: Mapping[int, Mapping[str, Any]]) -> list[str]:
    texts = {rank: f"{call} at {states[rank]['line'] or '?'}" for rank, call in calls.items()}
    parts = [f"{named(ranks)}: {text}" for ranks, text in fold(texts)]
    return [f"ranks called different collectives: {'; '.join(parts)}"]
