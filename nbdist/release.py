"""Bring ranks back to the prompt: signal, wait until their groups are quiet, cut, and never lose a reply.

A socket that is shut while gloo is sending on it loses the rank (see ``nbdist.engine.world.process_group``). So ranks
that can stop by themselves are stopped first, and the others are cut only when none of their collectives has moved
for a while.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nbdist.errors import ClusterError
from nbdist.hangs import is_waiting
from nbdist.ranks import named

if TYPE_CHECKING:
    from nbdist.cells import Cell

__all__ = ["Release", "stop_button"]

POLL_S = 0.02
QUIET_S = 0.06
QUIET_TOGETHER_S = 2.0  # when all ranks are in the same collective, which may just be large or slow
DEAF_S = 0.5  # in torch.distributed after the signal: it waits there for other ranks
FELLOWS_S = 0.15  # for other ranks to fail by themselves: what all do wrong, they do a moment apart
BOUNDARY_S = 5.0  # for a training loop to come to the step that the ranks have agreed on
LOST_S = 3.0  # after the cut; all but those that gloo has forgotten are out in a moment
STUBBORN_S = 2.0  # after which what a rank is in may be a wait all the same, and the notebook says who does not come


@contextlib.contextmanager
def stop_button(pressed: Callable[[], None]) -> Iterator[None]:
    """Call ``pressed`` when the kernel is interrupted while the block runs, instead of raising at whatever line it is.

    In the main thread; elsewhere no interrupt arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Release:
    """One attempt to end a cell on the ranks that still run it, in a thread of its own.

    ``gentle``: ask training loops to end at a step boundary, the same on every rank, before anything is interrupted.
    ``hopeless``: the ranks are known to wait for what cannot come, so a collective that all are in is not just slow.
    """

    def __init__(self, cell: Cell, reason: str, *, gentle: bool, hopeless: bool = False) -> None:
        self.cell = cell
        self.reason = reason
        self.gentle = gentle
        self.hopeless = hopeless
        self.killed: set[int] = set()  # ranks that were ended by force
        self.cut = False
        self.active = True
        self.insisted = 0
        self._cut_at = math.inf
        self._told_lost = False
        self._states: dict[int, Any] = {}
        self._insist = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nbdist-release", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def insist(self) -> None:
        """Somebody pressed Stop again."""
        self.insisted += 1
        self._insist.set()

    def places(self) -> str:
        """Say where the ranks were when they were asked to come out."""
        texts: dict[str, list[int]] = {}
        for engine, rank in self.cell.engines.items():
            state = self._states.get(engine) or {}
            text = f"at {state['line']}" if state.get("line") else "finished or not answering"
            if state.get("line") and state["called"]:
                text += f" in {state['called']}"
            texts.setdefault(text, []).append(rank)
        return "; ".join(f"{named(ranks)} {text}" for text, ranks in texts.items())

    def _run(self) -> None:
        try:
            client = self.cell.cluster.client
            if self.reason.endswith("failed"):
                self._wait(FELLOWS_S)
            self._states = client.ask(self.cell.remaining, "status", timeout=0.3) if not self.gentle else {}
            if self.gentle and self._stop_at_boundary():
                return
            self._interrupt()
        except ClusterError:
            return  # the cluster was stopped meanwhile
        finally:
            self.active = False
            self.cell.wake()

    def _wait(self, seconds: float) -> None:
        """Wait for the ranks to come by themselves, unless somebody insists."""
        deadline = time.monotonic() + seconds
        while self.cell.remaining and time.monotonic() < deadline and not self._insist.is_set():
            time.sleep(POLL_S)

    def _tell(self, line: str) -> None:
        self.cell.page.write(line + "\n", "stderr")

    def _ask(self, op: str, timeout: float = 0.5, **content: Any) -> dict[int, Any]:
        return self.cell.cluster.client.ask(self.cell.remaining, op, timeout, **content)

    def _stop_at_boundary(self) -> bool:
        """Agree on a step at which every training loop ends; False when there are none, or they do not come there."""
        asked = self._ask("stop_request", timeout=1.0)
        holding = {engine: reply for engine, reply in asked.items() if reply and reply["active"]}
        if not holding:
            return False
        if len(holding) < len(asked):
            # some are in a loop and some are not: nothing to agree on, so let nobody wait for the word
            self._ask("stop_at", step=2**62)
            return False
        step = max(reply["step"] for reply in holding.values())
        self._ask("stop_at", step=step)
        self._wait(BOUNDARY_S)
        if not self.cell.remaining:
            self.cell.stopped_at = step
            return True
        if self._insist.is_set():
            self._tell(f"Stop again: {named(self.cell.remaining.values())} interrupted inside the step")
        return False

    def _interrupt(self) -> None:
        self._insist.clear()
        waiting = set(self.cell.remaining)
        last: Any = None
        beat: Any = None
        since = moved = still = time.monotonic()
        told = False
        while self.cell.remaining:
            if self._insist.is_set():
                self._insist.clear()
                if self.insisted >= 2:
                    self._kill()
                    return
                waiting = set(self.cell.remaining)
                self._tell(f"{named(self.cell.remaining.values())} interrupted again; one more Stop ends the process")
            waiting = self._deliver(waiting)
            replies = self._ask("progress")
            now = time.monotonic()
            state = {engine: reply["progress"] if reply else None for engine, reply in replies.items()}
            pulses = {engine: reply["pulse"] if reply else None for engine, reply in replies.items()}
            if state != last:
                last, since = state, now
            elif self._blocked(state) and now - since > (QUIET_TOGETHER_S if self._together(state) else QUIET_S):
                self._cut()
                last, moved = None, now
            if pulses != beat:
                beat, still = pulses, now
            elif not self.cut and now - max(still, since) > self._patience(replies):
                self._cut()
                last = None
            if not told and now - moved > STUBBORN_S + DEAF_S and self.cell.remaining and not self._blocked(state):
                told = True
                self._tell(f"{named(self.cell.remaining.values())} still running; interrupt again to force")
            if self._blocked(state) and now - self._cut_at > LOST_S and not self._told_lost:
                self._tell_lost()
                if self.cell.cluster.repair_mode == "auto":
                    self._kill()
                    return
            time.sleep(POLL_S)

    def _tell_lost(self) -> None:
        """A rank was cut and yet waits: gloo forgets to wake a sender whose peer died in the middle of a transfer."""
        self._told_lost = True
        self.insisted = max(1, self.insisted)
        left = self.cell.cluster.collective_timeout - (time.monotonic() - self._cut_at)
        self._tell(
            f"{named(self.cell.remaining.values())} held in a transfer that another rank broke off: back by itself, "
            f"with its state, when the collective times out in {left:.0f} s; Stop ends it now and puts an empty rank "
            "in its place"
        )

    def _deliver(self, engines: set[int]) -> set[int]:
        """Interrupt each engine once; give those that have not begun the cell yet, or do not answer."""
        waiting = engines & set(self.cell.remaining)
        replies = self.cell.cluster.client.ask(waiting, "interrupt", timeout=0.5, times=1 + self.insisted)
        return {engine for engine in waiting if not (replies.get(engine) or {}).get("running")}

    def _blocked(self, state: dict[int, Any]) -> bool:
        """Whether a rank is inside a collective that is not complete."""
        return any(is_waiting(progress or {}) for progress in state.values())

    def _patience(self, replies: dict[int, Any]) -> float:
        """How long a rank may sit in one native call after the signal until it is taken for a wait.

        A send, a receive and the wait for either are in no counter of collectives.
        """
        if not any(replies.values()):
            return math.inf  # frozen: nobody there to be released
        return DEAF_S if any(reply["inside"] for reply in replies.values() if reply) else STUBBORN_S

    def _together(self, state: dict[int, Any]) -> bool:
        """Whether every rank of the world is in the same collective, which may then just be large or slow."""
        if self.hopeless:
            return False
        world = self.cell.cluster.world
        return len(state) == world.size and len({str(progress) for progress in state.values()}) == 1

    def _cut(self) -> None:
        cluster = self.cell.cluster
        if not self.cut:
            self._cut_at = time.monotonic()
        self.cut = cluster.world.broken = True
        cluster.client.ask(cluster.world.engines, "cut", timeout=1.0, generation=cluster.world.generation)

    def _kill(self) -> None:
        """End the ranks that do not come: their state is lost, the others' is not."""
        cluster = self.cell.cluster
        self._tell(f"{named(self.cell.remaining.values())} did not come back and will be replaced")
        self._cut()
        self.killed = set(self.cell.remaining.values())
        for engine in self.cell.remaining:
            cluster.kill(engine)
