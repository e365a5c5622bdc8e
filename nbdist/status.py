"""What each rank does now, asked on the control channel so that busy ranks answer too."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from nbdist.report import describe_end
from nbdist.telemetry import time_left

if TYPE_CHECKING:
    from nbdist.cluster import Cluster

__all__ = ["RankStatus", "Status", "ask", "chips"]

ANSWER_S = 0.8

# engine id -> when it last said what it did, and what
_last_known: weakref.WeakKeyDictionary[Cluster, dict[int, tuple[float, str]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One row of ``%cluster status``."""

    rank: int
    host: str
    device: str
    pid: int
    state: str
    memory: int | None
    threads: int
    trouble: str = ""  # in short, of a rank that could not end by itself: "dead", "no answer in 0.8 s"


class Status(tuple[RankStatus, ...]):
    """The table of ``%cluster status``."""

    note = ""  # a line below it

    @property
    def troubles(self) -> str:
        """The ranks that are dead or do not answer: ``rank 0 (no answer in 0.8 s), rank 1 (dead)``; or nothing."""
        return ", ".join(f"rank {row.rank} ({row.trouble})" for row in self if row.trouble)

    def __str__(self) -> str:
        rows = [("rank", "host", "device", "pid", "memory", "threads", "state"), *map(_cells, self)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self.note] if self.note else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("rank", "host", "device", "pid", "memory", "threads", "state"))
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in _cells(row)) + "</tr>" for row in self)
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def ask(cluster: Cluster) -> Status:
    """Ask every rank; one that does not answer in time is shown with what is known of it."""
    world = cluster.world
    replies = cluster.client.ask(world.engines, "status", timeout=ANSWER_S)
    rows = []
    for engine, info in zip(world.engines, world.ranks, strict=True):
        reply, trouble = replies.get(engine), ""
        if engine in cluster.deaths:
            trouble = "dead"
            state = f"{trouble}: {describe_end(cluster.deaths[engine])}"
        elif reply is None:
            trouble = f"no answer in {ANSWER_S:g} s"
            state = f"{trouble}: in a long native call, or stopped{_said_last(cluster, engine)}"
        else:
            state = describe(reply)
            _last_known.setdefault(cluster, {})[engine] = time.monotonic(), state
        memory = reply["memory"] if reply else None
        rows.append(
            RankStatus(
                rank=info.rank,
                host=info.host,
                device=info.device,
                pid=info.pid,
                state=state,
                memory=memory,
                threads=info.threads,
                trouble=trouble,
            )
        )
    status = Status(rows)
    if cluster.telemetry.ends:
        status.note = f"The job's time limit ends in {time_left(cluster.telemetry.ends)}."
    return status


def describe(reply: dict[str, Any]) -> str:
    """Put a rank's own report into words: ``running In[7], line 4, in all_reduce for 12 s``."""
    if not reply["running"]:
        return "idle"
    place = reply["line"].removeprefix("Cell ") or reply["label"]
    waiting = any(enqueued != completed for enqueued, completed in reply["progress"].values())
    called = reply["called"]
    inside = f", in {called}" if called and called != "<module>" else ""
    collective = ", waiting in a collective" if waiting and not inside else ""
    return f"running {place}{inside}{collective} for {reply['seconds']:.0f} s"


def _said_last(cluster: Cluster, engine: int) -> str:
    """Say what a rank did when it last answered, or which cell it was given since."""
    at, state = _last_known.get(cluster, {}).get(engine, (0.0, ""))
    cell = cluster.cell
    if cell is not None and engine in cell.remaining and cell.began > at:
        return f"; given In[{cell.label}] {time.monotonic() - cell.began:.0f} s ago"
    return f"; {state} {time.monotonic() - at:.0f} s ago" if state else ""


def chips(cluster: Cluster) -> Sequence[tuple[int, str, str]]:
    """Rank, state, detail: from what the notebook knows without asking anybody."""
    world = cluster._world
    if world is None:
        return [(rank, "unknown", "not running") for rank in range(cluster.n)]
    cell = cluster.cell
    rows = []
    for rank, engine in enumerate(world.engines):
        if engine in cluster.deaths:
            rows.append((rank, "dead", "dead"))
        elif cell is not None and rank in cell.ranks and rank not in cell.replies:
            rows.append((rank, "running", f"In[{cell.label}]"))
        else:
            rows.append((rank, "idle", "idle"))
    return rows


def _cells(row: RankStatus) -> tuple[str, ...]:
    memory = f"{row.memory / 2**20:,.0f} MiB" if row.memory is not None else "?"
    return str(row.rank), row.host, row.device, str(row.pid), memory, str(row.threads), row.state
