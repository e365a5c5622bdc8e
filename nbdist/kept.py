"""Clusters that outlive their notebook: written down when they start with ``--keep``, found by ``%cluster attach``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from nbdist.channel import reachable
from nbdist.errors import ClusterError
from nbdist.profiles import state_home

__all__ = ["AgentLine", "find", "forget", "write_down"]

ELSEWHERE_S = 3.0
ENDED = "has ended. %cluster start begins anew."


def write_down(name: str, entry: dict[str, Any]) -> None:
    """Remember a kept cluster under its name, readable by its owner alone."""
    folder = state_home() / "kept"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{name}.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(entry, file)


def forget(name: str) -> None:
    """Forget a kept cluster that has ended."""
    (state_home() / "kept" / f"{name}.json").unlink(missing_ok=True)


def find(name: str = "") -> tuple[str, dict[str, Any]]:
    """Give name and entry of a kept cluster that runs: the only one, or the one called ``name``.

    Raises
    ------
    ClusterError
        Naming those that there are, or why this one cannot be used.
    """
    running = {}
    for path in sorted((state_home() / "kept").glob("*.json")):
        try:
            entry = json.loads(path.read_text())
            trouble = _trouble(entry)
        except (OSError, ValueError, KeyError) as error:
            entry, trouble = {}, f"cannot be told from its note {path}: {type(error).__name__}: {error}"
        if not trouble:
            running[path.stem] = entry
            continue
        if trouble == ENDED:
            forget(path.stem)
            _clear_away(entry)
        if path.stem == name:
            raise ClusterError(f"The kept cluster {name!r} {trouble}")
    if name in running:
        return name, running[name]
    known = f"Kept: {', '.join(running)}." if running else "No kept cluster runs. Start one with %cluster start --keep."
    if name:
        raise ClusterError(f"No kept cluster {name!r}. {known}")
    if len(running) != 1:
        raise ClusterError(known if not running else f"Say which one: %cluster attach NAME. {known}")
    return next(iter(running.items()))


def _trouble(entry: dict[str, Any]) -> str:
    """Say why a cluster cannot be used: its controller does not live, or is another process or another user's."""
    if entry.get("hostname", socket.gethostname()) != socket.gethostname():  # a job's, on another host of its
        return reachable(entry["exchange"]["host"], entry["exchange"]["port"], ELSEWHERE_S) and ENDED
    try:
        process = psutil.Process(entry["controller"])
        if process.status() == psutil.STATUS_ZOMBIE or abs(process.create_time() - entry["controller_born"]) > 1.0:
            return ENDED
        owners = {process.uids().real, os.stat(entry["run_dir"]).st_uid}
    except (psutil.NoSuchProcess, FileNotFoundError):
        return ENDED
    return "" if owners == {os.getuid()} else "belongs to somebody else."


def _clear_away(entry: dict[str, Any]) -> None:
    """End what a lost controller has left of a cluster on this host, and remove its folder."""
    run_dir = Path(entry.get("run_dir", ""))
    if entry.get("job") or not run_dir.is_dir() or run_dir.stat().st_uid != os.getuid():
        return
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is another user's
            if process.environ().get("NBDIST_RUN_DIR") == str(run_dir):
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=ELSEWHERE_S)
    shutil.rmtree(run_dir, ignore_errors=True)


class AgentLine:
    """A line to the agent of a kept cluster, in the place of the launcher that a later notebook does not have."""

    def __init__(
        self, run_dir: Path, on_event: Callable[[dict[str, Any]], None], on_end: Callable[[Any], None]
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(run_dir / "agent.sock"))
        except OSError as error:
            self._socket.close()
            raise ClusterError(f"The node agent of the kept cluster does not answer: {error.strerror}.") from None
        self._hung_up = False
        self._thread = threading.Thread(target=self._listen, args=(on_event, on_end), name="nbdist-agent", daemon=True)
        self._thread.start()

    def tell(self, **command: Any) -> None:
        """Send one command to the agent."""
        self._socket.sendall((json.dumps(command) + "\n").encode())

    def close_input(self) -> None:
        """Tell the agent to end with all its engines."""
        self.tell(op="stop")

    def hang_up(self) -> None:
        """Close the line and leave the agent as it is."""
        self._hung_up = True
        with contextlib.suppress(OSError):  # the agent has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()

    def _listen(self, on_event: Callable[[dict[str, Any]], None], on_end: Callable[[Any], None]) -> None:
        with self._socket.makefile("rb") as reports:
            for line in reports:
                on_event(json.loads(line))
        if not self._hung_up:
            on_end({})
