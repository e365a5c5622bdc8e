"""The dashboard: one panel in one place of the notebook, live while a run goes on, a picture when it is over."""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.dashboard import static
from nbdist.dashboard.frames import Chip
from nbdist.dashboard.pump import pump
from nbdist.errors import ClusterError
from nbdist.runs import Run
from nbdist.telemetry import Telemetry

if TYPE_CHECKING:
    from nbdist.dashboard.widget import PanelWidget

__all__ = ["ClusterLike", "Dashboard"]

logger = logging.getLogger(__name__)

SETTLE = 1.0  # seconds after the end of a run until its picture takes the panel's place, unless a cell ends before
WIDGET = "application/vnd.jupyter.widget-view+json"
NO_WIDGETS = (
    "The live panel needs ipywidgets and anywidget: in the kernel (pip install anywidget) and where the Jupyter server "
    "runs (pip install jupyterlab_widgets anywidget, then reload the page)."
)


class ClusterLike(Protocol):
    """What a panel asks of its cluster; all of it returns at once."""

    @property
    def telemetry(self) -> Telemetry: ...

    @property
    def world_size(self) -> int: ...

    def chips(self) -> Sequence[Chip]:
        """(rank, state, detail) of each rank; states: idle, running, waiting, dead, unknown."""

    def request_stop(self) -> None:
        """Ask for an end at the next step boundary; from any thread."""

    def is_running(self) -> bool:
        """Whether a cell runs on the ranks."""


_panels: weakref.WeakKeyDictionary[Telemetry, Dashboard] = weakref.WeakKeyDictionary()
_panels_lock = threading.Lock()


