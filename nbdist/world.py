"""The world: engines as ranks of one process group, and its generations."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import __version__
from nbdist.errors import WorldError
from nbdist.records import RankInfo, from_wire

if TYPE_CHECKING:
    from nbdist.client import RankClient

__all__ = ["World"]


class World:
    """The ranks of one generation of the process group.

    Engines are ranked by host and local rank, never by the order in which they registered. After a failure or an
    interrupt inside a collective the group counts as broken; ``form`` makes the next generation on the same engines,
    in the same processes, so that their variables stay.
    """

    def __init__(
        self, client: RankClient, run_dir: Path, *, backend: str, timeout: float, one_host: bool = True
    ) -> None:
        self.client = client
        self.run_dir = run_dir
        self.one_host = one_host  # of this notebook: the ranks then meet in a file, otherwise at the exchange
        self.backend = backend
        self.timeout = timeout
        self.generation = 0
        self.broken = False
        self.guarded = False  # collectives are checked before they run
        self.engines: tuple[int, ...] = ()  # rank -> engine id
        self.ranks: tuple[RankInfo, ...] = ()
        self._places: dict[int, dict[str, Any]] = {}  # engine id -> where it runs

    @property
    def size(self) -> int:
        return len(self.engines)

    def __repr__(self) -> str:
        return f"<World of {self.size} ranks · {self.backend} · generation {self.generation}>"

    def rank_of(self, engine: int) -> int:
        """Give the rank of an engine."""
        return self.engines.index(engine)

    def form(self, places: dict[int, dict[str, Any]] | None = None, wait: float = 60.0) -> World:
        """Form the next generation on the engines that are registered, and verify it by an all_reduce.

        Parameters
        ----------
        places : dict, optional
            Engine id to what the engine says of itself (host, local_rank, …); asked for where it is not given.
        wait : float
            Seconds to wait for the ranks.

        Raises
        ------
        WorldError
            When a rank does not join, or the all_reduce gives a wrong sum.
        """
        if places is None:
            places = self._places if set(self._places) == set(self.client.ids) else self.locate(wait)
        self._places = places
        hosts = list(dict.fromkeys(place["host"] for _, place in sorted(places.items())))
        order = sorted(places, key=lambda e: (hosts.index(places[e]["host"]), places[e]["local_rank"], e))
        self.generation += 1
        previous = self.run_dir / f"store-{self.generation - 1}"
        store = self.run_dir / f"store-{self.generation}"
        futures = {}
        # what pasted scripts look for; nothing of nbdist listens there
        address_of = {place["host"]: place.get("address", "127.0.0.1") for place in places.values()}
        master = address_of[places[order[0]]["host"]] if len(hosts) > 1 else "127.0.0.1"
        environment = {"MASTER_ADDR": master, "MASTER_PORT": str(free_port())}
        for rank, engine in enumerate(order):
            host = places[engine]["host"]
            local = [e for e in order if places[e]["host"] == host]
            futures[engine] = self.client.submit(
                engine,
                "nbdist.engine.bootstrap:join_world",
                rank=rank,
                world_size=len(order),
                local_rank=local.index(engine),
                local_world_size=len(local),
                node_rank=hosts.index(host),
                generation=self.generation,
                backend=self.backend,
                store=str(store) if self.one_host else "",
                timeout=self.timeout,
                peers=[address for other, address in address_of.items() if other != host],
                version=__version__,
                environment=environment,
                guarded=self.guarded,
            )
        failed = _wait_for_first_failure(futures, wait)
        infos = []
        for rank, (engine, future) in enumerate(futures.items()):
            host = places[engine]["host"]
            if engine == failed:
                where = f" ({host}, {address_of[host]})" if len(hosts) > 1 else ""
                raise WorldError(
                    f"rank {rank}{where} could not join generation {self.generation}: {_brief(future.result())}"
                )
            if failed is None and not future.done():
                addresses = ", ".join(f"{name} {address}" for name, address in address_of.items())
                raise WorldError(
                    f"rank {rank} (engine {engine}, host {host}) did not join generation {self.generation} in "
                    f"{wait:g} s. "
                    + (f"Addresses: {addresses}. Can they reach each other? " if len(hosts) > 1 else "")
                    + "See %cluster status and %cluster logs."
                )
            if failed is None:
                infos.append(from_wire(RankInfo, future.result()))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(previous)
        self.engines, self.ranks = tuple(order), tuple(infos)
        self.broken = False
        return self

    def locate(self, wait: float) -> dict[int, dict[str, Any]]:
        """Ask every registered engine where it runs."""
        futures = {e: self.client.submit(e, "nbdist.engine.bootstrap:identify") for e in self.client.ids}
        places = {}
        for engine, future in futures.items():
            future.wait(wait)
            if not future.done() or isinstance(future.result(), BaseException):
                raise WorldError(f"engine {engine} does not answer. See %cluster logs.")
            places[engine] = future.result()
        return places


def _wait_for_first_failure(futures: Mapping[int, Any], wait: float) -> int | None:
    """Wait for all; give the engine that failed first, which the others may be waiting for."""
    deadline = time.monotonic() + wait
    waiting = dict(futures)
    while waiting:
        left = deadline - time.monotonic()
        done, _ = concurrent.futures.wait(waiting.values(), max(0.0, left), "FIRST_COMPLETED")
        if not done:
            return None
        for engine in [engine for engine, future in waiting.items() if future in done]:
            if isinstance(waiting.pop(engine).result(), BaseException):
                return engine
    return None


def free_port() -> int:
    """Give a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _brief(error: BaseException) -> str:
    """Give the first line of an error from a rank, without the C++ frames that torch appends."""
    text = str(error).split("\nException raised from")[0].split("\nC++ CapturedTraceback")[0]
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
