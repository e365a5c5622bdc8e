"""The one thread that feeds all panels."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.dashboard.live import Dashboard

__all__ = ["Pump", "pump"]

logger = logging.getLogger(__name__)

PERIOD = 0.1  # seconds between two rounds: at most ten frames a second, however fast the records come
MOST_S = 0.5  # between two rounds
DUTY = 0.03  # of one core, at most: on a machine whose ranks use all cores, a frame is paid by a step


class Pump:
    """Call each panel's `tick` when something changed, at most every `PERIOD` seconds; no panel, no thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._panels: dict[Dashboard, object] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def add(self, panel: Dashboard) -> None:
        """Feed a panel from now on."""
        with self._lock:
            self._panels[panel] = panel.telemetry.subscribe(self.wake)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nbdist-dashboard", daemon=True)
                self._thread.start()
        self.wake()

    def remove(self, panel: Dashboard) -> None:
        """Stop feeding a panel."""
        with self._lock:
            unsubscribe = self._panels.pop(panel, None)
        if callable(unsubscribe):
            unsubscribe()
        self.wake()

    def wake(self) -> None:
        """Something changed; from any thread."""
        self._changed.set()

    def _run(self) -> None:
        pause = PERIOD
        while True:
            self._changed.wait(pause)
            self._changed.clear()
            with self._lock:
                panels = tuple(self._panels)
                if not panels:
                    self._thread = None
                    return
            began, used = time.monotonic(), time.thread_time()
            pause = 0.5
            for panel in panels:
                try:
                    pause = min(pause, panel.tick() or PERIOD)
                except Exception:
                    # a panel that cannot be drawn must take neither the others nor the training with it
                    logger.exception("A panel failed and is no longer updated.")
                    self.remove(panel)
            took = time.monotonic() - began
            # a slow page or kernel gets fewer frames, never a queue of them
            time.sleep(max(PERIOD - took, took, min(MOST_S, (time.thread_time() - used) / DUTY)))


pump = Pump()
