"""The world: engines as ranks of one process group, and its generations."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import __version__
from nbdist.errors import WorldError
from nbdist.records import RankInfo, from_wire

if TYPE_CHECKING:
    from nbdist.client import RankClient

__all__ = ["World"]

LOOK_S = 0.1  # between two looks at Stop
NEWS_S = 0.5  # after a first failure, for the news of the death that caused it
ABANDON_S = 1.0  # for ranks to confirm that they gave up


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
        self.died: int | None = None  # the engine that died while the group was being formed
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

    def form(
        self,
        places: dict[int, dict[str, Any]] | None = None,
        wait: float = 60.0,
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> World:
        """Form the next generation on the engines that are registered, and verify it by an all_reduce.

        Parameters
        ----------
        places : dict, optional
            Engine id to what the engine says of itself (host, local_rank, …); asked for where it is not given.
        wait : float
            Seconds to wait for the ranks.
        stopped : callable, optional
            Asked while it waits, whether to give up.

        Raises
        ------
        WorldError
            When a rank does not join, or the all_reduce gives a wrong sum. The group counts as broken then, and no
            rank is left waiting in it.
        """
        self.broken, self.died = True, None
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
                forming=2 * wait,  # this side gives up first, and says who is missing
                peers=[address for other, address in address_of.items() if other != host],
                version=__version__,
                environment=environment,
                guarded=self.guarded,
            )
        try:
            self.ranks = self._wait_for_all(futures, wait, stopped, address_of)
        except BaseException:
            self.client.ask(order, "abandon", ABANDON_S, generation=self.generation)
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(previous)
        self.engines = tuple(order)
        self.broken = False
        return self

    def _wait_for_all(
        self, futures: Mapping[int, Any], wait: float, stopped: Callable[[], bool], address_of: Mapping[str, str]
    ) -> tuple[RankInfo, ...]:
        """Wait until every rank has joined. ``futures`` are in the order of the ranks, by engine."""
        failed = _wait_for_first_failure(futures, wait, stopped)
        several = len(address_of) > 1
        for rank, (engine, future) in enumerate(futures.items()):
            host = self._places[engine]["host"]
            if engine == failed:
                where = f" ({host}, {address_of[host]})" if several else ""
                if _has_died(future):
                    self.died = engine
                    raise WorldError(f"rank {rank}{where} died. Replace it with %cluster repair.")
                raise WorldError(
                    f"rank {rank}{where} could not join generation {self.generation}: {_brief(future.result())}"
                )
            if failed is None and not future.done():
                why = f"did not join generation {self.generation} in {wait:g} s."
                if stopped():
                    why = f"had not joined generation {self.generation} when Stop was pressed."
                elif several:
                    addresses = ", ".join(f"{name} {address}" for name, address in address_of.items())
                    why += f" Addresses: {addresses}. Can they reach each other?"
                raise WorldError(
                    f"rank {rank} (engine {engine}, host {host}) {why} See %cluster status and %cluster logs."
                )
        return tuple(from_wire(RankInfo, future.result()) for future in futures.values())

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


def _wait_for_first_failure(futures: Mapping[int, Any], wait: float, stopped: Callable[[], bool]) -> int | None:
    """Wait for all; give the engine that failed first, which the others may be waiting for, or one that has died."""
    deadline = time.monotonic() + wait
    waiting = dict(futures)
    first: int | None = None
    while waiting and time.monotonic() < deadline and not stopped():
        done, _ = concurrent.futures.wait(waiting.values(), LOOK_S, "FIRST_COMPLETED")
        for engine in [engine for engine, future in waiting.items() if future in done]:
            if _has_died(waiting[engine]):
                return engine
            if isinstance(waiting.pop(engine).result(), BaseException) and first is None:
                first, deadline = engine, time.monotonic() + NEWS_S
    return first


def _has_died(future: Any) -> bool:
    """Whether ipyparallel's controller answered in the place of an engine that is gone."""
    return future.done() and getattr(future.result(), "ename", "") == "EngineError"


def free_port() -> int:
    """Give a TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _brief(error: BaseException) -> str:
    """Give the first line of an error from a rank, without the C++ frames that torch appends."""
    text = str(getattr(error, "evalue", error)).split("\nException raised from")[0].split("\nC++ CapturedTraceback")[0]
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