class Dashboard:
    """The live panel of a cluster: loss, throughput, progress, the state of each rank, Stop.

    Shown by being the last expression of a cell, it stays there and follows every run. When a run is over, a picture
    and a table take its place: they are what a saved notebook holds. A new panel of the same cluster freezes the old
    one. Without a notebook page nothing waits: an executed notebook holds the picture, a terminal prints the table.

    Parameters
    ----------
    cluster
        The cluster to watch; the active one by default.

    Raises
    ------
    ClusterError
        There is no active cluster.

    Examples
    --------
    >>> nbdist.Dashboard()
    """

    def __init__(self, cluster: ClusterLike | None = None) -> None:
        if cluster is None:
            from nbdist.cluster import active

            cluster = active()
            if cluster is None:
                raise ClusterError("No cluster to watch. Start one with %cluster start.")
        self.cluster = cluster
        self.telemetry = cluster.telemetry
        self._lock = threading.RLock()
        self._state = "new"  # new, live, static, closed; or text, without a kernel
        # ids of the outputs that show it. One each: a page draws an output anew when another takes the same id
        self._places: deque[str] = deque(maxlen=4)
        self._lost = False  # a page was loaded after the display: it does not know the display's id
        self._choice: str | None = None  # a run that was picked in the panel; None follows the newest
        self._ended: tuple[Run, float] | None = None
        self._given_up: Run | None = None
        self._printed: Run | None = None
        self._blocking = False
        self._widget: PanelWidget | None = None
        self._fallback_at = 0.0

    def __repr__(self) -> str:
        run = self.telemetry.current
        return f"<Dashboard of {self.cluster.world_size} ranks, {run.name if run else 'no run yet'}, {self._state}>"

    def _ipython_display_(self) -> None:
        shell = _shell()
        if shell is None or getattr(shell, "kernel", None) is None:
            self._show_text(shell)
            return
        with self._lock:
            if self._state == "closed":
                self._show(self._static_data())
                return
            again = self._state != "new"
            if not again:
                self._take_over()
                self._widget = self._make_widget()
                self._watch_cells(shell)
                self._blocking = True  # the cell that shows it
            self._state = "live"
            self._show(self._live_data())
        if not again:
            pump.add(self)

    def close(self) -> None:
        """Freeze the panel: its place keeps a picture of the newest run; threads and comm are given back."""
        with self._lock:
            if self._state == "closed":
                return
            shown, self._state = self._state in ("live", "static"), "closed"
            if shown:
                self._update(self._static_data())
            if self._widget is not None:
                self._widget.layout.close()  # a model of its own, with a comm
                self._widget.close()
        pump.remove(self)
        self._unwatch_cells()
        with _panels_lock:
            if _panels.get(self.telemetry) is self:
                del _panels[self.telemetry]

    def tick(self) -> float:
        """Bring the page up to date; called by the pump. Returns in how many seconds to call again, at the latest."""
        if self.telemetry.closed:
            self.close()
            return 0.0
        with self._lock:
            self._follow(at_once=False)
            if self._state == "live":
                if self._widget is None:
                    self._push_fallback()
                else:
                    self._widget.push(self._run(), self._chips(), self._is_running(), self._blocking)
        return 0.5

    def _run(self) -> Run | None:
        current = self.telemetry.current
        if self._choice is not None:
            return next((run for run in self.telemetry.runs if run.name == self._choice), current)
        return current

    def _follow(self, *, at_once: bool) -> None:
        """Swap the live panel and the picture as runs begin and end."""
        run = self.telemetry.current
        if run is None or self._state not in ("live", "static"):
            return
        if run.ended is None:
            self._ended = None
            if self._state == "static":
                self._state = "live"
                if self._lost and self._widget is not None and self._widget.views == 0:
                    self._lost = False
                    self._show(self._live_data())
                else:
                    self._update(self._live_data())
            return
        if self._state != "live":
            return
        now = time.monotonic()
        if self._ended is None or self._ended[0] is not run:
            self._ended, self._choice = (run, now), None
        if at_once or now - self._ended[1] >= SETTLE:
            self._state = "static"
            self._update(self._static_data())
            if at_once and self._lost:
                # the page that was loaded since cannot find the panel's place: the picture goes to the cell that ends
                self._lost = False
                self._show(self._static_data())

    def _before_cell(self, _info: object = None) -> None:
        self._blocking = True

    def _after_cell(self, _result: object = None) -> None:
        """A cell ends: what it has run must be in the notebook now, since an executor reads no further."""
        self._blocking = False
        run = self.telemetry.current
        if run is not None and run.ended is None and self._given_up is not run and not self._is_running():
            # the ranks' last words travel apart from the cell's reply, and may be behind it
            deadline = time.monotonic() + 1.0
            while self.telemetry.current is run and run.ended is None and time.monotonic() < deadline:
                time.sleep(0.01)
            self._given_up = run if run.ended is None else None
        if self._state == "text":
            if run is not None and run.ended is not None and run is not self._printed:
                self._printed = run
                print(self.telemetry.table())
            return
        with self._lock:
            self._follow(at_once=True)

    def _take_over(self) -> None:
        with _panels_lock:
            old = _panels.get(self.telemetry)
            _panels[self.telemetry] = self
        if old is not None and old is not self:
            old.close()

    def _make_widget(self) -> PanelWidget | None:
        try:
            from nbdist.dashboard.widget import PanelWidget
        except ImportError as error:
            logger.warning("%s (%s)", NO_WIDGETS, error)
            return None
        return PanelWidget(self.telemetry, self._hear)

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "stop":
            self.cluster.request_stop()
        elif kind == "show":
            newest = self.telemetry.current
            chosen = message.get("run")
            self._choice = None if newest is None or chosen == newest.name else chosen
        elif kind == "hello" and self._widget is not None:
            page = str(message.get("page"))
            if self._widget.page not in (None, page):
                self._lost = True
            self._widget.page = page
        pump.wake()

    def _chips(self) -> Sequence[Chip]:
        return [(rank, state, detail) for rank, state, detail in self.cluster.chips()]

    def _is_running(self) -> bool:
        return self.cluster.is_running()

    def _live_data(self) -> dict[str, Any]:
        if self._widget is None:
            return {**self._static_data(), "text/plain": f"{self.telemetry.table()}\n{NO_WIDGETS}"}
        self._widget.displayed()
        return {
            "text/plain": f"{self.telemetry.table()}\n{NO_WIDGETS}",
            WIDGET: {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id},
        }

    def _static_data(self) -> dict[str, Any]:
        return static.bundle(self.telemetry, self._run())

    def _push_fallback(self) -> None:
        now = time.monotonic()
        if now - self._fallback_at >= 2.0:
            self._fallback_at = now
            self._update(self._live_data())

    def _show(self, data: dict[str, Any]) -> None:
        from IPython.display import publish_display_data

        self._places.append(uuid.uuid4().hex)
        publish_display_data(data, transient={"display_id": self._places[-1]})

    def _update(self, data: dict[str, Any]) -> None:
        from IPython.display import publish_display_data

        for place in self._places:
            publish_display_data(data, transient={"display_id": place}, update=True)

    def _show_text(self, shell: Any) -> None:
        print(self.telemetry.table())
        if shell is not None and self._state == "new":
            self._take_over()
            self._state, self._printed = "text", self.telemetry.current
            self._watch_cells(shell)

    def _watch_cells(self, shell: Any) -> None:
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)

    def _unwatch_cells(self) -> None:
        shell = _shell()
        if shell is not None:
            for event, callback in (("pre_run_cell", self._before_cell), ("post_run_cell", self._after_cell)):
                if callback in shell.events.callbacks[event]:
                    shell.events.unregister(event, callback)


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()
