"""The world: engines as ranks of one process group, and its generations."""

from __future__ import annotations

import contextlib
import os
import socket
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

    def __init__(self, client: RankClient, run_dir: Path, *, backend: str, timeout: float) -> None:
        self.client = client
        self.run_dir = run_dir
        self.backend = backend
        self.timeout = timeout
        self.generation = 0
        self.broken = False
        self.guarded = False  # collectives are checked before they run
        self.engines: tuple[int, ...] = ()  # rank -> engine id
        self.ranks: tuple[RankInfo, ...] = ()

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
            if self.ranks and set(self.engines) == set(self.client.ids):
                places = {
                    engine: {"host": info.host, "local_rank": info.local_rank}
                    for engine, info in zip(self.engines, self.ranks, strict=True)
                }
            else:
                places = self.locate(wait)
        hosts = list(dict.fromkeys(place["host"] for _, place in sorted(places.items())))
        order = sorted(places, key=lambda e: (hosts.index(places[e]["host"]), places[e]["local_rank"], e))
        self.generation += 1
        previous = self.run_dir / f"store-{self.generation - 1}"
        store = self.run_dir / f"store-{self.generation}"
        futures = {}
        # what pasted scripts look for; nothing of nbdist listens there
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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
                store=str(store),
                timeout=self.timeout,
                loopback=len(hosts) == 1,
                version=__version__,
                environment=environment,
                guarded=self.guarded,
            )
        infos = []
        for rank, (engine, future) in enumerate(futures.items()):
            future.wait(wait)
            if not future.done():
                raise WorldError(
                    f"rank {rank} (engine {engine}) did not join generation {self.generation} in {wait:g} s. "
                    "See %cluster status and %cluster logs."
                )
            result = future.result()
            if isinstance(result, BaseException):
                raise WorldError(f"rank {rank} could not join generation {self.generation}: {_brief(result)}")
            infos.append(from_wire(RankInfo, result))
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


def free_port() -> int:
    """Give a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _brief(error: BaseException) -> str:
    """Give the first line of an error from a rank, without the C++ frames that torch appends."""
    text = str(error).split("\nException raised from")[0].split("\nC++ CapturedTraceback")[0]
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
