"""What the ranks report: kept whole as a table, put together run by run, written to a run log."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.records import STEP_COLUMNS
from nbdist.runlog import RunLog, read_runs
from nbdist.runs import Report, Run, number

if TYPE_CHECKING:
    import pandas

__all__ = ["Telemetry"]

logger = logging.getLogger(__name__)

MEASURED = STEP_COLUMNS[5:]  # after run, step, epoch, rank, time
SPARSE = frozenset(("epoch", *MEASURED))


class Telemetry:
    """Collect the step records and run events of all ranks.

    Parameters
    ----------
    world_size
        Ranks that are expected to report each step.
    log_dir
        Folder of the run logs, `<run>.jsonl`; None writes none.
    behind
        Gives for a rank how many seconds its host's clock is behind the notebook's: its times are corrected by that.

    Attributes
    ----------
    dropped
        Records lost on the way: left out by ranks whose queue was full, or malformed.
    lock
        Hold it to read several curves at one moment.
    version
        Grows with every change, so that a reader sees cheaply whether there is anything new.
    ends
        When the time limit of the job ends that the ranks run in, as seconds since 1970; 0 without one.

    Examples
    --------
    >>> frame = cluster.telemetry.to_frame()
    >>> frame[frame["rank"] == 0].plot(x="step", y="loss")
    """

    def __init__(
        self, world_size: int, log_dir: Path | None = None, behind: Callable[[int], float] = lambda rank: 0.0
    ) -> None:
        self.world_size = world_size
        self.version = 0
        self.closed = False
        self.ends = 0.0
        self._behind = behind
        self.lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._names: list[str] = []
        self._run_index: dict[str, int] = {}
        self._run_column = array("I")
        self._step_column = array("q")
        self._rank_column = array("i")
        self._time_column = array("d")
        # name -> rows and values: a value that is logged now and then costs nothing in the other rows
        self._sparse: dict[str, tuple[array[int], array[float]]] = {}
        self.dropped = 0
        self._callbacks: list[Callable[[], None]] = []
        self._log = RunLog(log_dir) if log_dir is not None else None

    def __repr__(self) -> str:
        rows, runs = len(self._run_column), len(self._runs)
        return f"<Telemetry {rows:,} records of {runs} run{'s' * (runs != 1)}, {self.dropped} dropped>"

    @property
    def runs(self) -> Sequence[Run]:
        """All runs, in the order in which they began."""
        self.poll()
        with self.lock:
            return tuple(self._runs.values())

    @property
    def current(self) -> Run | None:
        """The newest run, going on or ended; None before the first."""
        self.poll()
        with self.lock:
            return next(reversed(self._runs.values()), None)

    def log_path(self, run: str) -> Path | None:
        """The JSONL file of a run; None where no log is written."""
        return None if self._log is None or self._log.broken else self._log.path(run)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback()` called after each change, on the receiving thread: it must return at once.

        Returns
        -------
        callable
            Ends the subscription.
        """
        with self.lock:
            self._callbacks.append(callback)

        def unsubscribe() -> None:
            with self.lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return unsubscribe

    def receive(self, payload: Mapping[str, Any]) -> None:
        """Take what a rank sent. Never raises for odd data: it is counted in `dropped`.

        Parameters
        ----------
        payload
            `{"kind": "steps", "rank": r, "dropped": n, "records": [...]}`, `n` counted since the last payload, or
            `{"kind": "event", "event": {...}}`; records as `to_wire` gives them.
        """
        now = time.monotonic()
        with self.lock:
            try:
                if payload["kind"] == "event":
                    self._take_event(payload["event"], now)
                elif payload["kind"] == "steps":
                    self._take_steps(payload, now)
                else:
                    raise ValueError(f"no payload of kind {payload['kind']!r}")
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self._reject(payload, error)
            self.version += 1
        self._notify()

    def replay(self, folder: Path) -> None:
        """Take what an earlier notebook wrote of this cluster's runs, without writing it again."""
        log, self._log = self._log, None
        behind, self._behind = self._behind, lambda rank: 0.0  # it was corrected before it was written
        try:
            for payload in read_runs(folder):
                self.receive(payload)
        finally:
            self._log, self._behind = log, behind

    def catch_up(self, payloads: Iterable[Mapping[str, Any]]) -> None:
        """Take what ranks have sent while no notebook listened, and pass over what the log of an earlier one has."""
        with self.lock:
            names = list(self._run_index)
            steps: dict[tuple[str, int], int] = {}
            times: dict[int, float] = {}
            for run, rank, step, when in zip(
                self._run_column, self._rank_column, self._step_column, self._time_column, strict=True
            ):
                steps[names[run], rank] = max(step, steps.get((names[run], rank), step))
                times[rank] = max(when, times.get(rank, when))

        def is_new(record: Mapping[str, Any]) -> bool:
            key = (record["run"], record["rank"])
            return key not in steps or record["step"] > steps[key]

        for payload in payloads:
            if payload["kind"] == "event":
                rank = payload["event"]["rank"]
                if rank not in times or payload["event"]["time"] + self._behind(rank) >= times[rank]:
                    self.receive(payload)
                continue
            records = [record for record in payload["records"] if is_new(record)]
            if records:
                self.receive({**payload, "records": records})

    def poll(self) -> None:
        """Close steps and runs for which some ranks' reports are overdue."""
        now = time.monotonic()
        with self.lock:
            # a list: closing one run must not disturb the walk
            changed = [run.close_steps(now) for run in list(self._runs.values())[-4:]]
            self.version += any(changed)

    def finish(self, reason: str = "failed", note: str = "") -> None:
        """End what still runs from the notebook's side, where its ranks can no longer say so."""
        with self.lock:
            for run in self._runs.values():
                if run.ended is None:
                    run.end(reason, time.time())
                    run.note = note or run.note
            self.version += 1
        self._notify()

    def close(self) -> None:
        """End the runs that go on, and write the log to its end. The table and the curves stay."""
        if any(run.ended is None for run in self._runs.values()):
            self.finish("stopped")
        self.closed = True
        if self._log is not None:
            self._log.close()
        self._notify()

    def to_frame(self) -> pandas.DataFrame:
        """Give all records as a table: one row a step and rank, NaN where nothing was measured.

        Returns
        -------
        pandas.DataFrame
            Columns run, step, epoch, rank, time, loss, …, and the user's own names, in seconds, bytes, samples/s.
        """
        import numpy as np
        import pandas as pd

        with self.lock:
            runs, steps = np.array(self._run_column), np.array(self._step_column)
            ranks, times = np.array(self._rank_column), np.array(self._time_column)
            sparse = {name: (np.array(rows), np.array(values)) for name, (rows, values) in self._sparse.items()}
            names = list(self._names)
        columns: dict[str, Any] = {
            "run": pd.Categorical.from_codes(runs.astype(np.int32), categories=names),
            "step": steps,
            "epoch": None,
            "rank": ranks.astype(np.int64),
            "time": times,
        }
        for name in ("epoch", *MEASURED, *(name for name in sparse if name not in STEP_COLUMNS)):
            column = np.full(len(steps), np.nan)
            if name in sparse:
                rows, values = sparse[name]
                column[rows] = values
            columns[name] = column
        return pd.DataFrame(columns)

    def table(self) -> str:
        """The runs as text: steps, loss, throughput, time, how they ended."""
        rows = [("run", "steps", "loss", "samples/s", "first step", "time", "end")]
        rows += [summary(run) for run in self.runs[-20:]]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(row[i].ljust(w) if i in (0, 6) else row[i].rjust(w) for i, w in enumerate(widths)) for row in rows
        ]
        if self.dropped:
            lines.append(f"{self.dropped:,} records were lost on the way")
        return "\n".join(line.rstrip() for line in lines)

    def _take_event(self, event: Mapping[str, Any], now: float) -> None:
        name, rank = str(event["run"]), int(event["rank"])
        when = float(event["time"]) + self._behind(rank)
        world_size = int(event.get("world_size") or self.world_size)
        if event["kind"] == "begin":
            run = self._run(name, world_size, when)
            run.rank_begins(rank, when)
            run.step = max(run.step, int(event.get("step") or 0))
            run.total = event.get("total", run.total)
            run.epoch = event.get("epoch", run.epoch)
            run.epochs = event.get("epochs", run.epochs)
            run.note = str(event.get("note") or run.note)
        elif event["kind"] == "end":
            run = self._run(name, world_size, when)
            run.rank_ends(rank, str(event.get("reason") or "done"), when, now)
            run.note = str(event.get("note") or run.note)
        else:
            raise ValueError(f"no event of kind {event['kind']!r}")
        if self._log is not None:
            self._log.put(name, {**event, "time": when, "event": event["kind"], "kind": "event"})

    def _take_steps(self, payload: Mapping[str, Any], now: float) -> None:
        self.dropped += int(payload.get("dropped") or 0)
        for record in payload["records"]:
            try:
                self._take_step(record, now)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self._reject(record, error)

    def _take_step(self, record: Mapping[str, Any], now: float) -> None:
        name, step, rank = str(record["run"]), int(record["step"]), int(record["rank"])
        when = float(record["time"]) + self._behind(rank)
        if not (0 <= rank < 2**31 and abs(step) < 2**63):
            raise ValueError(f"no rank {rank} or step {step}")
        own = {str(k): float(v) for k, v in (record.get("values") or {}).items() if isinstance(v, (int, float))}
        run = self._run(name, self.world_size, when - (number(record, "step_time") or 0.0))
        row = len(self._run_column)
        self._run_column.append(self._run_index[name])
        self._step_column.append(step)
        self._rank_column.append(rank)
        self._time_column.append(when)
        for measured, measure in record.items():
            if measured in SPARSE and isinstance(measure, (int, float)):
                self._put(measured, row, measure)
        for own_name, value in own.items():
            self._put(own_name if own_name not in STEP_COLUMNS else f"{own_name}_", row, value)
        epoch = record.get("epoch")
        run.report(
            rank,
            step,
            Report(
                time=when,
                loss=number(record, "loss"),
                samples=number(record, "samples"),
                epoch=epoch if isinstance(epoch, int) else None,
                values=own,
            ),
            now,
        )
        if self._log is not None:
            self._log.put(name, {"kind": "step", **record, "time": when})

    def _put(self, name: str, row: int, value: float) -> None:
        column = self._sparse.get(name)
        if column is None:
            column = self._sparse[name] = (array("I"), array("d"))
        column[0].append(row)
        column[1].append(value)

    def _run(self, name: str, world_size: int, begun: float) -> Run:
        run = self._runs.get(name)
        if run is None:
            for other in self._runs.values():
                if other.ended is None:
                    # its ranks began something else without a word about its end
                    other.end("lost", begun)
            run = self._runs[name] = Run(name, world_size, begun)
            self._run_index[name] = len(self._names)
            self._names.append(name)
        return run

    def _reject(self, data: object, error: Exception) -> None:
        self.dropped += 1
        logger.warning("Dropped a malformed record: %s: %s in %.200r", type(error).__name__, error, data)

    def _notify(self) -> None:
        for callback in tuple(self._callbacks):
            callback()


def summary(run: Run) -> tuple[str, str, str, str, str, str, str]:
    """One row of the table of runs."""
    rate = run.mean_samples_per_s
    return (
        run.name,
        f"{run.step}/{run.total}" if run.total else str(run.step),
        "" if run.loss is None else f"{run.loss:.4g}",
        "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        "" if run.first_step_time is None else f"{run.first_step_time:.2f} s",
        duration(run.elapsed),
        run.reason or "running",
    )


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def time_left(ends: float) -> str:
    """The time until a job's end: 3 h 12 min, 12 min, 90 s."""
    seconds = max(0, round(ends - time.time()))
    if seconds < 120:
        return f"{seconds} s"
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
