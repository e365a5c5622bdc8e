"""An ipyparallel cluster that the user has started himself (``ipcluster start``), visited by a notebook.

Its engines become ranks by a call (``nbdist.engine.guest``), and stay when the visit ends. Nothing of ours runs beside
them: they have to be on the notebook's own host, and none of them can be replaced from here.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import psutil

from nbdist.client import RankClient
from nbdist.errors import ClusterError

__all__ = ["Visited"]

SETTLE_S = 60.0  # an engine imports torch
ANSWER_S = 1.0
LEAVE_S = 3.0
END_S = 5.0

Listener = Callable[[dict[str, Any]], None]


class Visited:
    """Controller and engines of somebody else's making; one of the ``Processes`` that a cluster can have.

    Parameters
    ----------
    where : str
        Name of the ipyparallel profile, or path of the connection file for clients.
    """

    theirs = True
    one_host = True
    skew = 0.0
    timeout = SETTLE_S

    def __init__(self, where: str, *, on_agent: Listener, on_agent_end: Listener) -> None:
        self.path = client_file(where)
        self.n = 0
        self._tell_of, self._tell_of_end = on_agent, on_agent_end
        self._pids: dict[int, int] = {}

    def connection_info(self, deadline: float) -> dict[str, Any]:
        info: dict[str, Any] = json.loads(self.path.read_text())
        return info

    def settle(self, client: RankClient) -> None:
        """Make the engines fit to be ranks, where an earlier visit has not; tell of those that end from now on.

        Raises
        ------
        ClusterError
            When an engine is on another host, or cannot become a rank.
        """
        engines = list(client.ids)
        self.n = len(engines)
        if not engines:
            raise ClusterError(f"The cluster of {self.path} has no engines. Start some: ipcluster engines -n 2.")
        # one that runs a cell of an earlier visit would not come to a call: it answers beside it
        answers = client.ask(engines, "who", ANSWER_S)
        calls = {
            engine: client.submit(engine, "nbdist.engine.guest:settle", engine, index, self.n)
            for index, engine in enumerate(engines)
            if answers[engine] is None
        }
        self._pids = {engine: answer["info"]["pid"] for engine, answer in answers.items() if answer is not None}
        deadline = time.monotonic() + SETTLE_S
        for engine, call in calls.items():
            call.wait(max(0.0, deadline - time.monotonic()))
            if not call.done():
                raise ClusterError(f"Engine {engine} does not answer: it is busy. Interrupt what it runs, or wait.")
            said = call.result()
            if isinstance(said, BaseException):
                why = f"{getattr(said, 'ename', type(said).__name__)}: {getattr(said, 'evalue', said)}"
                raise ClusterError(f"Engine {engine} cannot become a rank: {why}. It needs nbdist and torch.")
            if said["host"] != socket.gethostname() or said["user"] != os.getuid():
                raise ClusterError(
                    f"Engine {engine} is of host {said['host']}, user {said['user']}: only one's own engines on this "
                    "host can become ranks. For other hosts: %cluster start --profile ssh."
                )
            self._pids[engine] = said["pid"]
        client._registration_callbacks.append(lambda event: self._miss(client))

    def leave(self, client: RankClient) -> None:
        """Take the process group down; the engines stay as their user had them."""
        calls = [client.submit(engine, "nbdist.engine.guest:leave") for engine in client.ids]
        deadline = time.monotonic() + LEAVE_S
        for call in calls:
            call.wait(max(0.0, deadline - time.monotonic()))

    def end_theirs(self, client: RankClient) -> None:
        """End the controller and the engines, which the user has asked for; by force those that do not obey."""
        processes = [psutil.Process(pid) for pid in self._pids.values() if psutil.pid_exists(pid)]
        client.shutdown(block=False)
        for process in psutil.wait_procs(processes, timeout=END_S)[1]:
            process.kill()
        psutil.wait_procs(processes, timeout=END_S)
        # not by shutdown(hub=True): that waits without end for a reply of each engine
        client._send(client._query_stream, "shutdown_request").wait(END_S)

    def tell(self, **command: Any) -> None:
        self._refuse()

    def place(self, taken: Iterable[tuple[int, int]]) -> tuple[int, int]:
        self._refuse()

    def revive(self, node: int) -> None:
        self._refuse()

    def go_on(self, at_least: int) -> int:
        return 0

    def abandon(self) -> None:
        """Leave everything as it is: whoever started it ends it."""

    def stop(self) -> None:
        """Leave everything as it is: whoever started it ends it."""

    def hang_up(self) -> None:
        """Do nothing: the client was all that there is between the notebook and this cluster."""

    def _refuse(self) -> NoReturn:
        raise ClusterError(
            f"The engines of {self.path.parent.parent.name} are started and ended by whoever started that cluster. "
            "Go on without dead ones by %cluster repair --shrink; for more, ipcluster engines -n 1 and attach again."
        )

    def _miss(self, client: RankClient) -> None:
        """Tell of engines that the controller does not know any more; from the client's IO thread."""
        for engine in set(self._pids) - set(client.ids):
            pid = self._pids.pop(engine)
            end = {"pid": pid, "code": None, "signal": None, "why": f"(pid {pid}) has ended, as its controller says"}
            self._tell_of({"event": "exited", **end})
        if not self._pids:
            self._tell_of_end({})


def client_file(where: str) -> Path:
    """Find the connection file of a running ipyparallel cluster: a path, or the newest one of a profile."""
    from IPython.core.profiledir import ProfileDir, ProfileDirError
    from IPython.paths import get_ipython_dir

    if Path(where).is_file():
        return Path(where)
    try:
        profile = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), where)
    except ProfileDirError:
        raise ClusterError(f"No ipyparallel profile or connection file {where!r}. See: ipcluster list.") from None
    files = sorted(Path(profile.security_dir).glob("ipcontroller*-client.json"), key=os.path.getmtime)
    if not files:
        raise ClusterError(f"No cluster of profile {where!r} runs. Start one: ipcluster start -n 2 --profile={where}.")
    return files[-1]
