"""Watch a running cell for ranks that wait in vain."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from nbdist import hangs
from nbdist.records import HangReport

if TYPE_CHECKING:
    from nbdist.cells import Cell

__all__ = ["HANG_NOTICE_S", "Watch"]

HANG_NOTICE_S = 5.0
FATAL_S = 2.0  # a rank that has finished, or called something else, will never come
POLL_S = 0.5


class Watch:
    """Asks the ranks twice a second how far their collectives are, once a cell has run for a moment.

    A cell that waits for a rank which is still at work gets a notice; one that waits for a rank that cannot come any
    more is ended. ``report`` says what the ranks have been waiting for since ``FATAL_S``, where they are.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.report: HangReport | None = None
        self._thread = threading.Thread(target=self._run, name="nbdist-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        cluster, cell = self.cell.cluster, self.cell
        last: Any = None
        since = asked = time.monotonic()
        told: tuple[Any, ...] = ()
        while not cell.finished.wait(POLL_S) and cell.release is None:
            if cluster._client is None:
                return
            world = cluster.world
            answers = cluster.client.ask(world.engines, "progress", timeout=POLL_S)
            replies = {rank: answers.get(engine) or {} for rank, engine in enumerate(world.engines)}
            progress = {rank: reply.get("progress", {}) for rank, reply in replies.items()}
            running = {rank for rank, reply in replies.items() if reply.get("running")}
            inside = {rank: reply["inside"] for rank, reply in replies.items() if reply.get("inside")}
            now = time.monotonic()
            state = (progress, running, inside)
            if state != last or not hangs.stuck(progress, running, inside.keys()):
                last, since, self.report = state, now, None
                continue
            if now - since < FATAL_S or (self.report is not None and now - asked < FATAL_S):
                continue
            report, asked = self._ask_all(progress), now
            if cell.finished.is_set():
                return
            self.report = report
            if report is None:
                continue
            if report.is_fatal:
                cell.give_up(report)
                return
            known = (report.kind, report.missing, report.seq)
            if now - since >= HANG_NOTICE_S and known != told:
                told = known
                cell.notice(report)

    def _ask_all(self, progress: dict[int, Any]) -> HangReport | None:
        world = self.cell.cluster.world
        replies = self.cell.cluster.client.ask(world.engines, "collectives", timeout=1.0)
        states = {rank: replies[e] for rank, e in enumerate(world.engines) if replies.get(e) is not None}
        return hangs.diagnose(states, progress)
