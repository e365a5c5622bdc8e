"""The processes of a cluster: launched through ipyparallel, or found running."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from nbdist import host
from nbdist.channel import FILE, ExchangeAddress
from nbdist.errors import ClusterError
from nbdist.kept import AgentLine
from nbdist.lines import ExchangeLine
from nbdist.profiles import locate

if TYPE_CHECKING:
    from nbdist.client import RankClient

__all__ = ["Found", "Launched", "Processes", "dry_run", "log_tail"]

STOP_ALL_S = 30.0
STOP_S = 3.0  # for agents on other hosts to say that they have ended

Listener = Callable[[dict[str, Any]], None]


class Processes(Protocol):
    """Controller and node agents, as the cluster sees them."""

    theirs: bool  # a job that somebody started without us, and that we only visit
    one_host: bool  # all ranks are on the notebook's own host
    n: int
    timeout: float

    @property
    def skew(self) -> float:
        """How far the clock of the controller's host is ahead of the notebook's, in seconds."""

    def connection_info(self, deadline: float) -> dict[str, Any]:
        """Give what a client needs to connect."""

    def tell(self, **command: Any) -> None:
        """Send a command to the node agent, or to that of one ``node`` of several."""

    def place(self, taken: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Give node and local rank for one more rank, where those in ``taken`` are in use."""

    def revive(self, node: int) -> None:
        """Start the agent of a host again that was lost."""

    def go_on(self, at_least: int) -> int:
        """Make do with the hosts that have come; give how many ranks they take, or 0 where that is too few."""

    def leave(self, client: RankClient) -> None:
        """Take down what only this visit needed, on ranks that stay."""

    def end_theirs(self, client: RankClient) -> None:
        """End what was started without us."""

    def abandon(self) -> None:
        """End what is left after the controller or the agent has gone; returns at once."""

    def stop(self) -> None:
        """End everything and wait for it."""

    def hang_up(self) -> None:
        """Let go of the cluster, which goes on."""


