"""Where a step's time goes: laps of one training step, on the CPU's clock or by CUDA events.

A lap is the time since the last one. On a GPU the laps are events on the stream, read when they have passed, one step
or more later: reading them at once would wait for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for", "exposed_communication"]

PHASES = ("data_wait", "h2d", "forward", "backward", "optimizer")
Emit = Callable[[dict[str, Any], float], None]


class Clock(Protocol):
    """What the Trainer asks of a clock."""

    def begin(self) -> None:
        """Count from here: nothing that came before belongs to the next step."""

    def skip(self) -> None:
        """Leave the time since the last lap to no phase."""

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to ``phase``."""

    def finish(self, step: dict[str, Any], emit: Emit) -> None:
        """End the step: ``emit(step, unix_time)`` is called with its seconds by phase, now or when they are known."""

    def settle(self) -> None:
        """Emit what is still unknown, waiting for it."""


class CpuClock:
    """Laps by ``perf_counter``: operations on a CPU have ended when they return."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._ended = perf_counter()
        self._laps: list[tuple[str, float]] = []

    def skip(self) -> None:
        self._laps.append(("", perf_counter()))

    def lap(self, phase: str) -> None:
        # a step has five and more: what can wait until its end does
        self._laps.append((phase, perf_counter()))

    def finish(self, step: dict[str, Any], emit: Emit) -> None:
        seconds: dict[str, float] = {}
        before = began = self._ended
        for phase, at in self._laps:
            if phase:
                seconds[phase] = seconds.get(phase, 0.0) + at - before
            before = at
        self._laps.clear()
        now = self._ended = perf_counter()
        step["step_time"] = whole = now - began
        step["other"] = whole - sum(seconds.values())
        step.update(seconds)
        emit(step, time.time())

    def settle(self) -> None:
        pass


class CudaClock:
    """Laps by events on the current stream; the wait for data by the CPU's clock, as far as the GPU stood still."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, list[tuple[str, Any]], float, float, dict[str, Any], Emit]] = deque()
        self.begin()

    def begin(self) -> None:
        self._end = self._mark()
        self._laps: list[tuple[str, Any]] = []
        self._data_wait = 0.0
        self._last = perf_counter()

    def skip(self) -> None:
        self._last = perf_counter()
        self._laps.append(("", self._mark()))

    def lap(self, phase: str) -> None:
        now = perf_counter()
        if phase == "data_wait":
            self._data_wait += now - self._last
        self._last = now
        self._laps.append((phase, self._mark()))

    def finish(self, step: dict[str, Any], emit: Emit) -> None:
        self._waiting.append((self._end, self._laps, self._data_wait, time.time(), step, emit))
        self._end = self._laps[-1][1] if self._laps else self._end
        self._laps, self._data_wait = [], 0.0
        while len(self._waiting) > 1 and self._last_event(0).query():
            self._emit()

    def settle(self) -> None:
        while self._waiting:
            self._last_event(0).synchronize()
            self._emit()

    def _last_event(self, index: int) -> Any:
        begin, laps, *_ = self._waiting[index]
        return laps[-1][1] if laps else begin

    def _emit(self) -> None:
        begin, laps, data_wait, ended, step, emit = self._waiting.popleft()
        seconds: dict[str, float] = {}
        before = begin
        for phase, event in laps:
            seconds[phase] = seconds.get(phase, 0.0) + before.elapsed_time(event) / 1000
            before = event
        seconds.pop("", None)
        if "data_wait" in seconds:
            # the host may have waited while the GPU was still at work on the step before
            seconds["data_wait"] = min(seconds["data_wait"], data_wait)
        step["step_time"] = whole = begin.elapsed_time(before) / 1000
        step["other"] = whole - sum(seconds.values())
        step.update(seconds)
        emit(step, ended)

    @staticmethod
    def _mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_for(device: torch.device) -> Clock:
    """Give the clock that tells the truth about work on ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def exposed_communication(model: nn.Module, steps: int) -> float | None:
    """Give the seconds of a recent backward pass that were communication alone, as DDP has measured them.

    Parameters
    ----------
    steps : int
        Steps between two calls: DDP is told to time one of so many.
    """
    if not isinstance(model, DDP):
        return None
    if model.device.type == "cpu":
        # DDP times each 100th step of its own accord: seldom for a large model; on a GPU more would wait for it
        model._set_ddp_runtime_logging_sample_rate(max(1, steps))
    data = model._get_ddp_logging_data()
    communication: float | None = data.get("backward_comm_time")
    overlap: float | None = data.get("backward_compute_comm_overlap_time")
    if not communication or overlap is None:
        return None
    return max(0.0, (communication - overlap) / 1e9)
