"""Ranks agree that all of them made a call, through the group's store and without a collective.

A collective that one rank enters alone can only be waited out. Here rank 0 notes who has come, decides for all, and a
call that not every rank makes ends in one sentence. Nothing of it sits in gloo's sockets either: cutting a group does
not touch what a background thread waits for, only the end of the processes does.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nbdist.engine.telemetry.recorder import recorder
from nbdist.errors import WorldError

__all__ = ["Meeting", "cell_ended", "meet", "named"]

PATIENCE = 30.0  # seconds that a rank waits for others that may still be busy
GRACE = 1.0  # seconds, when a missing rank is known to have ended its cell
TELL_S = 5.0  # between two words of a rank that waits
SLICES = (0.001, 0.05)  # seconds between two looks at the store: at first, and later

_group: Any = None  # the group that the meetings are counted in
_number = 0


class Meeting:
    """The ranks that met for one call, and what rank 0 decided for it. ``agreed`` is equal on all ranks."""

    def __init__(self, what: str, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self.what = what
        self.rank = rank
        self.world_size = world_size
        self.agreed: dict[str, Any] = {}
        self.people: list[tuple[str, int]] = []  # host and process of each rank
        self._store = store
        self._prefix = prefix

    def tell(self, key: str, **facts: Any) -> None:
        """Publish something under ``key`` for the other ranks."""
        if self._store is not None:
            self._store.set(f"{self._prefix}/{key}", json.dumps(facts))

    def hear(
        self, key: str, rank: int, *, limit: float, waiting: Callable[[float], None] = lambda seconds: None
    ) -> dict[str, Any]:
        """Wait for what ``rank`` publishes under ``key``; ``waiting`` is called every few seconds with their number.

        Raises
        ------
        WorldError
            When it does not come within ``limit`` seconds, or that rank's process has ended.
        """
        began = told = time.monotonic()
        slept = SLICES[0]
        while True:
            facts = self._look(key)
            if facts is not None:
                return facts
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                waiting(told - began)
            if self._ended(rank):
                raise WorldError(f"rank {rank} ended during {self.what}.")
            if time.monotonic() - began > limit:
                raise WorldError(f"rank {rank} did not answer within {limit:g} s during {self.what}.")
            time.sleep(slept)
            slept = min(2 * slept, SLICES[1])

    def _look(self, key: str) -> dict[str, Any] | None:
        full = f"{self._prefix}/{key}"
        # get() would wait, holding the lock of the process's only client
        if not self._store.check([full]):
            return None
        facts: dict[str, Any] = json.loads(self._store.get(full))
        return facts

    def _ended(self, rank: int) -> bool:
        if rank >= len(self.people):
            return False
        host, pid = self.people[rank]
        if host != _host():
            return False
        try:
            with open(f"/proc/{pid}/stat") as stat:
                # a zombie has ended too: its parent may take its time
                return stat.read().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            return os.path.exists("/proc/self/stat")


def meet(
    what: str,
    mine: dict[str, Any],
    decide: Callable[[Sequence[dict[str, Any]]], dict[str, Any]],
    *,
    patience: float = PATIENCE,
) -> Meeting:
    """Come together for one call, in the order of the calls; the main thread of every rank calls it.

    Parameters
    ----------
    what : str
        The call as the user typed it, for the messages: ``"save_checkpoint()"``.
    mine : dict
        What this rank brings, plain data.
    decide : callable
        Called on rank 0 with what all ranks brought; gives what is agreed. A ValueError is raised on all ranks.
    patience : float
        Seconds to wait for ranks that do not come.

    Raises
    ------
    WorldError
        Not every rank came: the message names those that did.
    """
    global _group, _number
    if not dist.is_initialized() or dist.get_world_size() == 1:
        alone = Meeting(what, None, "", 0, 1)
        alone.agreed = decide([mine])
        return alone
    if _group is not dist.group.WORLD:
        _group, _number = dist.group.WORLD, 0
    rank, world = dist.get_rank(), dist.get_world_size()
    store = c10d._get_default_store()
    while True:
        meeting = Meeting(what, store, f"nbdist/meeting/{_number}", rank, world)
        # decided without this rank: a call that the others gave up, or that it gave up itself
        if meeting._look("decision") is None:
            break
        _number += 1
    meeting.tell(f"came-{rank}", here=True, what=what, host=_host(), pid=os.getpid(), brings=mine)
    try:
        decision = _preside(meeting, decide, patience) if rank == 0 else _await_decision(meeting, patience)
    except BaseException:
        # whoever leaves must not be counted as present in the next call
        meeting.tell(f"came-{rank}", here=False)
        raise
    _number += 1
    if "error" in decision:
        raise (WorldError if decision["absent"] else ValueError)(decision["error"])
    meeting.people = [(host, pid) for host, pid in decision["people"]]
    meeting.agreed = decision["agreed"]
    return meeting


def cell_ended(cell: str) -> None:
    """Note for the others that this rank's cell has ended: whatever they wait for will not come from it any more."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        c10d._get_default_store().set(f"nbdist/ended/{dist.get_rank()}", cell)


