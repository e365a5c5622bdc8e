"""Hold an interrupt back while things that belong together change."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Uninterrupted"]


class Uninterrupted:
    """Hold SIGINT back while the block runs, then deliver it."""

    def __enter__(self) -> None:
        self._came: list[tuple[int, FrameType | None]] = []
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # a handler that was not set from Python cannot be put back
            if handler is not None:
                signal.signal(signal.SIGINT, lambda signum, frame: self._came.append((signum, frame)))
                self._handler = handler

    def __exit__(self, *error: object) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._came and callable(self._handler):
            self._handler(*self._came[0])
