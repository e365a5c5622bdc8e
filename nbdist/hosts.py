"""What the notebook makes of its hosts: where each engine is, a host that is lost, the log of a rank elsewhere."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.client import RankClient
    from nbdist.cluster import Cluster
    from nbdist.records import RankInfo

__all__ = ["Hosts"]

TAIL_S = 3.0


class Hosts:
    """The hosts of one cluster, from what their agents report."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._tickets = itertools.count(1)
        self._tails: dict[int, str] = {}
        self._came = threading.Condition()
        self.nodes: dict[int, int] = {}  # engine id -> number of its host
        self.local_ranks: dict[int, int] = {}  # engine id -> its number on the host, as its agent counts
        self.hellos: dict[int, dict[str, Any]] = {}  # number of a host -> what it said of itself
        self.stage = ""  # what is waited for: a job in a queue
        self.failure = ""  # why the engines will not come up

    @property
    def gpus(self) -> int:
        """How many GPUs the hosts have together."""
        return sum(hello["gpus"] for hello in self.hellos.values())

    def note(self, event: Mapping[str, Any]) -> None:
        """Take one report; those of single engines are the cluster's own business."""
        kind = event["event"]
        if kind == "forked":
            self.nodes[event["id"]] = event.get("node", 0)
            self.local_ranks[event["id"]] = event["local_rank"]
        elif kind == "hello":
            self.hellos[event["node"]] = dict(event)
            if event["folder_missing"]:
                self._tell(f"host {event['host']} does not have this notebook's folder: its ranks work elsewhere.")
        elif kind == "state":
            self.stage = event["text"]
        elif kind == "failed":
            self.failure = event["text"]
        elif kind == "notice":
            self._tell(event["text"])
        elif kind == "tail":
            with self._came:
                self._tails[event["ticket"]] = event["text"]
                self._came.notify_all()
        elif kind == "lost":
            self._lose(event)

    def is_here(self, engine: int, pid: int, event: Mapping[str, Any]) -> bool:
        """Whether a report about a process is about this engine: process ids repeat from host to host."""
        return bool(pid == event["pid"] and self.nodes.get(engine, 0) == event.get("node", 0))

    def tail(self, engine: int, info: RankInfo) -> str:
        """Ask the agent of a rank's host for the end of what the rank wrote to its standard error."""
        processes = self._cluster._processes
        assert processes is not None
        ticket = next(self._tickets)
        local_rank = self.local_ranks.get(engine, info.local_rank)
        processes.tell(op="tail", node=self.nodes.get(engine, 0), local_rank=local_rank, ticket=ticket)
        with self._came:
            if not self._came.wait_for(lambda: ticket in self._tails, TAIL_S):
                return f"(host {info.host} does not answer)"
            return self._tails.pop(ticket)

    def occupied(self) -> list[tuple[int, int]]:
        """Host and local rank of every engine that lives."""
        living = [engine for engine in self._cluster._engine_pids if engine not in self._cluster.deaths]
        return [(self.nodes.get(engine, 0), self.local_ranks.get(engine, engine)) for engine in living]

    def bring_back(self, node: int, patience: float) -> bool:
        """Start the agent of a lost host again; give whether it came."""
        if node in self.hellos:
            return True
        processes = self._cluster._processes
        assert processes is not None
        self.failure = ""
        processes.revive(node)
        deadline = time.monotonic() + patience
        with self._cluster._changed:
            while node not in self.hellos and not self.failure and time.monotonic() < deadline:
                self._cluster._changed.wait(0.1)
        return node in self.hellos

    def _lose(self, event: Mapping[str, Any]) -> None:
        """A host is gone: so are its ranks, and nobody there is left to say so."""
        cluster = self._cluster
        self.hellos.pop(event["node"], None)
        lost = [engine for engine in list(cluster._engine_pids) if self.nodes.get(engine, 0) == event["node"]]
        why = f"host {event['host']} was lost: {event['why']}"
        for engine in lost:
            pid = cluster._engine_pids.pop(engine)
            if engine not in cluster._retired:
                cluster.deaths.setdefault(engine, {"pid": pid, "code": None, "signal": None, "why": why})
        if cluster._client is not None:
            forget(cluster._client, lost)
        if lost and cluster.cell is None:
            self._tell(f"{why}. Replace its ranks with %cluster repair when it is back, or go on without: --shrink.")

    def _tell(self, text: str) -> None:
        cluster = self._cluster
        if cluster._page is not None and not cluster._stopping:
            cluster._page.write(f"nbdist: {text}\n", "stderr")


def forget(client: RankClient, engines: list[int]) -> None:
    """Tell the controller that engines are gone, in the place of their nannies; their requests end with an error."""
    for engine in engines:
        future = client._send(client._query_stream, "unregistration_request", content={"id": engine})
        client._futures.pop(future.msg_id, None)  # there is no reply, only the notification that it is gone
