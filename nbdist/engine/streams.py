"""Standard output and error of a rank: quick to leave, bounded in rate, and readable after a crash."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from ipykernel.iostream import OutStream

__all__ = ["RankStream", "follow_descriptors"]

BURST_BYTES = 16 * 2**20
RATE_BYTES_PER_S = 4 * 2**20


class RankStream(OutStream):
    """What a rank's ``print`` writes to.

    ipykernel's stream would put a pipe on descriptors 1 and 2, and what a dying process wrote there would be lost with
    its reader; here they stay on log files (see ``follow_descriptors``). A print in an endless loop is slowed to a
    rate that the notebook can take, since every queue on the way there is unbounded.
    """

    flush_interval = 0.02

    def __init__(self, session: Any, pub_thread: Any, name: str) -> None:
        super().__init__(session, pub_thread, name, watchfd=False)  # type: ignore[no-untyped-call]
        self._rank_pid = os.getpid()
        self._descriptor = 2 if name == "stderr" else 1
        self._budget = float(BURST_BYTES)
        self._budget_at = time.monotonic()
        self._unflushed = False

    def write(self, string: str) -> int:
        if os.getpid() != self._rank_pid:
            # a loader's worker, or what a cell forked: it may not use the rank's sockets
            os.write(self._descriptor, string.encode())
            return len(string)
        self._budget -= len(string)
        if self._budget < 0:
            self._wait_for_budget()
        self._unflushed = True
        return super().write(string) or 0

    def flush(self) -> None:
        """Send what was written, and wait until it is gone; ipykernel would wait for its thread without need too."""
        if self._unflushed:
            self._unflushed = False
            super().flush()  # type: ignore[no-untyped-call]

    def _wait_for_budget(self) -> None:
        now = time.monotonic()
        self._budget = min(BURST_BYTES, self._budget + (now - self._budget_at) * RATE_BYTES_PER_S)
        self._budget_at = now
        if self._budget < 0:
            time.sleep(min(1.0, -self._budget / RATE_BYTES_PER_S))


def follow_descriptors(log: Path, local_rank: int, streams: dict[str, Any], every: float = 0.1) -> None:
    """Forward what libraries and child processes write to descriptors 1 and 2 into the rank's streams."""

    def follow() -> None:
        files = {name: open(log / f"rank-{local_rank}.{name}", "rb") for name in streams}  # noqa: SIM115
        for file in files.values():
            file.seek(0, os.SEEK_END)
        while True:
            time.sleep(every)
            for name, file in files.items():
                data = file.read(2**20)
                if data:
                    streams[name].write(data.decode(errors="replace"))

    threading.Thread(target=follow, name="nbdist-descriptors", daemon=True).start()
