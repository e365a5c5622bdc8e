"""How the processes of a cluster are started: ipyparallel launchers, found by their entry points."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import psutil
import traitlets
from ipyparallel.cluster.launcher import EngineLauncher, LocalControllerLauncher, LocalProcessLauncher

__all__ = ["AgentLauncher", "ControllerLauncher", "clean_environment", "notices", "visible_gpus"]


class _Piped(LocalProcessLauncher):  # type: ignore[misc]  # ipyparallel is not typed
    """A local process that ends when our end of its standard input is closed, as the kernel does when we are killed."""

    def popen(self, stdout: Any) -> Popen[bytes]:
        keep = os.environ.get("NBDIST_KEEP") == "1" or bool(self.environment.get("NBDIST_KEEP") == "1")
        with open(self.output_file, "ab") as log, open(os.devnull, "rb") as null:
            process = Popen(
                self.args,
                stdin=null if keep and stdout is None else PIPE,
                stdout=stdout if stdout is not None else log,
                stderr=log,
                env=clean_environment({**os.environ, **self.get_env()}),
                cwd=self.work_dir,
                start_new_session=True,
            )
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

    order = traitlets.Dict(help="What the agent is told beside the usual.")
    on_event = traitlets.Any(help="Called with each report of the agent.")

    def find_args(self) -> list[str]:
        return [sys.executable, "-m", "nbdist.engine.agent"]

    def start(self, n: int) -> None:
        self.n = n
        process = self.popen(stdout=PIPE)
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

    def _listen(self, reports: Any) -> None:
        with reports:
            for line in reports:
                event = json.loads(line)
                if self.on_event is not None:
                    self.on_event(event)


STALE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Give the environment of engines: without the rank of some other job that the notebook itself may be part of."""
    return {k: v for k, v in environment.items() if k not in STALE and not k.startswith("TORCHELASTIC_")}


def notices(backend: str) -> list[str]:
    """Give one line for each of the user's settings that is not passed on to the ranks as it is."""
    found = []
    stale = [name for name in STALE if name in os.environ]
    if stale:
        found.append(f"{', '.join(stale)} of the notebook's environment ignored: the ranks get their own.")
    if backend == "gloo" and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found.append(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL lowered to INFO on the ranks: with it, building DDP on gloo ends the "
            "process. %cluster debug on checks collectives instead."
        )
    return found


def visible_gpus() -> int:
    """How many GPUs of this host a process may use, found without importing torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([d for d in chosen.split(",") if d.strip() and d.strip() != "-1"])
    proc = Path("/proc/driver/nvidia/gpus")
    return len(list(proc.iterdir())) if proc.is_dir() else 0
