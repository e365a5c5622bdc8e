"""What goes to the page: numbered frames, whole now and then, else only what changed since the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbdist.runs import Run
from nbdist.telemetry import Telemetry, duration, time_left

__all__ = ["Chip", "Frame", "Frames", "head"]

Chip = tuple[int, str, str]  # rank, state, detail
Frame = tuple[dict[str, Any], bytes]

DRAWN = 8  # curves sent to the page


class Frames:
    """Frame after frame of one panel.

    A frame's points are float64 columns (x, mean, low, high) of each series named in its header, from `start` on: the
    page cuts its own columns there and appends. A frame applies to the one numbered before it; after a gap the page
    waits for a whole frame.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._run: str | None = None
        self._sent: dict[str, tuple[int, int, int]] = {}  # generation, points, values
        self.seq = 0

    def whole(self, run: Run | None) -> Frame:
        """All points, under the number of the last frame: whoever applies it can go on with the next."""
        with self._telemetry.lock:
            curves = _curves(run)
            series = [[name, 0, len(curve)] for name, curve in curves]
            data = b"".join(curve.columns() for _, curve in curves)
            return {"seq": self.seq, "whole": True, "series": series}, data

    def next(self, run: Run | None, *, whole: bool = False) -> Frame:
        """The next frame; whole if asked for, for another run, and after a thinning."""
        with self._telemetry.lock:
            self.seq += 1
            curves = _curves(run)
            last, self._sent = self._sent, {name: (c.generation, len(c), c.count) for name, c in curves}
            name, self._run = self._run, run.name if run else None
            if (
                whole
                or name != self._run
                or any(name in last and curve.generation != last[name][0] for name, curve in curves)
            ):
                return self.whole(run)
            series, parts = [], []
            for name, curve in curves:
                _, points, count = last.get(name, (0, 0, 0))
                if curve.count != count:
                    start = max(0, points - 1)  # the last point was still open
                    series.append([name, start, len(curve) - start])
                    parts.append(curve.columns(start))
            return {"seq": self.seq, "whole": False, "series": series}, b"".join(parts)


def _curves(run: Run | None) -> list[tuple[str, Any]]:
    return [] if run is None else list(run.curves.items())[:DRAWN]


def head(run: Run | None, chips: Sequence[Chip], ends: float = 0.0) -> dict[str, Any]:
    """The panel's text: progress, numbers, one line about what is going on, the time until the job `ends`."""
    limit = [f"job ends in: {time_left(ends)}"] if ends else []
    if run is None:
        status = "No run yet. %train, or a loop over nbdist.track(loader), is drawn here."
        return {"run": None, "status": status, "facts": limit}
    state = {
        "run": run.name,
        "step": run.step,
        "steps": run.steps,
        "total": run.total,
        "ended": run.ended is not None,
        "facts": [*(f"{k}: {v}" for k, v in _facts(run)), *limit],
        "note": run.note,
    }
    if run.ended is not None:
        state["status"] = run.reason
    elif run.steps == 0:
        state["status"] = f"first step… {_waits(run, chips)}"
    elif run.total is not None and (to_go := run.eta) is not None:
        state["status"] = f"{duration(to_go)} remaining"
    else:
        state["status"] = "running"
    return state


def _facts(run: Run) -> list[tuple[str, str]]:
    facts = [("step", f"{run.step:,} of {run.total:,}" if run.total else f"{run.step:,}")]
    if run.epoch is not None:
        facts.append(("epoch", f"{run.epoch} of {run.epochs:.3g}" if run.epochs else str(run.epoch)))
    if run.loss is not None:
        facts.append(("loss", f"{run.loss:.4g}"))
    if (rate := run.samples_per_s) is not None:
        facts.append(("samples/s", f"{_number(rate)} ({_number(rate / run.world_size)} per rank)"))
    elif (steps := run.steps_per_s) is not None:
        facts.append(("steps/s", _number(steps)))
    facts += [(name, f"{value:.4g}") for name, value in list(run.values.items())[:4]]
    facts.append(("elapsed", duration(run.elapsed)))
    if run.first_step_time is not None:
        facts.append(("first step", duration(run.first_step_time)))
    return facts


def _waits(run: Run, chips: Sequence[Chip]) -> str:
    doing = {rank: f"{state} {detail}".strip() for rank, state, detail in chips}
    waiting = run.waiting_for
    shown = [f"rank {rank} ({doing[rank]})" if rank in doing else f"rank {rank}" for rank in waiting[:3]]
    more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
    return f"waiting for {', '.join(shown)}{more}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
