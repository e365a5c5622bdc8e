"""Records on their way from the training thread to the notebook: a bounded queue and the thread that empties it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields
from math import isfinite
from time import perf_counter
from typing import Any, Literal

import torch

from nbdist.records import RunEvent, StepRecord, to_wire

__all__ = ["FILLED_HERE", "OWN_FIELDS", "Publish", "Reason", "Recorder", "Run", "recorder"]

logger = logging.getLogger(__name__)

Publish = Callable[[dict[str, Any]], None]
Reason = Literal["done", "stopped", "failed"]

PERIOD = 0.15  # seconds between two batches of records
CAPACITY = 100_000  # records waiting to be sent; beyond it the oldest go
BATCH = 2_000  # records in one message
HELD = 10_000  # records that were sent and are held for a notebook that comes later

ODD_LOSS = (
    "nbdist: the loss of {run} is {loss} at step {step}, and the weights may be too. Load a checkpoint; then a lower "
    "lr, clip_grad_norm=1.0, or a look at that batch.\n"
)

FILLED_HERE = frozenset({"run", "rank", "time", "values"})
OWN_FIELDS = frozenset(f.name for f in fields(StepRecord)) - FILLED_HERE - {"step"}
WHOLE_NUMBERS = frozenset({"epoch", "samples", "memory_allocated", "memory_peak"})


class Run:
    """One curve: the steps of a loop on this rank, under a name that all ranks share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.step = 0
        self.epoch: int | None = None
        self.passes = -1  # full passes over the loader before this one
        self.open = False
        self.touched = 0.0

    def begin(
        self, *, total: int | None = None, epoch: int | None = None, epochs: float | None = None, note: str = ""
    ) -> None:
        """Say that steps will follow; said again when the run goes on, with the new ``total``."""
        self.epoch = epoch
        self.open = True
        self.touched = time.time()
        recorder.open_runs[self.name] = self
        recorder.event("begin", self, total=total, epochs=epochs, note=note)

    def record(self, step: dict[str, Any], ended: float | None = None, number: int | None = None) -> None:
        """Put a step that has ended on the queue: columns of StepRecord and the user's names in one dict."""
        if recorder.odd:
            recorder.tell_of_odd_loss()
        self.step = self.step + 1 if number is None else number
        self.touched = time.time() if ended is None else ended
        recorder.put((self.name, self.step, self.touched, self.epoch, step))

    def end(self, reason: Reason) -> None:
        """Say how the run ended, once."""
        if self.open:
            self.open = False
            recorder.open_runs.pop(self.name, None)
            recorder.event("end", self, reason=reason)


