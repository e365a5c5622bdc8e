"""Stop at an agreed step: the same boundary on every rank, without a collective per step.

The training thread calls ``enter`` before each step. To stop, the notebook asks every rank's control thread
(``request_stop``): from then on no step begins there, and the answer tells how many have begun. The largest answer S
is sent back to all (``stop_at``): each rank goes on up to S steps, so that no rank waits in a collective for one that
has stopped before it, and ends there. A request counts for the whole cell: a rank that was not in its loop yet when
the request came stops at S as well, once it gets there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

__all__ = ["StepGate", "StepStop", "current_gate"]

log = logging.getLogger(__name__)

SLICE = 0.1  # seconds; a SIGINT that another thread took is seen by the waiting one after at most this long
PATIENCE = 10.0  # seconds; a notebook that asked and then went away must not hold the run for ever


class StepStop(KeyboardInterrupt):
    """The notebook's Stop, at the agreed step: all ranks raise it at the same boundary, so the group is whole."""


class StepGate:
    """Counts the steps that have begun, and holds the training thread while the ranks agree where to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: object | None = None  # the loop under the gate
        self._started = 0
        self._requested = False
        self._limit: int | None = None
        self._decided = threading.Event()

    @property
    def active(self) -> bool:
        """True while a loop runs under this gate."""
        return self._owner is not None

    @contextlib.contextmanager
    def run(self, started: int) -> Iterator[StepGate]:
        """Hold the gate for one loop whose steps are counted from ``started``."""
        loop = object()
        with self._lock:
            if self._owner is not None:
                raise RuntimeError("a loop of this rank is under the gate already")
            self._owner, self._started = loop, started
        try:
            yield self
        finally:
            with self._lock:
                # a generator that was left half-way in a cell before may be closed only now: the gate is another's
                if self._owner is loop:
                    self._owner = None

    def enter(self) -> bool:
        """Begin a step; False when the agreed step has been reached and none may begin."""
        with self._lock:
            if not self._requested:
                self._started += 1
                return True
        return self._enter_after_request()

    def request_stop(self) -> dict[str, bool | int]:
        """Let no step begin until ``stop_at`` has come; tell how many have begun. Called by another thread."""
        with self._lock:
            # one flag and one count under one lock: a step that begins after this answer would not be in it
            self._requested = True
            return {"active": self.active, "step": self._started if self.active else 0}

    def stop_at(self, step: int) -> None:
        """Let the loop go on until ``step`` steps have begun. Called by another thread."""
        with self._lock:
            self._requested = True
            self._limit = step
        self._decided.set()

    def reset(self) -> None:
        """Forget the request, and the loops that were left half-way: a new cell begins."""
        with self._lock:
            self._owner = None
            self._requested = False
            self._limit = None
        self._decided.clear()

    def _enter_after_request(self) -> bool:
        deadline = time.monotonic() + PATIENCE
        while not self._decided.wait(SLICE):
            if time.monotonic() > deadline:
                log.warning("asked to stop, but not told where within %g s: going on", PATIENCE)
                with self._lock:
                    self._requested = False
                break
        with self._lock:
            if self._limit is not None and self._started >= self._limit:
                return False
            self._started += 1
            return True


def current_gate() -> StepGate:
    """Give this process's gate; ``active`` tells whether a loop is under it."""
    return _gate


_gate = StepGate()
