"""From nothing to a formed group: processes, a connection to them, engines that register, the first all_reduce.

A part of ``Cluster``, whose private fields it sets, kept apart from what a user asks of one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import kept
from nbdist.errors import ClusterError
from nbdist.host import check_ports, notices
from nbdist.hosts import offer
from nbdist.page import Page
from nbdist.processes import Launched, Processes, log_tail
from nbdist.report import describe_end

if TYPE_CHECKING:
    from nbdist.cluster import Cluster
    from nbdist.world import World

__all__ = ["connect", "launch", "new_world"]

LATE_S = 30.0  # for the ranks of those hosts that have come, when the others' time is over


def launch(cluster: Cluster, tell: Callable[[str], None], began: float) -> None:
    """Start controller and engines, and form their group; ``tell`` gets a line for each stage."""
    cluster._page = Page()
    check_ports()
    for notice in notices(cluster.backend, cluster.n):
        cluster._page.write(f"nbdist: {notice}\n", "stderr")
    tell("starting the controller")
    try:
        cluster.run_dir = Path(tempfile.mkdtemp(prefix="nbdist-"))
        (cluster.run_dir / "log").mkdir()
    except OSError as error:
        raise ClusterError(f"No room for temporary files: {error.strerror}. Make some, or set TMPDIR.") from None
    processes = cluster._processes = Launched(
        cluster.run_dir,
        profile=cluster.profile,
        n=cluster.n or None,
        keep=cluster.keep,
        timeout=cluster.timeout,
        on_agent=cluster._on_agent,
        on_agent_end=cluster._on_agent_end,
        on_controller_end=cluster._on_controller_end,
        options=cluster.options,
    )
    cluster.n, deadline = processes.n, began + processes.timeout
    connect(cluster, processes, deadline)
    tell(f"engines: 0 of {cluster.n}")
    _wait_for_engines(cluster, tell, deadline)
    if cluster.backend == "auto":
        cluster.backend = "nccl" if cluster.n <= cluster.hosts.gpus else "gloo"
    tell(f"forming the group of {cluster.n} ranks")
    cluster._world = new_world(cluster)
    cluster._world.form(wait=max(1.0, deadline - time.monotonic()))
    if cluster.keep:
        _write_down(cluster, processes.controller)
    tell("ready")


def connect(cluster: Cluster, processes: Processes, deadline: float) -> None:
    """Connect to a controller: requests, output and records."""
    # imported while the processes start, which takes as long
    from nbdist.client import RankClient, quiet_session
    from nbdist.telemetry import Telemetry

    info = processes.connection_info(deadline)
    cluster._telemetry = Telemetry(cluster.n, log_dir=cluster.log_dir("runs"), behind=cluster.hosts.behind)
    cluster._telemetry.ends = cluster.hosts.ends
    with quiet_session():
        client = cluster._client = RankClient(info, timeout=max(1.0, deadline - time.monotonic()))
    client.route = cluster._route
    client._registration_callbacks.append(cluster._on_registration)


def new_world(cluster: Cluster) -> World:
    """Give the world of these engines, not formed yet."""
    from nbdist.world import World

    assert cluster.run_dir is not None
    one_host = cluster._processes is None or cluster._processes.one_host
    return World(
        cluster.client, cluster.run_dir, backend=cluster.backend, timeout=cluster.collective_timeout, one_host=one_host
    )


def _wait_for_engines(cluster: Cluster, tell: Callable[[str], None], deadline: float) -> None:
    assert cluster._client is not None and cluster._processes is not None and cluster.run_dir is not None
    told, stage = 0, ""
    with cluster._changed:
        while len(cluster._client.ids) < cluster.n:
            if cluster.deaths and not cluster.hosts.make_do_without_the_dead():
                engine, death = next(iter(cluster.deaths.items()))
                raise ClusterError(
                    f"{len(cluster._client.ids)} of {cluster.n} engines registered; engine {engine} "
                    f"{describe_end(death)}.{offer(cluster.n - len(cluster.deaths))}{_indent(death.get('stderr', ''))}"
                )
            if cluster.hosts.failure and not cluster.hosts.make_do_with_those_that_came():
                raise ClusterError(cluster.hosts.failure.strip())
            if cluster._agent_end is not None:
                log = cluster.run_dir / "log" / "agent.log"
                last = log.read_text(errors="replace")[-1500:] if log.exists() else ""
                if "No module named 'torch'" in last:
                    raise ClusterError(
                        f"torch is missing where the engines run ({sys.executable}). Install it: pip install torch."
                    )
                raise ClusterError(f"The node agent ended before its engines had started.{_indent(last)}")
            if cluster._controller_end is not None:
                raise ClusterError(f"The controller ended while the engines were starting.{log_tail(cluster.run_dir)}")
            left = deadline - time.monotonic()
            if left <= 0 and cluster.hosts.make_do_with_those_that_came():
                deadline += LATE_S
            elif left <= 0:
                raise ClusterError(
                    f"{len(cluster._client.ids)} of {cluster.n} engines registered in {cluster._processes.timeout:g} s"
                    f"{f' ({cluster.hosts.stage})' if cluster.hosts.stage else ''}. {cluster.hosts.who_is_missing()}"
                    f"Give more with %cluster start --timeout.{log_tail(cluster.run_dir)}"
                )
            cluster._changed.wait(max(0.0, min(left, 0.1)))
            if cluster.hosts.stage != stage:
                stage = cluster.hosts.stage
                tell(stage)
            if len(cluster._client.ids) > told:
                told = len(cluster._client.ids)
                tell(f"engines: {told} of {cluster.n}")
    if told < cluster.n:
        tell(f"engines: {cluster.n} of {cluster.n}")


def _write_down(cluster: Cluster, controller: Any) -> None:
    cluster.name = cluster.name or str(controller.pid)
    entry = {
        "run_dir": str(cluster.run_dir),
        "controller": controller.pid,
        "controller_born": controller.create_time(),
        "n": cluster.n,
        "backend": cluster.backend,
        "collective_timeout": cluster.collective_timeout,
        "logs": str(cluster.log_dir("")),
        "profile": str(cluster.profile or ""),
    }
    kept.write_down(cluster.name, entry)


def _indent(text: str) -> str:
    text = text.strip()
    return "\n  " + text.replace("\n", "\n  ") if text else ""
