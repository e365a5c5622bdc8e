"""What the notebook makes of its hosts: where each engine is, a host that is lost, the log of a rank elsewhere."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbdist.report import describe_end

if TYPE_CHECKING:
    from nbdist.client import RankClient
    from nbdist.cluster import Cluster
    from nbdist.records import RankInfo

__all__ = ["Hosts", "offer"]

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
        self.ahead: dict[int, float] = {}  # number of a host -> how far the exchange's clock is ahead of it, in seconds
        self.ends = 0.0  # Unix time at which a job's time is over, or 0; may be told before there is telemetry
        self.stage = ""  # what is waited for: a job in a queue
        self.failure = ""  # why the engines will not come up
        self.missing = ""  # hosts that will not come, where the others can go on

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
            self.ahead[event["node"]] = event.get("ahead", 0.0)
        elif kind == "clock":
            self.ahead[event["node"]] = event["ahead"]
        elif kind == "state":
            self.stage = event["text"]
        elif kind == "limit":
            self.ends = event["ends"]
            if self._cluster._telemetry is not None:
                self._cluster._telemetry.ends = self.ends
        elif kind == "failed":
            self.failure, self.missing = event["text"], event.get("missing", "")
        elif kind == "notice":
            self._tell(event["text"])
        elif kind == "tail":
            with self._came:
                self._tails[event["ticket"]] = event["text"]
                self._came.notify_all()
        elif kind == "lost":
            self._lose(event)

    def behind(self, rank: int) -> float:
        """How far the clock of a rank's host is behind the notebook's, in seconds."""
        world, processes = self._cluster._world, self._cluster._processes
        if not self.ahead or processes is None or world is None or not 0 <= rank < world.size:
            return 0.0
        return self.ahead.get(self.nodes.get(world.engines[rank], 0), 0.0) - processes.skew

    def make_do_without_the_dead(self) -> bool:
        """Go on without engines that ended while they started, where enough are left; give whether that is so."""
        cluster = self._cluster
        left = cluster.n - len(cluster.deaths)
        if not cluster.min_ranks or left < cluster.min_ranks:
            return False
        ends = "; ".join(f"engine {engine} {describe_end(death)}" for engine, death in cluster.deaths.items())
        self._tell(f"{ends}. Going on with {left} of {cluster.n} ranks.")
        cluster._retired.update(cluster.deaths)
        cluster.deaths.clear()
        cluster.n = left
        return True

    def make_do_with_those_that_came(self) -> bool:
        """Go on without hosts that do not come, where enough have; give whether that is so."""
        cluster = self._cluster
        if not cluster.min_ranks or cluster._processes is None or (self.failure and not self.missing):
            return False
        missing = self.missing or self.who_is_missing()
        left = cluster._processes.go_on(cluster.min_ranks)
        if not left:
            return False
        self._tell(f"Going on with {left} of {cluster.n} ranks.\n{missing.rstrip()}")
        self.failure = self.missing = ""
        cluster.n = left
        return True

    def who_is_missing(self) -> str:
        """Name the hosts that have come where others have not; nothing where it is one host, or all have come."""
        came = [hello["host"] for hello in self.hellos.values()]
        processes = self._cluster._processes
        if processes is None or processes.one_host or not came:
            return ""
        return f"Of the hosts only {', '.join(came)} came. "

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
        self.failure = self.missing = ""
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


def offer(left: int) -> str:
    """Say how to go on with those that came."""
    return f" Go on with {left}: %cluster start … --min {left}." if left > 0 else ""


def forget(client: RankClient, engines: list[int]) -> None:
    """Tell the controller that engines are gone, in the place of their nannies; their requests end with an error."""
    for engine in engines:
        future = client._send(client._query_stream, "unregistration_request", content={"id": engine})
        client._futures.pop(future.msg_id, None)  # there is no reply, only the notification that it is gone
