"""The widget behind a panel: what travels over its comm, and what the page says back."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from nbdist.dashboard.frames import Chip, Frame, Frames, head
from nbdist.dashboard.panels import bokehjs, bokehjs_version, panel
from nbdist.runs import Run
from nbdist.telemetry import Telemetry

__all__ = ["PanelWidget"]

HERE = Path(__file__).parent
WHOLE_EVERY = 5.0  # seconds between whole frames, for a page that missed one and cannot ask: its kernel is busy
UNHEARD_EVERY = 0.5  # the same while no page has said hello yet
BOKEHJS_AT = (1.0, 3.0, 9.0, 27.0)  # seconds after the display at which BokehJS is sent to a page that cannot ask


class PanelWidget(anywidget.AnyWidget):
    """Header, figures and Stop of one panel.

    All is sent from one thread, in `push`. BokehJS (0.35 MB) is no part of the widget's saved state: it goes to a page
    that asks, to one that reloads, and unasked to one that has no way to ask because a cell keeps the kernel busy.
    """

    _esm = (HERE / "widget.js").read_text(encoding="utf-8")
    _css = (HERE / "widget.css").read_text(encoding="utf-8")

    key = traitlets.Unicode().tag(sync=True)
    kernel = traitlets.Unicode().tag(sync=True)
    version = traitlets.Unicode().tag(sync=True)
    bokehjs = traitlets.Bytes(b"").tag(sync=True)
    figures = traitlets.Unicode("[]").tag(sync=True)
    frame = traitlets.Dict().tag(sync=True)
    data = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, telemetry: Telemetry, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._frames = Frames(telemetry)
        self._telemetry = telemetry
        self._on_message = on_message
        self._embedding = False
        self._series: list[str] = []
        self._last: dict[str, Any] = {}
        self._shown: Run | None = None
        self._version = -1
        self._whole_at = 0.0
        self._displayed_at: float | None = None
        self._bokehjs_sent = 0
        self.page: str | None = None  # the page that last said hello
        self.views = 0
        self._wants_whole = self._wants_bokehjs = False
        super().__init__(key=uuid.uuid4().hex, kernel=_kernel_id(), version=bokehjs_version())
        self.add_figures(["loss", "samples_per_s"])
        if self.comm is not None and hasattr(self.comm, "_reply_subshell_for"):
            # ipykernel 7.4 sends what a page says to the shell that last used the comm, which a cell may keep busy
            self.comm._reply_subshell_for = lambda data, default: default
        self.on_msg(self._hear)

    def add_figures(self, series: Sequence[str]) -> None:
        """Have a figure for each of these curves."""
        new = [name for name in series if name not in self._series]
        if new:
            self._series += new
            items = json.loads(self.figures) + [panel(name, self._telemetry.world_size) for name in new]
            self.figures = json.dumps(items)

    def displayed(self) -> None:
        """Note that a page is about to show the widget."""
        if self._displayed_at is None:
            self._displayed_at = time.monotonic()

    def push(self, run: Run | None, chips: Sequence[Chip], running: bool, blocking: bool) -> bool:
        """Send what changed; from one thread only. Returns True if anything was sent."""
        now = time.monotonic()
        self._send_bokehjs(now)
        if run is not None:
            self.add_figures(list(run.curves)[:8])
        heard = self.page is not None
        whole = self._wants_whole or run is not self._shown or now - self._whole_at >= WHOLE_EVERY
        if not heard:
            if now - self._whole_at < UNHEARD_EVERY:
                return False
            whole = True
        state = {
            "head": head(run, chips, self._telemetry.ends),
            "chips": [list(chip) for chip in chips],
            "runs": [r.name for r in self._telemetry.runs[-50:]],
            "running": running,
            "blocking": blocking,
            "dropped": self._telemetry.dropped,
        }
        if self._telemetry.version == self._version and state == self._last and not whole:
            return False
        self._version = self._telemetry.version
        self._shown = run
        frame, data = self._frames.next(run, whole=whole)
        if frame["whole"]:
            self._whole_at, self._wants_whole = now, False
        else:
            state = {name: value for name, value in state.items() if value != self._last.get(name)}
        self._last = {**self._last, **state}
        self.send({"kind": "frame", **frame, **state}, [data])
        return True

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Give the state; all of it includes every point so far, for a page that (re)loads the model."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if key is None and not self._embedding:
            state["frame"], state["data"] = self._whole()
            if self.comm is not None:  # a page asks; while the comm is being opened, whoever records the state listens
                state["bokehjs"] = bokehjs()
        return state

    def _get_embed_state(self, drop_defaults: bool = False) -> Any:
        self._embedding = True
        try:
            return super()._get_embed_state(drop_defaults=drop_defaults)
        finally:
            self._embedding = False

    def _whole(self) -> Frame:
        frame, data = self._frames.whole(self._shown)
        return {**frame, **self._last}, data

    def _send_bokehjs(self, now: float) -> None:
        unasked = (
            self.page is None
            and self._displayed_at is not None
            and self._bokehjs_sent < len(BOKEHJS_AT)
            and now - self._displayed_at >= BOKEHJS_AT[self._bokehjs_sent]
        )
        if unasked or self._wants_bokehjs:
            self._wants_bokehjs = False
            self._bokehjs_sent += unasked
            self.send({"kind": "bokehjs", "version": self.version}, [bokehjs()])

    def _hear(self, _widget: object, message: dict[str, Any], _buffers: object) -> None:
        """Take a message of the page, on the main thread or on a subshell's: note it, and let the sender act."""
        kind = message.get("kind")
        if kind == "hello":
            self._wants_whole = True
            self._wants_bokehjs = self._wants_bokehjs or not message.get("bokehjs")
        elif kind == "resync":
            self._wants_whole = True
        elif kind == "views":
            self.views = int(message.get("count", 0))
        elif kind == "stop":
            self.send({"kind": "stopping"})  # so that the page need not fall back on an interrupt
        self._on_message(message)


def _kernel_id() -> str:
    """The id under which the Jupyter server knows this kernel, or nothing."""
    from ipykernel.connect import get_connection_file

    try:
        match = re.fullmatch(r"kernel-(.+)\.json", Path(get_connection_file()).name)
    except RuntimeError:  # no kernel: a terminal
        return ""
    return match[1] if match else ""
