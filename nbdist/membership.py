"""Replace dead ranks, grow and shrink the world; whoever stays keeps process and variables."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import values
from nbdist.errors import ClusterError
from nbdist.ranks import named
from nbdist.records import RankInfo, from_wire

if TYPE_CHECKING:
    from nbdist.cluster import Cluster
    from nbdist.processes import Processes

__all__ = ["adopt", "repair", "resize", "shrink"]

REGISTER_S = 60.0
CATCH_UP_S = 5.0
RETURN_S = 30.0  # for the agent of a lost host that is started again


def repair(cluster: Cluster, copy: str | None = None) -> str:
    """Put an empty rank in the place of each dead one; see ``Cluster.repair``."""
    world = cluster.world
    _refuse_while_running(cluster)
    dead = {rank: engine for rank, engine in enumerate(world.engines) if engine in cluster.deaths}
    if not dead:
        if world.broken:
            world.form()
            return "The group was formed anew; no rank was lost."
        return "Nothing to repair: every rank lives and the group is whole."
    _await_ids(cluster, absent=dead.values())
    _bring_back_hosts(cluster, {cluster.hosts.nodes.get(engine, 0) for engine in dead.values()})
    for rank, engine in dead.items():
        local_rank = cluster.hosts.local_ranks.get(engine, world.ranks[rank].local_rank)
        cluster.fork(local_rank, engine, cluster.hosts.nodes.get(engine, 0))
    _await_ids(cluster, present=dead.values())
    world.form()
    done = f"{named(dead)} replaced by {'an empty one' if len(dead) == 1 else 'empty ones'}"
    living = [rank for rank in range(world.size) if rank not in dead]
    if living:
        done += f"; {named(living)} kept {'its' if len(living) == 1 else 'their'} state"
    if copy is not None:
        if not living:
            raise ClusterError(f"{done}, but no rank is left to copy {copy!r} from.")
        values.copy(cluster, copy, living[0], dead)
        done += f"; {copy} copied from rank {living[0]}"
    return done + "."


def shrink(cluster: Cluster) -> str:
    """Go on without the dead ranks; see ``Cluster.repair``."""
    world = cluster.world
    _refuse_while_running(cluster)
    dead = {rank: engine for rank, engine in enumerate(world.engines) if engine in cluster.deaths}
    if not dead:
        return "Nothing to shrink: every rank lives."
    if len(dead) == world.size:
        raise ClusterError("No rank lives. %cluster start begins anew.")
    before = world.size
    _await_ids(cluster, absent=dead.values())
    cluster.n = before - len(dead)
    world.form()
    cluster.telemetry.world_size = cluster.n
    return (
        f"The world shrank from {before} to {cluster.n} ranks without {named(dead)}; "
        f"the others kept their state and are {named(range(cluster.n))} now."
    )


def resize(cluster: Cluster, n: int) -> str:
    """Grow or shrink the world; see ``Cluster.resize``."""
    from nbdist.host import check_size, visible_gpus

    world = cluster.world
    _refuse_while_running(cluster)
    processes = cluster._processes
    assert processes is not None
    if processes.one_host:
        check_size(n, visible_gpus(), cluster.backend, cluster.oversubscribe)
    elif n < 1:
        raise ValueError(f"-n {n}: a world has at least 1 rank.")
    if any(engine in cluster.deaths for engine in world.engines):
        raise ClusterError("A rank is dead. First %cluster repair, then %cluster resize.")
    before = world.size
    if n == before:
        return f"The world has {n} ranks already."
    if n < before:
        leaving = world.engines[n:]
        cluster._retired.update(leaving)
        for engine in leaving:
            cluster.kill(engine)
        _await_ids(cluster, absent=leaving)
    else:
        joining = [engine for engine in range(n + before) if engine not in world.engines][: n - before]
        cluster._retired.difference_update(joining)
        taken = cluster.hosts.occupied()
        places = []
        for _ in joining:
            places.append(processes.place(taken))
            taken.append(places[-1])
        _bring_back_hosts(cluster, {node for node, _ in places})
        for (node, local_rank), engine in zip(places, joining, strict=True):
            cluster.fork(local_rank, engine, node)
        _await_ids(cluster, present=joining)
    cluster.n = n
    world.form()
    cluster.telemetry.world_size = n
    if n < before:
        return (
            f"The world shrank from {before} to {n} ranks; {named(range(n))} kept {'its' if n == 1 else 'their'} state."
        )
    new = range(before, n)
    return f"The world grew from {before} to {n} ranks; {named(new)} {'are' if len(new) > 1 else 'is'} empty."


def adopt(cluster: Cluster, entry: dict[str, Any], deadline: float) -> None:
    """Connect to a kept cluster and take it over."""
    from nbdist.processes import Found

    # a job's own folder may be on another host, and is not ours to remove
    cluster.run_dir = Path(tempfile.mkdtemp(prefix="nbdist-")) if entry.get("job") else Path(entry["run_dir"])
    processes = cluster._processes = Found(entry, on_agent=cluster._on_agent, on_agent_end=cluster._on_agent_end)
    _connect(cluster, processes, deadline)
    if processes.theirs:
        _await_ids(cluster, present=range(processes.n))
    _take_over(cluster, processes, deadline, entry.get("logs"))


def visit(cluster: Cluster, where: str, deadline: float) -> None:
    """Connect to an ipyparallel cluster that the user has started, and make ranks of its engines."""
    from nbdist.ipcluster import Visited

    processes = Visited(where, on_agent=cluster._on_agent, on_agent_end=cluster._on_agent_end)
    cluster.run_dir = Path(tempfile.mkdtemp(prefix="nbdist-"))
    cluster._processes = processes
    _connect(cluster, processes, deadline)
    processes.settle(cluster.client)
    _take_over(cluster, processes, deadline, None)


def _connect(cluster: Cluster, processes: Processes, deadline: float) -> None:
    from nbdist import startup
    from nbdist.page import Page

    cluster._page = Page()
    cluster._page.closed = True
    cluster._early = []
    startup.connect(cluster, processes, deadline)


def _take_over(cluster: Cluster, processes: Processes, deadline: float, logs: str | None) -> None:
    """Take the world of found engines as it is: forming it anew would end what the ranks run."""
    from nbdist import cells, startup
    from nbdist.host import visible_gpus

    client = cluster.client
    replies = client.ask(client.ids, "who", timeout=max(1.0, deadline - time.monotonic()))
    infos = {engine: from_wire(RankInfo, reply["info"]) for engine, reply in replies.items() if reply}
    if processes.theirs and not infos:  # nobody has formed its group yet
        if cluster.backend == "auto":
            gpus = visible_gpus() if processes.one_host else cluster.hosts.gpus
            cluster.backend = "nccl" if processes.n <= gpus else "gloo"
        cluster.n = processes.n
        cluster._early = None
        cluster._world = startup.new_world(cluster)
        cluster._world.form(wait=max(1.0, deadline - time.monotonic()))
        if processes.one_host:
            pids = (info.pid for info in cluster._world.ranks)
            cluster._engine_pids = dict(zip(cluster._world.engines, pids, strict=True))
        return
    silent = sorted(set(client.ids) - set(infos))
    if silent or not infos:
        raise ClusterError(f"Engines {silent or 'none'} of the kept cluster do not answer. Try again, or start anew.")
    cluster._engine_pids = {engine: info.pid for engine, info in infos.items()}
    infos |= _died_unseen(cluster, infos) if processes.one_host else {}
    world = cluster._world = startup.new_world(cluster)
    world.engines = tuple(sorted(infos, key=lambda engine: infos[engine].rank))
    world.ranks = tuple(infos[engine] for engine in world.engines)
    if processes.theirs:
        cluster.backend = world.backend = world.ranks[0].backend
    world.generation = max(info.generation for info in infos.values())
    cluster.n = world.size
    if logs is not None:
        cluster.telemetry.replay(Path(logs) / "runs")
    _catch_up(cluster)
    busy = {infos[engine].rank: reply["label"] for engine, reply in replies.items() if reply and reply["label"]}
    if busy:
        cells.adopt(cluster, busy)


def _died_unseen(cluster: Cluster, infos: dict[int, RankInfo]) -> dict[int, RankInfo]:
    """Give a place to the ranks that died while no notebook was attached, so that they can be told of and replaced."""
    living = next(iter(infos.values()))
    lost = sorted(set(range(living.world_size)) - {info.rank for info in infos.values()})
    free = (engine for engine in itertools.count() if engine not in infos)
    stand_ins = {next(free): replace(living, rank=rank, local_rank=rank, pid=0) for rank in lost}
    cluster.deaths.update({engine: {"why": "died while no notebook was attached"} for engine in stand_ins})
    return stand_ins


def _bring_back_hosts(cluster: Cluster, nodes: Iterable[int]) -> None:
    """Start the agents of lost hosts, before anything is forked there."""
    assert cluster._processes is not None
    if cluster._processes.one_host:
        return
    for node in sorted(nodes):
        if not cluster.hosts.bring_back(node, RETURN_S):
            why = (cluster.hosts.missing or cluster.hosts.failure).strip().splitlines()[-1:]
            said = why[0].strip().rstrip(".") if why else f"no sign of it in {RETURN_S:g} s"
            raise ClusterError(f"A lost host is not back: {said}. Go on without it: %cluster repair --shrink.")


def _refuse_while_running(cluster: Cluster) -> None:
    if cluster.cell is not None:
        raise ClusterError(f"In[{cluster.cell.label}] still runs on the ranks. First %cluster interrupt.")


def _await_ids(cluster: Cluster, *, present: Iterable[int] = (), absent: Iterable[int] = ()) -> None:
    """Wait until engines have registered, or are known to be gone."""
    wanted, gone = set(present), set(absent)
    deadline = time.monotonic() + REGISTER_S
    with cluster._changed:
        while not (wanted <= set(cluster.client.ids)) or gone & set(cluster.client.ids):
            again = [engine for engine in wanted if engine in cluster.deaths]
            if again:
                raise ClusterError(
                    f"The replacement of engine {again[0]} ended while it was starting. See %cluster logs."
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClusterError(f"Engines did not {'register' if wanted else 'leave'} in {REGISTER_S:g} s.")
            cluster._changed.wait(min(left, 0.1))


def _catch_up(cluster: Cluster) -> None:
    """Ask the ranks for the records that nobody has heard; then go on with those that have come meanwhile."""
    client = cluster.client
    replies = client.ask(client.ids, "recent", timeout=CATCH_UP_S)
    heard = {engine: json.loads(reply["payloads"]) for engine, reply in replies.items() if reply is not None}
    held = {engine: payloads for engine, payloads in heard.items() if payloads}
    missed = list(itertools.chain.from_iterable(held.values()))
    cluster.telemetry.catch_up(missed)
    last = {_sender(payload): payload["number"] for payload in missed}
    for engine, payloads in held.items():
        cluster._heard.setdefault(client._engines[engine], payloads[-1]["number"])
    with cluster._changed:
        early, cluster._early = cluster._early or [], None
        for payload in early:
            if payload["number"] > last.get(_sender(payload), 0):
                cluster.telemetry.receive(payload)


def _sender(payload: Mapping[str, Any]) -> int:
    return int(payload["rank"] if payload["kind"] == "steps" else payload["event"]["rank"])
