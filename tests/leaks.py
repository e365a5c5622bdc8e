"""What a test run may not leave behind: processes, listening ports, temporary folders, shared memory.

Whether a process is ours is decided by a random tag in its environment, which every descendant inherits, and never by
its name: other people's clusters on the same machine are no business of a test run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

SHM = Path("/dev/shm")


def tagged(variable: str, value: str) -> list[psutil.Process]:
    """Give the living processes, without this one, that were started with ``variable=value`` in the environment."""
    wanted = f"{variable}={value}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it ended meanwhile, or is another user's
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if wanted in environ and process.pid != os.getpid() and alive(process):
                found.append(process)
    return found


def alive(process: psutil.Process) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def describe(process: psutil.Process) -> str:
    """Give pid, age, listening ports and command of a process on one line."""
    try:
        ports = sorted(listening(process))
        age = time.time() - process.create_time()
        command = " ".join(process.cmdline())[:160] or process.name()
    except psutil.Error:
        return f"process {process.pid} (ended meanwhile)"
    return f"process {process.pid}, {age:.0f} s old{f', listening on {ports}' if ports else ''}: {command}"


def listening(process: psutil.Process) -> set[int]:
    """Give the TCP ports on which a process listens."""
    return {c.laddr.port for c in process.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}


def shared_memory() -> set[str]:
    """Give the names in /dev/shm that belong to this user."""
    if not SHM.is_dir():
        return set()
    names = set()
    for path in SHM.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid():
                names.add(path.name)
    return names


def held_by_others(names: set[str], variable: str, value: str) -> set[str]:
    """Give those shared-memory names that a living process outside this test run has open or mapped."""
    ours = {process.pid for process in tagged(variable, value)} | {os.getpid()}
    held: set[str] = set()
    for process in psutil.process_iter():
        if process.pid not in ours:
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                held |= {name for name in names if str(SHM / name) in maps}
            with contextlib.suppress(OSError):
                links = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
                held |= {name for name in names if str(SHM / name) in links}
    return held


class Baseline:
    """What was there before the run; :meth:`leaks` names what came and stayed."""

    def __init__(self, variable: str, value: str, temporary: Path) -> None:
        self._tag = (variable, value)
        self._temporary = temporary
        self._shared_memory = shared_memory()
        self._ports = listening(psutil.Process())

    def leaks(self, patience: float = 5.0) -> list[str]:
        """Name what is left, after giving what was told to stop ``patience`` seconds to end."""
        deadline = time.monotonic() + patience
        while (left := list(self._find())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _find(self) -> Iterator[str]:
        yield from map(describe, tagged(*self._tag))
        for port in sorted(listening(psutil.Process()) - self._ports):
            yield f"port {port}, on which the test process itself still listens"
        for folder in sorted(self._temporary.glob("nbdist-*")):
            yield f"temporary folder {folder}"
        if new := shared_memory() - self._shared_memory:
            yield from (f"shared memory {SHM / name}" for name in sorted(new - held_by_others(new, *self._tag)))

    def end_processes(self, report: Callable[[str], object] = lambda line: None) -> None:
        """End by pid what was left, so that a leak of this run does not burden the machine."""
        processes = tagged(*self._tag)
        for process in processes:
            report(describe(process))
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=5)
