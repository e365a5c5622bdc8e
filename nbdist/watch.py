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
    more is ended.
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
        since = time.monotonic()
        told: tuple[Any, ...] = ()
        while not cell.finished.wait(POLL_S) and cell.release is None:
            if cluster._client is None:
                return
            world = cluster.world
            replies = cluster.client.ask(world.engines, "progress", timeout=POLL_S)
            progress = {
                rank: replies[engine]["progress"] if replies.get(engine) else {}
                for rank, engine in enumerate(world.engines)
            }
            running = {rank for rank, engine in enumerate(world.engines) if (replies.get(engine) or {}).get("running")}
            now = time.monotonic()
            state = (progress, running)
            if state != last or not hangs.stuck(progress, running):
                last, since = state, now
                continue
            if now - since < FATAL_S:
                continue
            report = self._ask_all(progress)
            if report is None or cell.finished.is_set():
                continue
            if report.is_fatal:
                self.report = report
                cell.give_up(report)
                return
            known = (report.kind, report.missing, report.seq)
            if now - since >= HANG_NOTICE_S and known != told:
                told = known
                self.report = report
                cell.notice(report)

    def _ask_all(self, progress: dict[int, Any]) -> HangReport | None:
        world = self.cell.cluster.world
        replies = self.cell.cluster.client.ask(world.engines, "collectives", timeout=1.0)
        states = {rank: replies[e] for rank, e in enumerate(world.engines) if replies.get(e) is not None}
        return hangs.diagnose(states, progress)
