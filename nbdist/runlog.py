"""The run log: one JSON line a record, written behind the training's back."""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

__all__ = ["RunLog", "read_runs"]

logger = logging.getLogger(__name__)

FLUSH_EVERY = 1.0  # seconds
MAX_WAITING = 200_000  # lines kept in memory while the disk does not take them


class RunLog:
    """Write each run to `<folder>/<run>.jsonl` from one background thread, flushed about once a second.

    A line is the record as it came, with `"kind": "step"` or `"kind": "event"`. A disk that takes nothing more warns
    once, and training goes on.

    Parameters
    ----------
    folder
        Made with the first line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broken = False
        self._queue: queue.Queue[tuple[str, Mapping[str, object]] | None] = queue.Queue(MAX_WAITING)
        self._files: dict[str, IO[str]] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def path(self, run: str) -> Path:
        """Where a run is written: its name, with what a file name may not hold replaced."""
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._+-]+', '-', run).strip('.') or 'run'}.jsonl"

    def put(self, run: str, line: Mapping[str, object]) -> None:
        """Hand over one line; never waits."""
        if self.broken or self._closing.is_set():
            return
        if self._thread is None:
            self._start()
        try:
            self._queue.put_nowait((run, line))
        except queue.Full:
            self._fail(f"{MAX_WAITING} lines are waiting for the disk")

    def close(self, timeout: float = 5.0) -> None:
        """Write what is left, and close the files."""
        with self._lock:
            self._closing.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                return  # the disk hangs; the thread is a daemon
            thread.join(timeout)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._write, name="nbdist-run-log", daemon=True)
                self._thread.start()

    def _write(self) -> None:
        item = self._queue.get()
        while item is not None:
            self._closing.wait(FLUSH_EVERY)  # gather what comes meanwhile, so that a flush has something to do
            lines: dict[str, list[str]] = {}
            while item is not None:
                run, line = item
                lines.setdefault(run, []).append(json.dumps(line, default=str) + "\n")
                if self._queue.empty():
                    break
                item = self._queue.get()
            self._append(lines)
            if item is not None:
                item = self._queue.get()
        self._close_files()

    def _append(self, lines: Mapping[str, list[str]]) -> None:
        if self.broken:
            return
        try:
            for run, text in lines.items():
                file = self._files.get(run)
                if file is None:
                    self._close_files()  # one run at a time: a long session holds one open file
                    self.folder.mkdir(parents=True, exist_ok=True)
                    file = self._files[run] = open(self.path(run), "a", encoding="utf-8")  # noqa: SIM115
                file.writelines(text)
                file.flush()
        except OSError as error:
            self._fail(f"{error.strerror or error} ({error.filename or self.folder})")

    def _close_files(self) -> None:
        while self._files:
            _, file = self._files.popitem()
            try:
                file.close()
            except OSError as error:
                self._fail(str(error.strerror or error))

    def _fail(self, why: str) -> None:
        if not self.broken:
            self.broken = True
            logger.warning("The run log in %s stopped: %s. Training goes on without it.", self.folder, why)


def read_runs(folder: Path) -> Iterator[dict[str, object]]:
    """Give what the run logs of a folder hold as the payloads that ranks send, oldest run first.

    A last line that was cut off (the writer was killed) is passed over.
    """
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        with open(path, encoding="utf-8") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if line.pop("kind", "") == "event":
                    yield {"kind": "event", "event": {**line, "kind": line.get("event")}}
                else:
                    yield {"kind": "steps", "rank": line.get("rank"), "records": [line]}
