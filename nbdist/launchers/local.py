"""A controller and a node agent on this machine, and what both have in common: they end with this process."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import psutil
import traitlets
from ipyparallel.cluster.launcher import EngineLauncher, LocalControllerLauncher, LocalProcessLauncher

from nbdist import host

__all__ = ["AgentLauncher", "ControllerLauncher"]


class _Piped(LocalProcessLauncher):  # type: ignore[misc]  # ipyparallel is not typed
    """A local process that ends when our end of its standard input is closed, as the kernel does when we are killed."""

    def popen(self, stdout: Any) -> Popen[bytes]:
        kept = self.environment.get("NBDIST_KEEP") == "1"
        return self.adopt(
            host.spawn(
                self.args,
                self.get_env(),
                log=Path(self.output_file),
                stdout=stdout,
                has_input=not kept or stdout is not None,
                folder=self.work_dir,
            )
        )

    def adopt(self, process: Popen[bytes]) -> Popen[bytes]:
        """Watch over a process that was started already."""
        self._popen_process = process
        self.pid = process.pid
        self.process = psutil.Process(process.pid)
        self.notify_start(process.pid)
        self._start_waiting()
        return process

    def tell(self, **command: Any) -> None:
        """Send one command to the process."""
        process = self._popen_process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                process.stdin.write((json.dumps(command) + "\n").encode())
                process.stdin.flush()

    def close_input(self) -> None:
        """Tell the process to end, and that cleaning up is ours."""
        self.tell(op="stop")
        self.hang_up()

    def hang_up(self) -> None:
        """Close our end: a kept process goes on without it."""
        process = self._popen_process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


class ControllerLauncher(_Piped, LocalControllerLauncher):  # type: ignore[misc]  # ipyparallel is not typed
    """ipyparallel's controller, under our watch."""

    controller_cmd = traitlets.List([sys.executable, "-m", "nbdist.controller"])

    def start(self) -> None:
        self.popen(stdout=None)

    async def stop(self) -> None:
        self.close_input()
        if self.environment.get("NBDIST_KEEP") == "1":
            await super().stop()
        else:
            await self.join(timeout=10)


class AgentLauncher(_Piped, EngineLauncher):  # type: ignore[misc]  # ipyparallel is not typed
    """One node agent on this host, which forks the engines.

    ``on_event`` is called, from a thread of the launcher, with each report of the agent (see ``nbdist.engine.agent``).
    """

    patience = 60.0

    order = traitlets.Dict(help="What the agent is told beside the usual.")
    options = traitlets.Dict(help="For launchers of other hosts.")
    on_event = traitlets.Any(help="Called with each report of the agent.")
    spawned = traitlets.Any(help="The agent's process, where it was started before ipyparallel was imported.")

    def find_args(self) -> list[str]:
        return list(host.AGENT)

    def start(self, n: int) -> None:
        self.n = n
        process = self.popen(stdout=PIPE) if self.spawned is None else self.adopt(self.spawned)
        order = {
            "n": n,
            "world_size": n,
            "url_file": self.connection_files["engine"],
            "profile_dir": self.profile_dir,
            "run_dir": self.profile_dir,
            "host": socket.gethostname(),
            "engine_args": list(self.engine_args),
            **self.order,
        }
        self.tell(**order)
        threading.Thread(target=self._listen, args=(process.stdout,), name="nbdist-agent", daemon=True).start()

    async def stop(self) -> None:
        self.close_input()
        await super().stop()

    async def abandon(self) -> None:
        """End the agent; returns at once."""
        self.close_input()

    def place(self, taken: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Give node and local rank for one more rank."""
        used = {local_rank for _, local_rank in taken}
        return 0, next(local_rank for local_rank in itertools.count() if local_rank not in used)

    def _listen(self, reports: Any) -> None:
        with reports:
            for line in reports:
                event = json.loads(line)
                if self.on_event is not None:
                    self.on_event(event)
