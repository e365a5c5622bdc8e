"""What a run looks like from outside: curves over its whole length, throughput, progress."""

from __future__ import annotations

import heapq
import math
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Curve", "Report", "Run"]

LATE_AFTER = 2.0  # seconds that a step waits for ranks that have not reported it
WINDOW = 0.5  # seconds of training behind one point of the throughput curve
MAX_CURVES = 64  # names of the user's own values that are drawn; all of them are in the table


class Curve:
    """A curve of at most `limit` points that always spans the whole run.

    A point is a bucket of `stride` values: the last x, the mean, the least and the greatest. When all points are used,
    neighbours are merged and the stride doubles, so that a spike survives any thinning. Appending is O(1) amortized.

    Parameters
    ----------
    limit
        The most points; even. Once thinned, a curve has between `limit / 2` and `limit` of them.
    """

    __slots__ = ("_filled", "_weight", "count", "generation", "high", "limit", "low", "mean", "stride", "x")

    def __init__(self, limit: int = 1000) -> None:
        assert limit >= 2 and limit % 2 == 0, limit
        self.limit = limit
        self.stride = 1
        self.generation = 0  # grows with each thinning: points before it are void
        self.count = 0  # values appended
        self.x = array("d")
        self.mean = array("d")
        self.low = array("d")
        self.high = array("d")
        self._weight = array("d")  # values behind the mean: NaN is left out
        self._filled = 0

    def __len__(self) -> int:
        return len(self.x)

    def append(self, x: float, mean: float, low: float, high: float) -> None:
        """Add one value; NaN where it is not known."""
        self.count += 1
        if self.x and self._filled < self.stride:
            self._filled += 1
            self.x[-1] = x
            if mean == mean:
                weight = self._weight[-1] = self._weight[-1] + 1
                self.mean[-1] = mean if weight == 1 else self.mean[-1] + (mean - self.mean[-1]) / weight
            self.low[-1] = _least(self.low[-1], low)
            self.high[-1] = _greatest(self.high[-1], high)
            return
        if len(self.x) == self.limit:
            self._thin()
            self.count -= 1
            self.append(x, mean, low, high)
            return
        self._filled = 1
        self.x.append(x)
        self.mean.append(mean)
        self.low.append(low)
        self.high.append(high)
        self._weight.append(float(mean == mean))

    def columns(self, start: int = 0) -> bytes:
        """The points from `start` on as float64: all x, then all means, least and greatest values."""
        return b"".join(column[start:].tobytes() for column in (self.x, self.mean, self.low, self.high))

    def _thin(self) -> None:
        x, mean, low, high, weight = self.x, self.mean, self.low, self.high, self._weight
        for i in range(len(x) // 2):
            a, b = 2 * i, 2 * i + 1
            total = weight[a] + weight[b]
            parts = ((mean[a], weight[a]), (mean[b], weight[b]))
            mean[i] = math.nan if total == 0 else sum(value * w for value, w in parts if w) / total
            x[i], low[i], high[i], weight[i] = x[b], _least(low[a], low[b]), _greatest(high[a], high[b]), total
        for column in (x, mean, low, high, weight):
            del column[len(column) // 2 :]
        self.stride *= 2
        self._filled = self.stride
        self.generation += 1


@dataclass(slots=True)
class Report:
    """What one rank said about one step."""

    time: float
    loss: float | None = None
    samples: float | None = None
    epoch: int | None = None
    values: dict[str, float] = field(default_factory=dict)


class Run:
    """One run: what its ranks reported, put together step by step.

    A step is closed when every rank has reported it, or `LATE_AFTER` seconds after its first report: nothing waits
    for ever. A rank that was missing then is not waited for again until it reports. Times are Unix times in seconds.

    Attributes
    ----------
    step, steps
        Number of the last closed step, and how many are closed.
    loss
        Last loss: mean over ranks, weighted by samples. `losses` has each rank's own.
    samples_per_s, mean_samples_per_s
        Samples per second of the whole world, over the last half second or more and over the whole run; None until
        measured. `steps_per_s` is the same for steps. The first step is in none of them.
    first_step_time
        Seconds from the beginning of the run to the end of its first step.
    curves
        "loss", "samples_per_s" and the user's own names, as `Curve`.
    """

    def __init__(self, name: str, world_size: int, begun: float) -> None:
        self.name = name
        self.world_size = world_size
        self.begun = begun
        self.ended: float | None = None
        self.reason: str | None = None
        self.note = ""
        self.step = 0
        self.steps = 0
        self.total: int | None = None
        self.epoch: int | None = None
        self.epochs: float | None = None
        self.loss: float | None = None
        self.losses: dict[int, float] = {}
        self.values: dict[str, float] = {}
        self.samples_per_s: float | None = None
        self.first_step_time: float | None = None
        self.late = 0  # reports that came after their step was closed; they are in the table only
        self.curves: dict[str, Curve] = {}
        self._since = begun  # a run may go on after it ended: time in between is not its own
        self._before = 0.0
        self._measured = [0.0, 0.0, 0.0]  # steps, samples, seconds; without first steps
        self._expected = set(range(world_size))
        # (step, 0) -> rank -> report; (step, 1) is what ranks add to a step that is closed
        self._pending: dict[tuple[int, int], dict[int, Report]] = {}
        self._arrived: dict[tuple[int, int], float] = {}
        self._order: list[tuple[int, int]] = []
        self._closed: int | None = None
        self._last_end: float | None = None  # None: the next step is a first one
        self._window: tuple[float, float] | None = None  # end of the step before it, samples in it
        self._parts: dict[int, int] = {}  # rank -> how often it said that the run begins
        self._ends: dict[int, list[str]] = {}
        self._end_seen: float | None = None
        self._reported_end = begun

    def __repr__(self) -> str:
        return f"<Run {self.name}, step {self.step}, {self.reason or 'running'}>"

    @property
    def waiting_for(self) -> list[int]:
        """The ranks that have not reported the oldest open step, or any step at all."""
        return sorted(self._expected.difference(self._pending[self._order[0]] if self._order else ()))

    @property
    def elapsed(self) -> float:
        """Seconds in which the run ran, until now or its end."""
        return self._before + max(0.0, (time.time() if self.ended is None else self.ended) - self._since)

    @property
    def steps_per_s(self) -> float | None:
        steps, _, seconds = self._measured
        return steps / seconds if seconds else None

    @property
    def mean_samples_per_s(self) -> float | None:
        _, samples, seconds = self._measured
        return samples / seconds if samples and seconds else None

    @property
    def eta(self) -> float | None:
        """Seconds to go, where the end and the speed are known."""
        rate = self.steps_per_s
        if self.total is None or self.ended is not None or not rate:
            return None
        return max(0, self.total - self.step) / rate

    def rank_begins(self, rank: int, when: float) -> None:
        """Note that the run begins on a rank, or goes on there."""
        part = self._parts[rank] = self._parts.get(rank, 0) + 1
        if self.ended is not None and part > len(self._ends.get(rank, ())):
            self._before = self.elapsed
            self._since = self._reported_end = when
            self.ended = self.reason = None
            self._end_seen = self._last_end = self._window = None
        elif self.steps == 0:
            self.begun = self._since = min(self.begun, when)

    def rank_ends(self, rank: int, reason: str, when: float, now: float) -> None:
        """Note that the run ended on a rank; it ends when it has on all, or `LATE_AFTER` seconds later."""
        self._ends.setdefault(rank, []).append(reason)
        if self._end_seen is None:
            self._end_seen = now
        self._reported_end = max(when, self._reported_end)
        self.close_steps(now)

    def report(self, rank: int, step: int, report: Report, now: float) -> None:
        """Take a rank's report of a step, at the monotonic time `now`."""
        self._expected.add(rank)
        key = (step, 0)
        if self._closed is not None and step <= self._closed:
            if step < self._closed or not report.values:
                self.late += 1
                return
            key = (step, 1)
        reports = self._pending.get(key)
        if reports is None:
            reports = self._pending[key] = {}
            self._arrived[key] = now
            heapq.heappush(self._order, key)
        known = reports.get(rank)
        if known is None:
            reports[rank] = report
        else:  # a second log() in the same step
            known.loss = known.loss if report.loss is None else report.loss
            known.samples = known.samples if report.samples is None else report.samples
            known.values.update(report.values)
        self.close_steps(now)

    def close_steps(self, now: float) -> bool:
        """Close what is complete or overdue at the monotonic time `now`; True if anything changed."""
        closed = 0
        while self._order:
            key = self._order[0]
            missing = self._expected.difference(self._pending[key])
            if missing:
                if now - self._arrived[key] < LATE_AFTER and not all(map(self._has_ended, missing)):
                    break
                self._expected -= missing
            self._close(heapq.heappop(self._order))
            closed += 1
        if self.ended is None and self._end_seen is not None:
            ended = all(map(self._has_ended, range(self.world_size)))
            if ended or now - self._end_seen >= LATE_AFTER:
                last = {reasons[-1] for reasons in self._ends.values()}
                reason = next((r for r in ("failed", "stopped") if r in last), "done")
                self.end(reason, self._reported_end)
                return True
        return closed > 0

    def end(self, reason: str, when: float) -> None:
        """End the run from outside, with what has arrived."""
        while self._order:
            self._close(heapq.heappop(self._order))
        if self._window is not None and self._last_end is not None and "samples_per_s" not in self.curves:
            self._measure(self._last_end, 0.0, 0.0)  # shorter than one window: one point is better than none
        self.ended, self.reason = max(when, self._since), reason

    def _has_ended(self, rank: int) -> bool:
        return len(self._ends.get(rank, ())) >= max(self._parts.values(), default=1)

    def _close(self, key: tuple[int, int]) -> None:
        reports = self._pending.pop(key)
        del self._arrived[key]
        step, later = key
        values = reports.values()
        for name in dict.fromkeys(name for r in values for name in r.values):
            self.values[name] = self._draw(name, step, ((r.values.get(name), r.samples) for r in values))
        if later:
            return
        self._closed = self.step = step
        self.steps += 1
        epochs = [r.epoch for r in values if r.epoch is not None]
        if epochs:
            self.epoch = max(epochs)
        losses = {rank: r.loss for rank, r in reports.items() if r.loss is not None}
        if losses:
            self.losses.update(losses)
            self.loss = self._draw("loss", step, ((r.loss, r.samples) for r in values))
        end = max(r.time for r in values)
        if self._last_end is None:
            if self.first_step_time is None:
                self.first_step_time = max(0.0, end - self.begun)
            self._window = (end, 0.0)
        else:
            end = max(end, self._last_end)  # clocks of hosts differ a little
            samples = sum(r.samples or 0.0 for r in values)
            for i, amount in enumerate((1.0, samples, end - self._last_end)):
                self._measured[i] += amount
            self._measure(end, samples, WINDOW)
        self._last_end = end

    def _draw(self, name: str, step: int, reports: Iterable[tuple[float | None, float | None]]) -> float:
        pairs = [(value, 1.0 if weight is None else weight) for value, weight in reports if value is not None]
        total = sum(weight for _, weight in pairs)
        # a rank without samples (an uneven last batch) has no say, unless none has
        mean = sum(value * weight for value, weight in pairs if weight) / total if total else _mean(pairs)
        curve = self.curves.get(name)
        if curve is None:
            if len(self.curves) >= MAX_CURVES + 2:
                return mean
            curve = self.curves[name] = Curve()
        low, high = math.nan, math.nan
        for value, _ in pairs:
            low, high = _least(low, value), _greatest(high, value)
        curve.append(step, mean, low, high)
        return mean

    def _measure(self, end: float, samples: float, window: float) -> None:
        assert self._window is not None
        start, before = self._window
        samples += before
        elapsed = end - start
        if elapsed <= 0 or elapsed < window:
            self._window = (start, samples)
            return
        self._window = (end, 0.0)
        if samples:
            rate = self.samples_per_s = samples / elapsed
            self.curves.setdefault("samples_per_s", Curve()).append(self.step, rate, rate, rate)


def _mean(pairs: list[tuple[float, float]]) -> float:
    return sum(value for value, _ in pairs) / len(pairs)


def _least(a: float, b: float) -> float:
    return b if a != a or b < a else a


def _greatest(a: float, b: float) -> float:
    return b if a != a or b > a else a


def number(wire: Mapping[str, object], name: str) -> float | None:
    """A number out of data that came over the wire, or None where there is none."""
    value = wire.get(name)
    return float(value) if isinstance(value, (int, float)) else None
