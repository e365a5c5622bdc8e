"""The stages of a start, shown in place."""

from __future__ import annotations

import sys
import time
from types import TracebackType

__all__ = ["StartProgress"]


class StartProgress:
    """Shows one line that changes while a cluster starts, and leaves nothing when it is ready."""

    def __init__(self) -> None:
        from nbdist.page import Page

        self._page = Page()
        self._began = time.monotonic()
        self._display: str | None = None

    def __call__(self, stage: str) -> None:
        line = f"{time.monotonic() - self._began:4.1f} s  {stage}"
        if not self._page.is_rich:
            sys.stdout.write(line + "\n")
        elif self._display is None:
            self._display = self._page.display({"text/plain": line}, {})
        else:
            self._page.update(self._display, {"text/plain": line})

    def __enter__(self) -> StartProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._page.closed = True
