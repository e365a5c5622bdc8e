"""The place in the notebook where a cell's output goes, also from other threads and after the cell has ended."""

from __future__ import annotations

import sys
import threading
import uuid
from typing import Any

__all__ = ["Page"]


class Page:
    """Output of one cell of this notebook.

    In the cell's own thread it goes where a ``print`` of that cell would go (so that ``%%capture`` sees it); from any
    other thread, or later, it is sent with the cell's header, and the front end puts it into the same cell.
    """

    def __init__(self) -> None:
        from IPython.core.getipython import get_ipython

        self._shell = get_ipython()
        self._kernel = getattr(self._shell, "kernel", None)
        self._thread = threading.current_thread()
        self._parent = self._kernel.get_parent("shell") if self._kernel is not None else None
        self.closed = False

    @property
    def is_rich(self) -> bool:
        """Whether there is a front end that can show and update displays."""
        return self._kernel is not None

    @property
    def _direct(self) -> bool:
        return self._kernel is None or (not self.closed and threading.current_thread() is self._thread)

    def write(self, text: str, stream: str = "stdout") -> None:
        """Append text to one of the cell's streams."""
        if self._direct:
            target = sys.stderr if stream == "stderr" else sys.stdout
            target.write(text)
            target.flush()
        else:
            self._send("stream", {"name": stream, "text": text})

    def display(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str | None = None) -> str:
        """Show a mime bundle; give the id under which it can be updated."""
        display_id = display_id or uuid.uuid4().hex
        self._publish("display_data", data, metadata, display_id)
        return display_id

    def update(self, display_id: str, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Replace a display in place."""
        if self.is_rich:
            self._publish("update_display_data", data, metadata or {}, display_id)

    def _publish(self, kind: str, data: dict[str, Any], metadata: dict[str, Any], display_id: str) -> None:
        if self._direct:
            if self._shell is None:
                sys.stdout.write(str(data.get("text/plain", "")) + "\n")
                return
            self._shell.display_pub.publish(
                data, metadata, transient={"display_id": display_id}, update=kind == "update_display_data"
            )
        else:
            self._send(kind, {"data": data, "metadata": metadata, "transient": {"display_id": display_id}})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        kernel: Any = self._kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent, ident=kind.encode())
