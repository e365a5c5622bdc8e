"""How many messages a cell has sent to the notebook: its reply says so, and the notebook knows when it has them all.

ipykernel would tell of the begin and the end of each request; of a short cell, every message takes a tenth of its time.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["begin", "install", "sent"]

_lock = threading.Lock()  # a cell's streams are sent by another thread than its displays
_request = ""  # the request that the cell came in
_count = 0  # of its messages
_told = ""  # the last request whose reply said how much output it has


def install(kernel: Any) -> None:
    """Count what is sent, and publish that a request is over only where its reply does not say how much it sent."""
    send, publish = kernel.session.send, kernel._publish_status

    def counted(*args: Any, **kwargs: Any) -> Any:
        global _count
        message = send(*args, **kwargs)
        if message and message["parent_header"].get("msg_id") == _request:
            with _lock:
                _count += 1
        return message

    def publish_idle(status: str, channel: str, parent: Any = None) -> None:
        if status == "idle" and channel == "shell" and _id(kernel) != _told:
            publish(status, channel, parent)

    kernel.session.send = counted
    kernel._publish_status = publish_idle


def begin(kernel: Any) -> None:
    """Count from here on the output of the request that is being handled."""
    global _request, _count
    _request, _count = _id(kernel), 0


def sent() -> int:
    """Send what is still held back, and give the number of messages in all."""
    global _told
    sys.stdout.flush()
    sys.stderr.flush()
    with _lock:
        _told = _request
        return _count


def _id(kernel: Any) -> str:
    return str(kernel.get_parent("shell").get("header", {}).get("msg_id", ""))
