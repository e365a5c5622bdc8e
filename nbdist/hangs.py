"""The hang doctor: who did not come to the collective, told from the ranks' own counters. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from nbdist.ranks import fold, named
from nbdist.records import HangReport

__all__ = ["diagnose", "is_waiting", "stuck"]

Counters = Mapping[str, tuple[int, int]]
States = Mapping[int, Mapping[str, Any]]

# What a rank gives has the same shape on all ranks in these; in the others the op alone can be compared.
SAME_SHAPE = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "reduce_scatter")
SILENT = "does not answer: frozen, or in a native call"
ADVICE = (
    "Every rank of the group must make the same collectives: run the cell on all of them, or use ddp.module, a group "
    "of its own, or plain Python."
)


def is_waiting(progress: Counters) -> bool:
    """Whether a rank is inside a collective: one was enqueued that has not completed."""
    return any(enqueued != completed for enqueued, completed in progress.values())


def stuck(progress: Mapping[int, Counters], running: Set[int], inside: Set[int]) -> bool:
    """Whether a rank that runs the cell may be waiting for another one.

    Parameters
    ----------
    running : set
        Ranks that run the cell.
    inside : set
        Ranks whose main thread is inside torch.distributed; sends and receives are in no counter.
    """
    return bool(running & inside) or any(is_waiting(progress.get(rank, {})) for rank in running)


def diagnose(states: States, progress: Mapping[int, Counters]) -> HangReport | None:
    """Say why ranks wait, or None when nothing is wrong but the time it takes.

    Parameters
    ----------
    states : mapping
        Rank to its answer to ``collectives``: ``running``, ``line``, ``called``, ``inside``, ``groups``. A rank that
        does not answer is left out.
    progress : mapping
        Rank to group name to (last collective enqueued, last completed).
    """
    for group in sorted({name for counters in progress.values() for name in counters}):
        report = _diagnose_group(group, states, progress)
        if report is not None:
            return report
    return _diagnose_point_to_point(states, progress)


def _diagnose_group(group: str, states: States, progress: Mapping[int, Counters]) -> HangReport | None:
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
        if len({_comparable(last[rank]) for rank in waiting}) < 2:
            return None
        calls = {rank: describe(last[rank]) for rank in waiting}
        return _report("mismatch", group, waiting, [], first, _mismatch(calls, states))
    finished = [rank for rank in behind if rank in states and not states[rank]["running"]]
    if finished:
        return _report("finished", group, waiting, finished, first, _finished(finished, waiting, first, last, states))
    return _report("missing", group, waiting, behind, first, _missing(behind, waiting, first, states))


def _diagnose_point_to_point(states: States, progress: Mapping[int, Counters]) -> HangReport | None:
    """Find ranks that wait in a send or a receive, which no counter shows, for ranks that have ended the cell."""
    waiting = [rank for rank, state in states.items() if state["running"] and state["inside"]]
    others = [rank for rank in progress if rank not in waiting]
    if not waiting or any(is_waiting(progress[rank]) for rank in waiting):
        return None
    calls = {rank: f"{states[rank]['called'] or 'a collective'} at {states[rank]['line'] or '?'}" for rank in waiting}
    parts = [f"{named(ranks)} wait{'s' if len(ranks) == 1 else ''} in {call}" for ranks, call in fold(calls)]
    entry = {"op": states[waiting[0]]["called"], "shape": (), "dtype": (), "seq": 0}
    if others and all(rank in states and not states[rank]["running"] for rank in others):
        lines = [f"{'; '.join(parts)}, and {named(others)} {_are(others)} past the cell or not in it", ADVICE]
        return _report("finished", "", waiting, others, entry, lines)
    lines = ["; ".join(parts), *_whereabouts(others, states)]
    return _report("missing", "", waiting, others, entry, lines) if others else None


def describe(entry: Mapping[str, Any]) -> str:
    """Write a collective as ``all_reduce [4] float32``."""
    shapes = ", ".join(str(list(shape)) for shape in entry["shape"])
    dtypes = ", ".join(dict.fromkeys(entry["dtype"]))
    return " ".join(part for part in (entry["op"], shapes, dtypes) if part)


def _comparable(entry: Mapping[str, Any]) -> str:
    op: str = entry["op"]
    return describe(entry) if op.startswith(SAME_SHAPE) else op


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


def _are(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _place(state: Mapping[str, Any]) -> str:
    where = state["line"] or "outside of any cell"
    return f"{where}, in {state['called']}" if state["called"] else where


def _waiting_lines(waiting: list[int], states: States) -> list[str]:
    return [
        f"{named(ranks)} wait{'s' if len(ranks) == 1 else ''} at {place}"
        for ranks, place in fold({rank: _place(states[rank]) for rank in waiting})
    ]


def _whereabouts(ranks: list[int], states: States) -> list[str]:
    places = {}
    for rank in ranks:
        if rank not in states:
            places[rank] = SILENT
        elif states[rank]["running"]:
            places[rank] = f"is at {_place(states[rank])}"
        else:
            places[rank] = "is past the cell or not in it"
    return [f"{named(same)} {place}" for same, place in fold(places)]


def _missing(missing: list[int], waiting: list[int], entry: Mapping[str, Any], states: States) -> list[str]:
    head = f"{named(missing)} {'has' if len(missing) == 1 else 'have'} not come to {describe(entry)}"
    return [
        f"{head} (collective {entry['seq']} of its group)",
        *_waiting_lines(waiting, states),
        *_whereabouts(missing, states),
    ]


def _finished(
    finished: list[int],
    waiting: list[int],
    entry: Mapping[str, Any],
    last: Mapping[int, Mapping[str, Any]],
    states: States,
) -> list[str]:
    counts = {rank: last[rank]["count"] if last[rank]["op"] == entry["op"] else 0 for rank in last}
    ran = [rank for rank in finished if counts.get(rank)]
    if ran:
        most, least = max(counts[rank] for rank in waiting), min(counts[rank] for rank in ran)
        head = (
            f"{named(finished)} finished, {named(waiting)} wait{'s' if len(waiting) == 1 else ''} in "
            f"{describe(entry)}: uneven number of steps ({most} vs {least}), counted in calls of {entry['op']}"
        )
    else:
        head = (
            f"{named(waiting)} called {describe(entry)} on a group of {len(entry['ranks']) or 'all'} ranks, and "
            f"{named(finished)} {_are(finished)} past the cell or not in it"
        )
    return [head, *_waiting_lines(waiting, states), ADVICE]


def _mismatch(calls: Mapping[int, str], states: States) -> list[str]:
    texts = {rank: f"{call} at {states[rank]['line'] or '?'}" for rank, call in calls.items()}
    parts = [f"{named(ranks)}: {text}" for ranks, text in fold(texts)]
    return [f"ranks called different collectives: {'; '.join(parts)}"]
