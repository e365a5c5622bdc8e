"""Hold an interrupt back while things that belong together change."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

# The functions of ``signal`` look every handler up in an enum of two, and fail for all others by an exception: twenty
# microseconds of a training step, where the two system calls below take one.
SIGINT = int(signal.SIGINT)


class Interrupts:
    """``with interrupts:`` holds SIGINT back while the block runs, then delivers it to the handler of before.

    Within ``watched()`` the handler is swapped once, for many blocks.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._holding = False
        self._came: tuple[int, FrameType | None] | None = None
        self._swapped_here = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Swap SIGINT's handler for a longer time."""
        swapped = self._swap()
        try:
            yield
        finally:
            if swapped:
                self._restore()

    def __enter__(self) -> None:
        self._swapped_here = self._swap()
        self._holding = True

    def __exit__(self, *error: object) -> None:
        self._holding = False
        handler = self._handler
        if self._swapped_here:
            self._restore()
        came, self._came = self._came, None
        if came is not None and callable(handler):
            handler(*came)

    def _swap(self) -> bool:
        if self._handler is not None:
            return False
        handler = _signal.getsignal(SIGINT)
        if handler is None:  # one that was not set from Python cannot be put back
            return False
        self._handler = handler
        try:
            _signal.signal(SIGINT, self._receive)
        except ValueError:  # only the main thread is interrupted, and only it may set a handler
            self._handler = None
            return False
        except BaseException:  # an interrupt that had come before: nothing was swapped
            self._handler = None
            raise
        return True

    def _restore(self) -> None:
        _signal.signal(SIGINT, self._handler)
        self._handler = None

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._holding:
            self._came = signum, frame
        elif callable(self._handler):
            self._handler(signum, frame)
