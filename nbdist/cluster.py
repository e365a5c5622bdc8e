"""The cluster: a controller and engines that this notebook started, and the world they form."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import ranks as rank_sets
from nbdist.errors import ClusterError
from nbdist.hosts import Hosts
from nbdist.report import describe_end

if TYPE_CHECKING:
    from types import TracebackType

    from nbdist.cells import Cell
    from nbdist.check import Check
    from nbdist.client import RankClient
    from nbdist.page import Page
    from nbdist.processes import Processes
    from nbdist.status import Status
    from nbdist.telemetry import Telemetry
    from nbdist.world import World

__all__ = ["Cluster", "active"]

_active: Cluster | None = None

BACKENDS = ("auto", "nccl", "gloo")


def active() -> Cluster | None:
    """Give the running cluster of this notebook, if there is one."""
    return _active


def require() -> Cluster:
    """Give the running cluster of this notebook, or say how to start one."""
    if _active is None:
        raise ClusterError("No cluster. Start one with %cluster start -n 2.")
    if _active.defunct:
        raise ClusterError(_active.defunct)
    return _active


class Cluster:
    """Engines on this or other machines, bootstrapped into one ``torch.distributed`` process group.

    Parameters
    ----------
    n : int, optional
        Number of ranks. By default one per GPU; on a machine without GPU, 2.
    profile : str or path, optional
        Name of a profile (``local``, …) or a profile folder.
    backend : {"auto", "nccl", "gloo"}
        "auto" is nccl when there is a GPU for each rank, else gloo.
    timeout : float, optional
        Seconds to wait for the engines and the first all_reduce: 60, or 600 where a job waits in a queue.
    collective_timeout : float
        Seconds after which a collective gives up by itself; the state is kept when it does.
    keep : bool
        Leave the cluster running when this process ends.
    name : str
        What ``%cluster attach NAME`` finds a kept cluster by; else its controller's process id.
    repair : {"ask", "auto"}
        Replace dead ranks when told to, or at the end of a cell and before the next one.
    oversubscribe : bool
        Allow more than four ranks per core.
    min_ranks : int, optional
        Go on with so many ranks where some do not come; by default the start fails then and says which.
    options : dict, optional
        What the profile's launcher takes: ``{"hosts": "gpu1:8,gpu2:8"}``, ``{"nodes": 4, "partition": "gpu"}``.

    Examples
    --------
    >>> cluster = nbdist.Cluster(4).start()
    >>> cluster.run("x = torch.ones(1); dist.all_reduce(x); x.item()")
    >>> cluster.pull("x")
    """

    def __init__(
        self,
        n: int | None = None,
        *,
        profile: str | os.PathLike[str] | None = None,
        backend: str = "auto",
        timeout: float | None = None,
        collective_timeout: float = 1800.0,
        keep: bool = False,
        name: str = "",
        repair: str = "ask",
        oversubscribe: bool = False,
        min_ranks: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        from nbdist.host import check_size, visible_gpus

        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r}: choose one of {', '.join(BACKENDS)}.")
        if repair not in ("ask", "auto"):
            raise ValueError(f"repair {repair!r}: choose auto or ask.")
        if min_ranks is not None and not 1 <= min_ranks <= (n or min_ranks):
            raise ValueError(f"--min {min_ranks}: at least 1{f' and at most {n}' if n else ''}.")
        gpus = visible_gpus()
        self._asked = n
        self.options = dict(options or {})
        if profile in (None, "local"):
            if self.options:
                raise ValueError(
                    f"{', '.join(sorted(self.options))}: for other hosts. Name them with --profile ssh, slurm, …"
                )
            self.n = (gpus or 2) if n is None else n
            check_size(self.n, gpus, backend, oversubscribe)
            self.backend = backend if backend != "auto" else ("nccl" if 0 < self.n <= gpus else "gloo")
        else:
            if n is not None and n < 1:
                raise ValueError(f"-n {n}: a world has at least 1 rank.")
            self.n = n or 0  # where it was not asked for, the profile says
            self.backend = backend  # "auto" until the hosts have said what they have
        self.profile = profile
        self.timeout = timeout
        self.collective_timeout = collective_timeout
        self.keep = keep
        self.name = name
        self.repair_mode = repair
        self.oversubscribe = oversubscribe
        self.min_ranks = min_ranks
        self.deaths: dict[int, dict[str, Any]] = {}  # engine id -> what the agent reported
        self.cell: Cell | None = None  # the cell that runs now
        self.seconds_to_ready = 0.0
        self._processes: Processes | None = None
        self._client: RankClient | None = None
        self._world: World | None = None
        self._telemetry: Telemetry | None = None
        self._requests: dict[str, tuple[Cell, int]] = {}  # message id -> who waits for its output
        self._heard: dict[str, int] = {}  # name of an engine -> number of its last payload of records
        self._early: list[dict[str, Any]] | None = None  # records that came before those of an earlier notebook
        self._engine_pids: dict[int, int] = {}
        self.hosts = Hosts(self)
        self._changed = threading.Condition()
        self._controller_end: Any = None
        self._agent_end: Any = None
        self._retired: set[int] = set()  # engines that were ended on purpose
        self._stopping = False
        self._page: Page | None = None  # of the cell that started the cluster: where a death between cells is told
        self.run_dir: Path | None = None

    # -- start and stop ----------------------------------------------------------------------------------------------

    def start(self, progress: Callable[[str], None] | None = None) -> Cluster:
        """Start everything and return when an all_reduce came back right on every rank.

        Parameters
        ----------
        progress : callable, optional
            Called with one line for each stage reached.

        Raises
        ------
        ClusterError
            When engines do not start, with the end of their log; nothing is left running then.
        """
        from nbdist import startup

        global _active
        if self.running:
            return self
        if _active is not None and _active is not self and _active.defunct:
            _active.stop()
        if _active is not None and _active is not self:
            raise ClusterError(
                f"A cluster of {_active.n} ranks is running already. "
                "Replace it with %cluster stop, then %cluster start."
            )
        tell = progress or (lambda line: None)
        began = time.monotonic()
        _active = self
        try:
            startup.launch(self, tell, began)
        except BaseException:
            self.stop()
            raise
        if self._page is not None:
            self._page.closed = True  # what comes later is told from other threads
        self.seconds_to_ready = time.monotonic() - began
        atexit.register(self._at_exit)
        return self

    @classmethod
    def attach(cls, name: str = "", timeout: float = 30.0, *, ipcluster: str | None = None) -> Cluster:
        """Take over a cluster that was started with ``keep=True``, with its ranks' state and what they run.

        Parameters
        ----------
        name : str
            The cluster's name; not needed where only one is kept.
        timeout : float
            Seconds to wait for its ranks.
        ipcluster : str, optional
            Visit a cluster instead that ``ipcluster start`` has started on this host: the name of its profile, or the
            path of its connection file. Its engines become ranks; ``stop`` leaves them as they were.

        Raises
        ------
        ClusterError
            When there is none, it has ended, or it belongs to somebody else.
        """
        from nbdist import kept, membership

        global _active
        if _active is not None:
            raise ClusterError(f"A cluster of {_active.n} ranks is active here already. First %cluster stop.")
        if ipcluster is None:
            name, entry = kept.find(name)
            cluster = cls(
                entry["n"],
                profile=entry.get("profile") or None,
                backend=entry["backend"],
                collective_timeout=entry["collective_timeout"],
                keep=True,
                name=name,
                oversubscribe=True,
            )
            take = functools.partial(membership.adopt, cluster, entry)
        else:
            cluster = cls(keep=True, oversubscribe=True)
            cluster.backend = "auto"  # until its engines are known
            take = functools.partial(membership.visit, cluster, ipcluster)
        try:
            take(time.monotonic() + timeout)
        except BaseException:
            cluster.detach()
            raise
        _active = cluster
        atexit.register(cluster._at_exit)
        return cluster

    def detach(self) -> None:
        """Let go of a kept cluster: it goes on, and ``%cluster attach`` finds it again."""
        self._let_go()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.hang_up()

    def _let_go(self) -> None:
        global _active
        self._stopping = True
        if _active is self:
            _active = None
        atexit.unregister(self._at_exit)
        if self._telemetry is not None:
            self._telemetry.close()
        if self.is_visited and self.run_dir is not None:
            shutil.rmtree(self.run_dir, ignore_errors=True)  # of this visit alone
        client, self._client = self._client, None
        if client is not None:
            if self.is_visited and self.cell is None:
                self._processes.leave(client)  # type: ignore[union-attr]
            client.close(linger=0)
        self._world = None

    def _at_exit(self) -> None:
        if self.keep:
            self.detach()
        else:
            self.stop()

    def stop(self, *, everything: bool = False) -> None:
        """End everything that was started, by pid, and remove what it left on disk. Does nothing the second time.

        Parameters
        ----------
        everything : bool
            End also what was started without this notebook (a job, an ipyparallel cluster); else it is only let go of.
        """
        if everything and self.is_visited and self._client is not None:
            self._processes.end_theirs(self._client)  # type: ignore[union-attr]
        if self.keep and self.name and not self.is_visited:
            from nbdist import kept

            kept.forget(self.name)
        self._let_go()
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.stop()
        self._sweep()
        if self.run_dir is not None:
            shutil.rmtree(self.run_dir, ignore_errors=True)
        self._requests.clear()

    def _sweep(self) -> None:
        """Kill what outlived its agent: only pids that the agent told us, and only while they are still those."""
        for pid in self._engine_pids.values():
            with contextlib.suppress(OSError):
                if f"NBDIST_RUN_DIR={self.run_dir}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._engine_pids.clear()

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the cluster was started and not stopped."""
        return self._world is not None

    @property
    def defunct(self) -> str:
        """Why this cluster cannot be used any more, or nothing."""
        if self._controller_end is not None:
            what = "controller"
        elif self._agent_end is not None:
            what = "node agent"
        else:
            return ""
        return f"The {what} of the cluster ended, and with it every rank. %cluster start begins anew."

    @property
    def is_visited(self) -> bool:
        """Whether the cluster was started without this notebook, and stays when it is stopped here."""
        return self._processes is not None and self._processes.theirs

    @property
    def client(self) -> RankClient:
        """The ipyparallel client of this cluster: ``cluster.client[:]`` is a view on all engines."""
        if self._client is None:
            raise ClusterError("This cluster is not running. Start one with %cluster start -n 2.")
        return self._client

    @property
    def world(self) -> World:
        """The ranks of the current generation of the process group."""
        if self._world is None:
            raise ClusterError("This cluster is not running. Start one with %cluster start -n 2.")
        return self._world

    @property
    def telemetry(self) -> Telemetry:
        """All step records of this cluster; ``telemetry.to_frame()`` gives them as a table."""
        if self._telemetry is None:
            raise ClusterError("This cluster was never started. Start one with %cluster start -n 2.")
        return self._telemetry

    @property
    def world_size(self) -> int:
        return self._world.size if self._world is not None else self.n

    @property
    def pids(self) -> dict[int, int]:
        """Rank to process id."""
        return {info.rank: info.pid for info in self.world.ranks}

    def __repr__(self) -> str:
        if self._world is None:
            return f"<Cluster of {self.n} ranks · not running>"
        hosts = len({info.host for info in self._world.ranks})
        return (
            f"<Cluster {self.n} engine{'s' if self.n > 1 else ''} on {hosts} host{'s' if hosts > 1 else ''} · "
            f"world of {self._world.size} rank{'s' if self._world.size > 1 else ''} · {self.backend} · "
            f"{f'ready in {self.seconds_to_ready:.1f} s' if self.seconds_to_ready else 'attached'}>"
        )

    def log_dir(self, kind: str) -> Path:
        """Give the folder where logs of this cluster are kept when it is gone."""
        from nbdist.profiles import state_dir

        assert self.run_dir is not None
        return state_dir(self.run_dir) / kind

    # -- cells -------------------------------------------------------------------------------------------------------

    def run(
        self,
        source: str,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        *,
        output: str = "fold",
        detach: bool = False,
    ) -> Cell:
        """Run code on ranks as a cell: stream its output here, raise when it fails.

        Parameters
        ----------
        source : str
            What one would type into a ``%%distributed`` cell.
        ranks : iterable of int, optional
            Which ranks run it; all by default.
        timeout : float, optional
            Seconds after which the ranks are brought back and the cell fails.
        output : {"fold", "all", "none"}
            Fold equal output of ranks into one line, show every line, or show nothing.
        detach : bool
            Return at once; output and plots go on.

        Raises
        ------
        DistributedError
            When a rank failed: root cause first.
        """
        from nbdist import cells

        chosen = range(self.world_size) if ranks is None else rank_sets.check(ranks, self.world_size)
        return cells.run(self, source, tuple(chosen), timeout=timeout, output=output, detach=detach)

    def evaluate(self, expression: str, ranks: Iterable[int] | None = None) -> Any:
        """Give the value of an expression on each rank."""
        from nbdist import values

        return values.evaluate(self, expression, ranks)

    def push(self, ranks: Iterable[int] | None = None, /, **names: Any) -> None:
        """Copy values to ranks, by value; classes and functions of the notebook included.

        Examples
        --------
        >>> cluster.push(lr=0.1, Net=Net)
        """
        from nbdist import values

        values.push(self, ranks, names)

    def pull(self, name: str, ranks: Iterable[int] | int | None = None) -> Any:
        """Copy a value from ranks: a list with one value per rank, or the value itself when ``ranks`` is one number.

        Examples
        --------
        >>> cluster.pull("accuracy")
        [0.98, 0.98]
        >>> cluster.pull("accuracy", ranks=0)
        0.98
        """
        from nbdist import values

        return values.pull(self, name, ranks)

    def train(
        self,
        steps: int | None = None,
        *,
        epochs: float | None = None,
        name: str = "trainer",
        checkpoint_every: int | None = None,
        checkpoint_dir: str | None = None,
        detach: bool = False,
    ) -> Cell:
        """Run synchronized steps of the Trainer called ``name`` on every rank; it goes on from where it was.

        Examples
        --------
        >>> cluster.train(500)
        >>> cluster.train(epochs=2, checkpoint_every=100, checkpoint_dir="checkpoints")
        """
        from nbdist import cells

        return cells.train(
            self,
            steps,
            epochs=epochs,
            name=name,
            checkpoint_every=checkpoint_every,
            checkpoint_dir=checkpoint_dir,
            detach=detach,
        )

    def status(self) -> Status:
        """What each rank does now; answers while ranks are busy."""
        from nbdist.status import ask

        return ask(self)

    def check(self) -> Check:
        """Look for what could go wrong on these hosts: versions, interfaces, names, limits, clocks, the group."""
        from nbdist.check import check

        return check(self)

    def chips(self) -> Sequence[tuple[int, str, str]]:
        """Rank, state and detail for the panel, from what is known here without asking."""
        from nbdist.status import chips

        return chips(self)

    def is_running(self) -> bool:
        """Whether a cell runs on the ranks now."""
        return self.cell is not None

    def request_stop(self) -> None:
        """Ask the running cell to stop; returns at once, from any thread."""
        cell = self.cell
        if cell is not None:
            cell.request_stop()

    def interrupt(self) -> None:
        """Bring all ranks back to the prompt."""
        cell = self.cell
        if cell is not None:
            cell.request_stop()
            cell.wait()

    def debug(self, on: bool) -> None:
        """Check collectives for op, shape and dtype before they run: a mismatch is an error on every rank, no hang."""
        self.world.guarded = on
        futures = [
            self.client.submit(engine, "nbdist.engine.bootstrap:switch_guard", on) for engine in self.world.engines
        ]
        for future in futures:
            future.wait()

    def repair(self, copy: str | None = None, *, shrink: bool = False) -> str:
        """Put an empty rank in the place of each dead one and form the group anew; the living keep their state.

        Parameters
        ----------
        copy : str, optional
            Name of an object (a ``Trainer``) that the new ranks get from the lowest living rank.
        shrink : bool
            Go on with the living alone, in a smaller world.

        Returns
        -------
        str
            What was done, in one sentence.
        """
        from nbdist import membership

        return membership.shrink(self) if shrink else membership.repair(self, copy)

    def resize(self, n: int) -> str:
        """Grow or shrink the world to ``n`` ranks; ranks that stay keep their state. Give what was done."""
        from nbdist import membership

        return membership.resize(self, n)

    def kill(self, engine: int) -> None:
        """End the process of one engine; its rank is dead then, and the others keep their state."""
        pid = self._engine_pids.get(engine)
        if pid is not None and self._processes is not None:
            node = self.hosts.nodes.get(engine, 0)
            self._processes.tell(op="signal", pid=pid, signal=int(signal.SIGKILL), node=node)

    def fork(self, local_rank: int, engine: int, node: int = 0) -> None:
        """Let the node agent fork an engine for a local rank, warm: torch is imported there already."""
        assert self._processes is not None
        with self._changed:  # what the agent reports of the new one comes after
            self._processes.tell(op="fork", local_rank=local_rank, id=engine, node=node)
            self.deaths.pop(engine, None)

    def logs(self, ranks: Iterable[int] | None = None, last: int = 4096) -> str:
        """Give the end of what the ranks' processes wrote to their standard error."""
        assert self.run_dir is not None
        texts = []
        for info in self.world.ranks:
            if ranks is None or info.rank in ranks:
                if self._processes is not None and not self._processes.one_host:
                    where, text = f"host {info.host}", self.hosts.tail(self.world.engines[info.rank], info)[-last:]
                else:
                    path = self.run_dir / "log" / f"rank-{info.local_rank}.err"
                    where, text = str(path), path.read_text(errors="replace")[-last:] if path.exists() else ""
                texts.append(f"[{info.rank}] {where}\n{text or '(nothing)'}")
        return "\n".join(texts)

    # -- what happens in other threads -------------------------------------------------------------------------------

    def _route(self, message: dict[str, Any]) -> None:
        """Take one iopub message, in ipyparallel's IO thread."""
        if message["msg_type"] == "nbdist_records":
            payload = json.loads(bytes(message["buffers"][0]))
            with self._changed:
                early = self._early
                if early is not None:
                    early.append(payload)
            if early is None:
                self.telemetry.receive(payload)
            self._heard[message["metadata"]["engine"]] = payload["number"]
            cell = self.cell
            if cell is not None and not cell.remaining:
                cell.wake()
            return
        waiting = self._requests.get((message["parent_header"] or {}).get("msg_id", ""))
        if waiting is not None:
            cell, rank = waiting
            cell.receive(rank, message)
        elif self.cell is not None and self.cell.is_adopted:
            self.cell.receive_from(message)

    def _on_agent(self, event: dict[str, Any]) -> None:
        with self._changed:
            self.hosts.note(event)
            if event["event"] == "forked":
                self._engine_pids[event["id"]] = event["pid"]
                self.deaths.pop(event["id"], None)
            elif event["event"] == "exited":
                engine = next((e for e, pid in self._engine_pids.items() if self.hosts.is_here(e, pid, event)), None)
                if engine is not None:
                    del self._engine_pids[engine]
                    if engine not in self._retired:
                        self.deaths[engine] = event
                        self._tell_of_death(engine, event)
            self._changed.notify_all()
        if event["event"] in ("exited", "lost") and self.cell is not None:
            self.cell.wake()

    def _tell_of_death(self, engine: int, event: dict[str, Any]) -> None:
        """Say it where the cluster was started, when no cell runs that would say it."""
        if self.cell is None and not self._stopping and self._world is not None and self._page is not None:
            rank = self._world.engines.index(engine) if engine in self._world.engines else engine
            then = "The next cell replaces it." if self.repair_mode == "auto" else "Replace it with %cluster repair."
            self._page.write(f"rank {rank} {describe_end(event)}. {then}\n", "stderr")

    def _on_registration(self, event: dict[str, Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_controller_end(self, data: Any) -> None:
        """The controller is gone: no rank can be reached, so none may go on unseen."""
        self._on_end("_controller_end", data)

    def _on_agent_end(self, data: Any) -> None:
        """The agent is gone, and its engines with it (Linux ends them); their nannies too, so nobody else tells."""
        self._on_end("_agent_end", data)

    def _on_end(self, which: str, data: Any) -> None:
        with self._changed:
            setattr(self, which, data or {})
            self._changed.notify_all()
        if self._stopping:
            return
        if self._processes is not None:
            self._processes.abandon()
        if self.cell is not None:
            self.cell.wake()
        elif self._page is not None and self._world is not None:
            self._page.write(self.defunct + "\n", "stderr")