class Recorder:
    """What this rank records: the step under way, the runs of this cell, and the queue to the notebook."""

    def __init__(self) -> None:
        self.publish: Publish | None = None
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.cell = "cell"
        self.step: dict[str, Any] | None = None  # the step that log() and span() add to
        self.queue: deque[Any] = deque()
        self.dropped = 0
        self.odd = ""  # what the user has to be told of a loss, by the thread whose output is the cell's
        self._told_of: set[str] = set()  # runs whose loss was odd
        self.open_runs: dict[str, Run] = {}
        self.sent: deque[dict[str, Any]] = deque()  # the last payloads, numbered
        self.number = 0  # of the last payload
        self._held = 0
        self._draining = threading.Lock()
        self._flusher: threading.Thread | None = None
        self._forget_cell()

    def _forget_cell(self) -> None:
        self.tracked = 0
        self.loop: Run | None = None  # the cell's latest track run
        self.alone: Run | None = None  # the run of log() calls outside of any loop
        self.alone_at: float | None = None
        self.by_loader: dict[int, tuple[Any, Run]] = {}

    def start(self, publish: Publish, rank: int, world_size: int) -> None:
        """Publish from now on, by one thread of this process."""
        self.rank, self.world_size = rank, world_size
        self.publish = publish
        if self._flusher is not None:
            return
        self._flusher = threading.Thread(target=_flush_for_ever, name="nbdist-meters", daemon=True)
        os.register_at_fork(after_in_child=self._forget_channel)
        self._flusher.start()

    def _forget_channel(self) -> None:
        """Let a forked process (a loader's worker) discard its records: it has neither the thread nor the channel."""
        self.publish = None
        self.queue.clear()
        self._draining = threading.Lock()

    def run_of(self, loader: Any) -> Run:
        """Give the run of this loader in this cell, a new one at first."""
        known = self.by_loader.get(id(loader))
        if known is not None and known[0]() is loader:
            run = known[1]
        else:
            self.tracked += 1
            run = Run(self.cell if self.tracked == 1 else f"{self.cell}.{self.tracked}")
            try:
                reference: Any = weakref.ref(loader)
            except TypeError:  # a list has no weak references; holding it until the cell ends keeps its id its own
                reference = lambda: loader  # noqa: E731
            self.by_loader[id(loader)] = (reference, run)
        self.loop = run
        return run

    def log_alone(self, step: dict[str, Any]) -> None:
        number = step.pop("step", None)
        if self.loop is not None:
            # the name must not hang on how many ranks log after the loop: rank 0 alone often does
            self.put((self.loop.name, self.loop.step, time.time(), self.loop.epoch, step))
            return
        run = self.alone
        if run is None:
            run = self.alone = Run(self.cell)
            run.begin()
        now = perf_counter()
        if self.alone_at is not None:
            step.setdefault("step_time", now - self.alone_at)
        self.alone_at = now
        if number is not None:
            run.step = int(number) - 1
        run.record(step)

    def tell_of_odd_loss(self) -> None:
        """Say once a run that its loss is no number any more; from the training thread."""
        text, self.odd = self.odd, ""
        if text:
            sys.stderr.write(text)

    def close_runs(self, reason: Reason) -> None:
        for run in list(self.open_runs.values()):
            run.end(reason)
        self._forget_cell()

    def event(self, kind: str, run: Run, **more: Any) -> None:
        self.put(
            RunEvent(
                kind=kind,
                run=run.name,
                rank=self.rank,
                world_size=self.world_size,
                time=run.touched,
                step=run.step,
                epoch=run.epoch,
                **more,
            )
        )

    def put(self, item: Any) -> None:
        if self.publish is None:
            return
        queue = self.queue
        if len(queue) >= CAPACITY:
            with contextlib.suppress(IndexError):  # the flusher may have emptied it meanwhile
                queue.popleft()
                self.dropped += 1
        queue.append(item)

    def drain(self) -> None:
        """Publish all that is queued, in order. One thread at a time: payloads must not overtake each other."""
        with self._draining:
            publish = self.publish
            if publish is None:
                return
            steps: list[Any] = []
            # what comes while we are at it waits for the next round: a fast producer must not keep flush() busy
            for _ in range(len(self.queue)):
                try:
                    item = self.queue.popleft()
                except IndexError:
                    break
                if isinstance(item, RunEvent):
                    self._publish_steps(publish, steps)
                    self._send(publish, {"kind": "event", "event": to_wire(item)}, 1)
                    steps = []
                    continue
                steps.append(item)
                if len(steps) >= BATCH:
                    self._publish_steps(publish, steps)
                    steps = []
            self._publish_steps(publish, steps)

    def _publish_steps(self, publish: Publish, steps: list[Any]) -> None:
        if not steps:
            return
        _read_tensors(step for *_, step in steps)
        dropped, self.dropped = self.dropped, 0
        records = [self._wire(*step) for step in steps]
        payload = {"kind": "steps", "rank": self.rank, "dropped": dropped, "records": records}
        self._send(publish, payload, len(steps) + dropped)

    def _send(self, publish: Publish, payload: dict[str, Any], lost: int) -> None:
        self.number += 1
        payload["number"] = self.number
        self._hold(payload)
        try:
            publish(payload)
        except Exception:  # whatever the channel has: the run goes on, and the loss is counted and shown
            logger.warning("records of this rank could not be sent", exc_info=True)
            self.dropped += lost
            self.number -= 1  # a cell waits for those that were sent

    def _hold(self, payload: dict[str, Any]) -> None:
        """Keep the payload for ``%cluster attach``: while no notebook listens, nobody else does."""
        self.sent.append(payload)
        self._held += _size(payload)
        while self._held > HELD:
            self._held -= _size(self.sent.popleft())

    def _wire(self, run: str, number: int, ended: float, epoch: int | None, step: dict[str, Any]) -> dict[str, Any]:
        # to_wire(StepRecord(...)) by hand: at thousands of steps a second this thread competes with the training one
        wire: dict[str, Any] = {"run": run, "step": number, "rank": self.rank, "time": ended}
        values: dict[str, float] = {}
        if epoch is not None:
            wire["epoch"] = epoch
        for name, value in step.items():
            if name not in OWN_FIELDS:
                values[name] = value
            elif value is not None:
                wire[name] = int(value) if name in WHOLE_NUMBERS else value
        loss = wire.get("loss")
        if loss is not None and not isfinite(loss) and run not in self._told_of:
            self._told_of.add(run)
            self.odd = ODD_LOSS.format(run=run, loss=loss, step=number)
        samples, seconds = wire.get("samples"), wire.get("step_time")
        if samples is not None and seconds:
            wire.setdefault("samples_per_s", samples / seconds)
        if values:
            wire["values"] = values
        return wire


def _size(payload: dict[str, Any]) -> int:
    return len(payload["records"]) if payload["kind"] == "steps" else 1


def _read_tensors(steps: Iterable[dict[str, Any]]) -> None:
    """Fetch the values that are still on a GPU, all of one flush in one copy a device."""
    waiting: dict[torch.device, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for step in steps:
        for name, value in step.items():
            if isinstance(value, torch.Tensor):
                waiting.setdefault(value.device, []).append((step, name, value))
    for found in waiting.values():
        numbers = torch.stack([value.detach().reshape(()).double() for *_, value in found]).tolist()
        for (step, name, _), number in zip(found, numbers, strict=True):
            step[name] = number


def _flush_for_ever() -> None:
    while True:
        time.sleep(PERIOD)
        recorder.drain()


recorder = Recorder()
