"""What crosses the wire between ranks and notebook: small, frozen, and independent of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

__all__ = [
    "STEP_COLUMNS",
    "HangReport",
    "RankError",
    "RankInfo",
    "RunEvent",
    "StepRecord",
    "from_wire",
    "to_wire",
]

Record = TypeVar("Record", bound="RankInfo | RankError | StepRecord | RunEvent")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """Who a rank is: its place in the world, its host and process, and the versions it runs."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    pid: int
    device: str
    backend: str
    generation: int
    python: str
    torch: str
    nbdist: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """How a cell ended badly on one rank.

    ``traceback`` holds the lines to show (coloured); it is empty on a rank that was only brought out of a collective
    or interrupted because of another one: then ``released`` names the collective ("all_reduce"), or is empty.
    """

    rank: int
    ename: str
    evalue: str
    time: float
    traceback: tuple[str, ...] = ()
    location: str = ""  # "Cell In[7], line 4"
    released: str | None = None
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """Why ranks wait in a collective.

    ``kind`` is "missing" (a rank works on something else), "finished" (a rank has ended the cell, or does not run it)
    or "mismatch" (ranks called different things). Only the first can still end well.
    """

    kind: str
    group: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    op: str
    shape: str
    dtype: str
    seq: int
    lines: tuple[str, ...]

    @property
    def is_fatal(self) -> bool:
        return self.kind != "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One training step on one rank. Times are in seconds, memory in bytes; None means not measured.

    ``time`` is the Unix time at which the step ended; ``values`` holds the user's own names.
    """

    run: str
    step: int
    rank: int
    time: float
    epoch: int | None = None
    loss: float | None = None
    step_time: float | None = None
    data_wait: float | None = None
    h2d: float | None = None
    forward: float | None = None
    backward: float | None = None
    exposed_comm: float | None = None
    optimizer: float | None = None
    other: float | None = None
    samples: int | None = None
    samples_per_s: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    memory_allocated: int | None = None
    memory_peak: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """A run began or ended on one rank.

    ``run`` is the same on all ranks. ``step`` is the step counter at that moment; ``total`` the step at which the
    run will end, where that is known. ``reason`` (of an end) is "done", "stopped" or "failed"; ``note`` is one line
    for people, such as the batch arithmetic.
    """

    kind: str  # "begin" | "end"
    run: str
    rank: int
    world_size: int
    time: float
    step: int
    total: int | None = None
    epoch: int | None = None
    epochs: float | None = None
    reason: str | None = None
    note: str = ""


STEP_COLUMNS: tuple[str, ...] = (
    "run",
    "step",
    "epoch",
    "rank",
    "time",
    *(f.name for f in fields(StepRecord) if f.name not in ("run", "step", "epoch", "rank", "time", "values")),
)


def to_wire(record: RankInfo | RankError | StepRecord | RunEvent) -> dict[str, Any]:
    """Give the record as plain JSON data, without the fields that were not measured."""
    wire = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if value is not None and value != {}:
            wire[f.name] = dict(value) if f.name == "values" else value
    return wire


def from_wire(cls: type[Record], wire: Mapping[str, Any]) -> Record:
    """Rebuild a record; names that a newer sender added are ignored."""
    known = {f.name for f in fields(cls)}
    return cls(**{name: value for name, value in wire.items() if name in known})