def named(ranks: Iterable[int]) -> str:
    """Write ``rank 1``, ``ranks 0 and 2`` or ``ranks 0, 1 and 3``."""
    *rest, last = map(str, ranks)
    return f"ranks {', '.join(rest)} and {last}" if rest else f"rank {last}"


def _preside(
    meeting: Meeting, decide: Callable[[Sequence[dict[str, Any]]], dict[str, Any]], patience: float
) -> dict[str, Any]:
    """Wait for all ranks, then decide for all."""
    came = _gather(meeting, patience)
    missing = [rank for rank in range(meeting.world_size) if rank not in came]
    decision: dict[str, Any]
    if missing:
        decision = {"error": _missing(meeting, came, missing), "absent": True}
    elif len({c["what"] for c in came.values()}) > 1:
        calls = ", ".join(f"rank {rank} {came[rank]['what']}" for rank in sorted(came))
        decision = {"error": f"The ranks made different calls: {calls}.", "absent": True}
    else:
        everyone = [came[rank] for rank in range(meeting.world_size)]
        try:
            agreed = decide([c["brings"] for c in everyone])
            decision = {"agreed": agreed, "people": [(c["host"], c["pid"]) for c in everyone]}
        except ValueError as error:
            decision = {"error": str(error), "absent": False}
    meeting.tell("decision", **decision)
    return decision


def _await_decision(meeting: Meeting, patience: float) -> dict[str, Any]:
    began = time.monotonic()
    slept = SLICES[0]
    while True:
        decision = meeting._look("decision")
        if decision is not None:
            return decision
        waited = time.monotonic() - began
        # rank 0 waits for the others as long as this one waits for rank 0, and may have come late
        limit = 2 * patience + GRACE if meeting._look("came-0") is not None else patience
        if waited > limit or (waited > GRACE and _past(meeting, 0)):
            came = _came(meeting, range(meeting.world_size))
            missing = [rank for rank in range(meeting.world_size) if rank not in came]
            raise WorldError(_missing(meeting, came, missing or [0]))
        time.sleep(slept)
        slept = min(2 * slept, SLICES[1])


def _gather(meeting: Meeting, patience: float) -> dict[int, dict[str, Any]]:
    began = time.monotonic()
    slept = SLICES[0]
    came: dict[int, dict[str, Any]] = {}
    while True:
        missing = [rank for rank in range(meeting.world_size) if rank not in came]
        came |= _came(meeting, missing)
        if len(came) == meeting.world_size:
            # one that came and left again has said so
            came = _came(meeting, range(meeting.world_size))
            if len(came) == meeting.world_size:
                return came
        waited = time.monotonic() - began
        if waited > patience or (waited > GRACE and any(_past(meeting, r) for r in missing if r not in came)):
            return came
        time.sleep(slept)
        slept = min(2 * slept, SLICES[1])


def _came(meeting: Meeting, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    looked = {rank: meeting._look(f"came-{rank}") for rank in ranks}
    return {rank: facts for rank, facts in looked.items() if facts is not None and facts["here"]}


def _past(meeting: Meeting, rank: int) -> bool:
    """Whether that rank has ended the cell that this one is in."""
    key = f"nbdist/ended/{rank}"
    store = meeting._store
    return bool(store.check([key])) and store.get(key).decode() == recorder.cell


def _missing(meeting: Meeting, came: Iterable[int], missing: Sequence[int]) -> str:
    past = [rank for rank in missing if _past(meeting, rank)]
    why = f"; {named(past)} {'has' if len(past) == 1 else 'have'} ended the cell" if past else ""
    here = sorted({*came, meeting.rank})
    return (
        f"{meeting.what} is called on all ranks: {named(here)} came, {named(missing)} did not{why}. "
        "Take it out of `if rank == 0:`."
    )


def _host() -> str:
    return os.environ.get("NBDIST_HOST") or socket.gethostname()
