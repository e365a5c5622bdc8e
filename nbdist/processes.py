"""The processes of a cluster: launched through ipyparallel, or found running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from subprocess import PIPE
from typing import Any, Protocol

import psutil

from nbdist import host
from nbdist.errors import ClusterError
from nbdist.kept import AgentLine
from nbdist.profiles import locate

__all__ = ["Found", "Launched", "Processes", "log_tail"]

Listener = Callable[[dict[str, Any]], None]


class Processes(Protocol):
    """Controller and node agent, as the cluster sees them."""

    def connection_info(self, deadline: float) -> dict[str, Any]:
        """Give what a client needs to connect."""

    def tell(self, **command: Any) -> None:
        """Send a command to the node agent."""

    def abandon(self) -> None:
        """End what is left after the controller or the agent has gone; returns at once."""

    def stop(self) -> None:
        """End everything and wait for it."""


class Launched:
    """Controller and agent that this process starts, on an event loop of their own, and that end with it."""

    def __init__(
        self,
        run_dir: Path,
        *,
        profile: str | os.PathLike[str] | None,
        n: int,
        keep: bool,
        timeout: float,
        on_agent: Listener,
        on_agent_end: Listener,
        on_controller_end: Listener,
    ) -> None:
        self.run_dir = run_dir
        self.timeout = timeout
        self._cluster: Any = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="nbdist-launch", daemon=True).start()
        source = locate(profile)
        shutil.copytree(source, run_dir, dirs_exist_ok=True)
        environment = {"NBDIST_RUN_DIR": str(run_dir), "IPYTHONDIR": str(run_dir / "ipython")}
        if keep:
            environment["NBDIST_KEEP"] = "1"
        # the agent imports torch while this process imports ipyparallel and the controller starts
        spawned = None
        if source == locate("local"):
            spawned = host.spawn(host.AGENT, environment, log=run_dir / "log" / "agent.log", stdout=PIPE)
            spawned.stdin.write(f'{{"prepare": {n}}}\n'.encode())  # type: ignore[union-attr]
            spawned.stdin.flush()  # type: ignore[union-attr]
        engines = {"environment": environment, "order": {"keep": keep}, "on_event": on_agent, "spawned": spawned}
        try:
            self._wait(self._launch(n, engines, on_agent_end, on_controller_end), time.monotonic() + timeout)
        except BaseException:
            if spawned is not None:
                spawned.kill()
                spawned.wait()
            raise

    async def _launch(
        self, n: int, engines: dict[str, Any], on_agent_end: Listener, on_controller_end: Listener
    ) -> None:
        import ipyparallel as ipp

        log = logging.getLogger("nbdist.ipyparallel")
        log.propagate = False
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        cluster = self._cluster = ipp.Cluster(
            n=n, profile_dir=str(self.run_dir), cluster_file="", shutdown_atexit=False, parent=None, log=log
        )
        await cluster.start_controller(environment=engines["environment"])
        cluster.controller.on_stop(on_controller_end)
        await cluster.start_engines(n, **engines)
        cluster.engine_set.on_stop(on_agent_end)

    @property
    def controller(self) -> psutil.Process:
        """The controller's process."""
        process: psutil.Process = self._cluster.controller.process
        return process

    def connection_info(self, deadline: float) -> dict[str, Any]:
        left = max(0.1, deadline - time.monotonic())
        info: dict[str, Any] = self._wait(self._cluster.controller.get_connection_info(timeout=left), deadline)
        return info["client"]  # type: ignore[no-any-return]

    def tell(self, **command: Any) -> None:
        self._cluster.engine_set.tell(**command)

    def abandon(self) -> None:
        cluster = self._cluster
        if cluster.engines:
            cluster.engine_set.close_input()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(cluster.controller.pid, signal.SIGKILL)  # its schedulers outlive it otherwise

    def stop(self) -> None:
        if self._cluster is not None:
            asyncio.run_coroutine_threadsafe(self._cluster.stop_cluster(), self._loop).result(15)
        self._loop.call_soon_threadsafe(self._loop.stop)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _wait(self, coroutine: Any, deadline: float) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(max(0.1, deadline - time.monotonic()))
        except TimeoutError:
            raise ClusterError(f"The controller did not start in {self.timeout:g} s.{log_tail(self.run_dir)}") from None
        except RuntimeError as error:
            raise ClusterError(f"The controller did not start: {error}.{log_tail(self.run_dir)}") from None


class Found:
    """Controller and agent of a kept cluster, which another notebook has started."""

    def __init__(self, entry: dict[str, Any], *, on_agent: Listener, on_agent_end: Listener) -> None:
        self.run_dir = Path(entry["run_dir"])
        self.controller = psutil.Process(entry["controller"])
        self._line = AgentLine(self.run_dir, on_agent, on_agent_end)

    def connection_info(self, deadline: float) -> dict[str, Any]:
        path = next((self.run_dir / "security").glob("ipcontroller-*-client.json"))
        info: dict[str, Any] = json.loads(path.read_text())
        return info

    def tell(self, **command: Any) -> None:
        self._line.tell(**command)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._line.close_input()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.controller.pid, signal.SIGKILL)

    def stop(self) -> None:
        self.abandon()
        self._line.hang_up()
        with contextlib.suppress(psutil.Error):
            self.controller.wait(10)
        shutil.rmtree(self.run_dir, ignore_errors=True)


def log_tail(run_dir: Path) -> str:
    """Give the end of the controller's log, to be put under an error."""
    texts = []
    for path in sorted((run_dir / "log").glob("ipcontroller*.log")):
        with contextlib.suppress(OSError):
            texts.append(path.read_text(errors="replace")[-1500:])
    text = "".join(texts).strip()
    return "\n  " + text.replace("\n", "\n  ") if text else ""