class Launched:
    """Controller and agent that this process starts, on an event loop of their own, and that end with it."""

    def __init__(
        self,
        run_dir: Path,
        *,
        profile: str | os.PathLike[str] | None,
        n: int | None,
        keep: bool,
        timeout: float | None,
        on_agent: Listener,
        on_agent_end: Listener,
        on_controller_end: Listener,
        options: Mapping[str, Any],
    ) -> None:
        self.run_dir = run_dir
        self.timeout = timeout or 60.0
        self.one_host = True
        self.theirs = False
        self.n = n or 0
        self._cluster: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nbdist-launch", daemon=True)
        self._thread.start()
        source = locate(profile)
        shutil.copytree(source, run_dir, dirs_exist_ok=True)
        run_dir.chmod(0o700)  # copytree gives it the mode of the profile's folder
        environment = {"NBDIST_RUN_DIR": str(run_dir), "IPYTHONDIR": str(run_dir / "ipython")}
        if keep:
            environment["NBDIST_KEEP"] = "1"
        # the agent imports torch while this process imports ipyparallel and the controller starts
        spawned = None
        if source == locate("local"):
            spawned = host.spawn(host.AGENT, environment, log=run_dir / "log" / "agent.log", stdout=PIPE)
            spawned.stdin.write(f'{{"prepare": {n}}}\n'.encode())  # type: ignore[union-attr]
            spawned.stdin.flush()  # type: ignore[union-attr]
        engines = {
            "environment": environment,
            "order": {"keep": keep},
            "on_event": on_agent,
            "spawned": spawned,
            "options": dict(options),
        }
        try:
            launching = self._launch(n, timeout, engines, on_agent_end, on_controller_end)
            self._wait(launching, time.monotonic() + self.timeout)
        except BaseException:
            if spawned is not None:
                spawned.kill()
                spawned.wait()
            self.stop()
            raise

    async def _launch(
        self,
        n: int | None,
        timeout: float | None,
        engines: dict[str, Any],
        on_agent_end: Listener,
        on_controller_end: Listener,
    ) -> None:
        cluster = self._cluster = _configured(self.run_dir, n)
        kind = cluster.engine_launcher_class
        environment = dict(engines["environment"])
        patience: float = getattr(kind, "patience", 60.0)
        self.timeout = timeout or patience
        if hasattr(kind, "make_plan"):
            self.one_host = False
            setting = kind(parent=cluster, options=engines["options"]).settings
            try:
                self.n = kind.make_plan(n, setting).n
            except ValueError as error:
                raise ClusterError(str(error)) from None
            address = await asyncio.to_thread(kind.controller_address, setting)
            cluster.controller_ip = cluster.controller_location = address
            environment["NBDIST_EXCHANGE"] = address
            engines["environment"] = {}  # theirs comes from the profile; the rest is of this host only
        elif n is None:
            self.n = host.visible_gpus() or 2
        await cluster.start_controller(environment=environment)
        cluster.controller.on_stop(on_controller_end)
        if not engines["environment"]:
            del engines["environment"]
        await cluster.start_engines(self.n, **engines)
        cluster.engine_set.on_stop(on_agent_end)

    @property
    def skew(self) -> float:
        return 0.0  # the same host

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

    def place(self, taken: Iterable[tuple[int, int]]) -> tuple[int, int]:
        where: tuple[int, int] = self._cluster.engine_set.place(taken)
        return where

    def revive(self, node: int) -> None:
        if self.one_host:
            raise ClusterError("The node agent ended, and with it every rank. %cluster start begins anew.")
        self._cluster.engine_set.revive(node)

    def go_on(self, at_least: int) -> int:
        if self.one_host:
            return 0
        left: int = self._cluster.engine_set.go_on(at_least)
        self.n = left or self.n
        return left

    def leave(self, client: RankClient) -> None:
        """Do nothing: these ranks end with us, or are kept with their group."""

    def end_theirs(self, client: RankClient) -> None:
        """Do nothing: all of it is ours."""

    def abandon(self) -> None:
        cluster = self._cluster
        if cluster.engines:
            asyncio.run_coroutine_threadsafe(cluster.engine_set.abandon(), self._loop)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(cluster.controller.pid, signal.SIGKILL)  # its schedulers outlive it otherwise

    def stop(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(STOP_ALL_S)
            self.hang_up()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def hang_up(self) -> None:
        """Leave what was started as it is: agents that are to be kept go on without their launcher's pipe."""
        if not self._loop.is_closed():
            if self._cluster is not None and self._cluster.engines:
                self._cluster.engine_set.hang_up()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _stop(self) -> None:
        # a start that was interrupted may be about to make the next process: first it has to have ended
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        if self._cluster is None:
            return
        if not self.one_host:
            await self._cluster.stop_engines()  # agents on other hosts say through the controller that they have ended
        await self._cluster.stop_cluster()

    def _wait(self, coroutine: Any, deadline: float) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(max(0.1, deadline - time.monotonic()))
        except KeyboardInterrupt:
            future.cancel()
            raise
        except TimeoutError:
            future.cancel()
            raise ClusterError(f"The controller did not start in {self.timeout:g} s.{log_tail(self.run_dir)}") from None
        except RuntimeError as error:
            raise ClusterError(f"The controller did not start: {error}.{log_tail(self.run_dir)}") from None


def dry_run(profile: str | os.PathLike[str] | None, n: int | None, options: Mapping[str, Any]) -> str:
    """Give what a start would submit or run on other hosts, and start nothing.

    Raises
    ------
    ClusterError
        When the profile is for this host only, or the options do not fit together.
    """
    with tempfile.TemporaryDirectory(prefix="nbdist-") as folder:
        shutil.copytree(locate(profile), folder, dirs_exist_ok=True)
        cluster = _configured(Path(folder), n)
        kind = cluster.engine_launcher_class
        if not hasattr(kind, "make_plan"):
            raise ClusterError(f"Profile {profile or 'local'} submits nothing: its ranks are processes of this host.")
        launcher = kind(parent=cluster, options=dict(options), profile_dir=folder)
        try:
            launcher.plan = kind.make_plan(n, launcher.settings)
        except ValueError as error:
            raise ClusterError(str(error)) from None
        text: str = launcher.describe()
        return text


def _configured(run_dir: Path, n: int | None) -> Any:
    """Give ipyparallel's cluster, as the profile in ``run_dir`` says."""
    import ipyparallel as ipp

    log = logging.getLogger("nbdist.ipyparallel")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    return ipp.Cluster(n=n, profile_dir=str(run_dir), cluster_file="", shutdown_atexit=False, parent=None, log=log)


class Found:
    """Controller and agents of a kept cluster, which another notebook has started, or of a job."""

    def __init__(self, entry: dict[str, Any], *, on_agent: Listener, on_agent_end: Listener) -> None:
        self.run_dir = Path(entry["run_dir"])
        self.theirs = bool(entry.get("job"))
        self._client = entry.get("client")
        self.n = entry["n"]
        self.timeout = 60.0
        exchange = self.run_dir / FILE
        address = ExchangeAddress(**entry["exchange"]) if self.theirs else None
        if address is None and exchange.exists():
            address = ExchangeAddress.read(exchange)
        if not self.theirs:
            self.controller = psutil.Process(entry["controller"])
        self.one_host = address is None
        self._nodes: set[int] = set()
        self._line: AgentLine | ExchangeLine
        if address is None:
            self._line = AgentLine(self.run_dir, on_agent, on_agent_end)
        else:
            self._line = ExchangeLine(address, self._follow(on_agent, on_agent_end))

    @property
    def skew(self) -> float:
        return self._line.skew.seconds if isinstance(self._line, ExchangeLine) else 0.0

    def connection_info(self, deadline: float) -> dict[str, Any]:
        if self._client is not None:
            return dict(self._client)
        path = next((self.run_dir / "security").glob("ipcontroller-*-client.json"))
        info: dict[str, Any] = json.loads(path.read_text())
        return info

    def tell(self, **command: Any) -> None:
        self._line.tell(**command)

    def place(self, taken: Iterable[tuple[int, int]]) -> tuple[int, int]:
        node = 0 if self.one_host else min(self._nodes, default=0)
        used = {local_rank for where, local_rank in taken if where == node}
        return node, next(local_rank for local_rank in itertools.count() if local_rank not in used)

    def revive(self, node: int) -> None:
        raise ClusterError("A lost host can be started again only by the notebook that started the cluster.")

    def go_on(self, at_least: int) -> int:
        return 0

    def _follow(self, on_agent: Listener, on_agent_end: Listener) -> Listener:
        def follow(event: dict[str, Any]) -> None:
            if event["event"] == "hello":
                self._nodes.add(event["node"])
            elif event["event"] in ("ended", "lost"):
                self._nodes.discard(event["node"])
                on_agent({**event, "event": "lost", "why": event.get("why", "its node agent ended")})
                if not self._nodes:
                    on_agent_end({})
                return
            on_agent(event)

        return follow

    def leave(self, client: RankClient) -> None:
        """Do nothing: the ranks of a job keep their group."""

    def end_theirs(self, client: RankClient) -> None:
        self._end_nodes()

    def _end_nodes(self) -> None:
        for node in list(self._nodes):
            self._line.tell(op="stop", node=node)
        deadline = time.monotonic() + STOP_S
        while self._nodes and time.monotonic() < deadline:
            time.sleep(0.02)

    def abandon(self) -> None:
        if self.theirs:
            return  # whoever started the job ends it
        if isinstance(self._line, ExchangeLine):
            self._end_nodes()
        else:
            with contextlib.suppress(OSError):
                self._line.close_input()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.controller.pid, signal.SIGKILL)

    def stop(self) -> None:
        self.abandon()
        self.hang_up()
        if not self.theirs:
            with contextlib.suppress(psutil.Error):
                self.controller.wait(10)
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def hang_up(self) -> None:
        if isinstance(self._line, ExchangeLine):
            self._line.close()
        else:
            self._line.hang_up()


def log_tail(run_dir: Path) -> str:
    """Give the end of the controller's log, to be put under an error."""
    texts = []
    for path in sorted((run_dir / "log").glob("ipcontroller*.log")):
        with contextlib.suppress(OSError):
            texts.append(path.read_text(errors="replace")[-1500:])
    text = "".join(texts).strip()
    return "\n  " + text.replace("\n", "\n  ") if text else ""
