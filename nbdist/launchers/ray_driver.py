"""The notebook's driver in a Ray cluster: ``python -m nbdist.launchers.ray_driver``.

A process of its own, so that the notebook neither imports Ray nor is connected to it: ``ray.init`` stays free for the
user. It reserves a placement group and starts in each of its bundles an actor that holds the link of that host
(``nbdist.engine.link``) at the end of a pipe. When this process goes, however it goes, Ray ends its actors; with an
actor the pipe ends, with the pipe the link, and with that every rank of the host.

It is told what to do by JSON lines on its standard input, and ends with it::

    <- {"op": "begin", "address": "auto", "bundle": {"CPU": 8, "GPU": 8}, "nodes": 2, "first": {...}, ...}
    <- {"op": "submit", "second": {...}}
    <- {"op": "revive", "node": 1}
    <- {"op": "end"}
    -> {"event": "state", "text": "waits for room in the Ray cluster: ..."}
    -> {"event": "failed", "text": "no Ray cluster at 10.0.0.1:6379: ..."}
    -> {"event": "host", "node": 0, "label": "gpu1"}
    -> {"event": "ended", "node": 0, "code": 1, "told": "", "log": "No module named nbdist"}
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["main", "shortage"]

TICK_S = 0.1
STATE_S = 1.0
CONNECT_S = 5.0
END_S = 4.0  # for links to end by themselves
HANG_S = 8.0  # a call of Ray that does not return after our input has ended is left to itself
LOG_TAIL = 2000


class Holder:
    """An actor: starts the link of its Ray node and holds its standard input."""

    def begin(self, python: str, first: dict[str, Any]) -> str:
        """Start the link, which starts the node agent, which imports torch; give this host's name."""
        # Ray gives this process a thread for each core of the bundle; each rank gets its share of them
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the link
        # Ray's threads block signals, and a child inherits that from the thread that starts it: Stop would not reach it
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._link = subprocess.Popen(
            [python or sys.executable, "-m", "nbdist.engine", "--lifeline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        self._tell(first)
        return socket.gethostname()

    def submit(self, second: dict[str, Any]) -> None:
        """Tell the link where the exchange is."""
        self._tell(second)

    def wait(self) -> dict[str, Any]:
        """Wait for the end of the link; give its exit code and what it said of it."""
        told = ""
        assert self._link.stdout is not None
        for line in self._link.stdout:
            with contextlib.suppress(ValueError):  # what a library prints is no report
                event = json.loads(line)
                told = event["text"] if event.get("event") == "failed" else told
        code = self._link.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL))
        return {"code": code, "told": told, "log": self._log.read().decode(errors="replace").strip()}

    def close(self) -> None:
        """Close the pipe: the link ends."""
        with contextlib.suppress(OSError):
            self._link.stdin.close()  # type: ignore[union-attr]

    def _tell(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._link.stdin.write((json.dumps(line) + "\n").encode())  # type: ignore[union-attr]
            self._link.stdin.flush()  # type: ignore[union-attr]


class Told:
    """What the launcher says; ``over`` is set when it has said ``end``, or can say nothing any more."""

    def __init__(self) -> None:
        self.keep = False
        self.holds = False  # there is something to give back
        self.over = threading.Event()
        self.commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "end":
                self.keep = False
                break
            self.keep = command.get("keep", self.keep)
            self.commands.put(command)
        if not self.keep:
            self.over.set()
            time.sleep(HANG_S if self.holds else 0)
            os._exit(1)


class Driver:
    """A placement group, and an actor in each of its bundles."""

    def __init__(self, order: dict[str, Any], told: Told, report: Any) -> None:
        import ray

        self.ray = ray
        self.order, self.told, self.report = order, told, report
        self.bundle: dict[str, float] = order["bundle"]
        self.second: dict[str, Any] = {}
        self.holders: dict[int, Any] = {}  # number of a host -> its actor
        self.labels: dict[int, str] = {}
        self.attempts: dict[int, int] = {}  # number of a host -> how often it was started anew, as the launcher counts
        self.begun: dict[Any, int] = {}  # what comes back when a link has started -> number of its host
        self.ended: dict[Any, int] = {}  # what comes back when it has ended
        self.group: Any = None

    def connect(self) -> str:
        """Join the Ray cluster; give why that was impossible, or nothing."""
        address = self.order["address"]
        host, _, port = address.rpartition(":")
        if host and port.isdigit() and "//" not in address:
            try:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
            except OSError as error:
                return f"no Ray cluster at {address}: {error.strerror or error}. {self._start_one}"
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            if address == "auto":
                return f"no Ray cluster runs on this host. {self._start_one}"
            return (
                f"{address} answers, but not as a Ray cluster to this notebook ({first_line(error)}). Is it the "
                "address of its head, and is RAY_AUTH_TOKEN or ~/.ray/auth_token of this cluster?"
            )
        except Exception as error:  # versions that differ, a token that is refused: Ray has no one class for them
            return f"Ray refused this notebook: {first_line(error)}"
        return ""

    @property
    def _start_one(self) -> str:
        return "Start one (ray start --head), or name it: --ray-address HOST:6379, or RAY_ADDRESS."

    def reserve(self) -> str:
        """Wait for the placement group; give why there will be none, or nothing."""
        from ray.util import placement_group

        nodes = self.order["nodes"]
        if not self.order["grows"]:
            short = shortage(self.bundle, nodes, self.ray.nodes())
            if short:
                return short
        self.group = placement_group([self.bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "STRICT_PACK")
        ready, told_at = self.group.ready(), 0.0
        while not self.told.over.is_set():
            if self.ray.wait([ready], timeout=TICK_S)[0]:
                self.ray.get(ready)
                return ""
            if time.monotonic() - told_at > STATE_S:
                told_at = time.monotonic()
                free, total = self.ray.available_resources(), self.ray.cluster_resources()
                has = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in self.bundle)
                asked = in_words(self.bundle, nodes)
                self.report(event="state", text=f"waits for room in the Ray cluster: {asked}; free are {has}")
        return "the notebook has ended"

    def start(self, node: int) -> None:
        """Start the actor of one bundle, and its link."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        others = {name: amount for name, amount in self.bundle.items() if name not in ("CPU", "GPU")}
        actor = self.ray.remote(Holder).options(
            num_cpus=self.bundle.get("CPU", 0),
            num_gpus=self.bundle.get("GPU", 0),
            resources=others or None,
            max_concurrency=4,  # told things while it waits
            max_restarts=0,  # an empty link in the place of a lost one is for %cluster repair to ask for
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=node),
        )
        holder = self.holders[node] = actor.remote()
        self.begun[holder.begin.remote(self.order["python"], self.order["first"])] = node

    def serve(self) -> None:
        """Follow what is told until there is a reason to end."""
        while not self.told.over.wait(TICK_S):
            waiting = [*self.begun, *self.ended]
            for reference in self.ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else ():
                if reference in self.begun:
                    self._has_begun(reference)
                else:
                    self._has_ended(reference)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._follow(self.told.commands.get_nowait())
            if not self.begun and not self.ended and self.told.keep:
                return  # a kept cluster was stopped by another notebook

    def end(self) -> None:
        """End what still runs, by closing its pipe, and give back what was reserved."""
        from ray.util import remove_placement_group

        for holder in self.holders.values():
            holder.close.remote()
        if self.ended:
            self.ray.wait(list(self.ended), num_returns=len(self.ended), timeout=END_S)
        for holder in self.holders.values():
            self.ray.kill(holder)
        if self.group is not None:
            remove_placement_group(self.group)
        self.ray.shutdown()

    def _follow(self, command: dict[str, Any]) -> None:
        if command["op"] == "submit":
            self.second = command["second"]
            for node in self.labels:
                self._submit(node)
        elif command["op"] == "revive":
            node = command["node"]
            for references in (self.begun, self.ended):
                for reference in [r for r, number in references.items() if number == node]:
                    del references[reference]
            self.labels.pop(node, None)
            self.attempts[node] = command["attempt"]
            self.ray.kill(self.holders[node])
            self.start(node)

    def _submit(self, node: int) -> None:
        self.holders[node].submit.remote({**self.second, "node": node, "label": self.labels[node]})

    def _has_begun(self, reference: Any) -> None:
        node = self.begun.pop(reference)
        try:
            host = self.ray.get(reference)
        except Exception as error:
            self._tell_of_the_end(node, error)
            return
        self.ended[self.holders[node].wait.remote()] = node  # only now: calls of such an actor may overtake each other
        # two Ray nodes on one machine are two hosts to us
        self.labels[node] = host if host not in self.labels.values() else f"{host}-{node}"
        self.report(event="host", node=node, label=self.labels[node])
        if self.second:
            self._submit(node)

    def _has_ended(self, reference: Any) -> None:
        node = self.ended.pop(reference)
        try:
            end = self.ray.get(reference)
        except Exception as error:
            self._tell_of_the_end(node, error)
        else:
            self._report_end(node, self.labels[node], **end)

    def _tell_of_the_end(self, node: int, error: Exception) -> None:
        """Report that an actor or its node has gone, or that its Python cannot run it: Ray says which."""
        cause = getattr(error, "cause", None) or error  # of what the actor itself raised
        label = self.labels.get(node, f"bundle {node}")
        self._report_end(node, label, code=None, told=f"its actor: {first_line(cause)}", log="")

    def _report_end(self, node: int, label: str, **end: Any) -> None:
        self.report(event="ended", node=node, label=label, attempt=self.attempts.get(node, 0), **end)


def shortage(bundle: Mapping[str, float], nodes: int, known: list[dict[str, Any]]) -> str:
    """Say what was asked for and what there is, where a Ray cluster of ``known`` nodes is too small; else nothing."""
    living = [node for node in known if node["Alive"]]
    fitting = [n for n in living if all(n["Resources"].get(name, 0) >= amount for name, amount in bundle.items())]
    if len(fitting) >= nodes:
        return ""
    names = [*dict.fromkeys(["CPU", "GPU", *bundle])]
    has = "; ".join(
        f"{node['NodeManagerHostname']}: " + ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in names)
        for node in living
    )
    return (
        f"{in_words(bundle, nodes)} asked for, but {len(fitting) or 'none'} of the cluster's {len(living)} nodes "
        f"{'has' if len(fitting) <= 1 else 'have'} that ({has}). Ask for less with --nodes, -n, --gpus-per-node or "
        "--cpus-per-rank, or add nodes (ray start --address …). Where Ray adds them itself: c.RayAgents.grows = True."
    )


def in_words(bundle: Mapping[str, float], nodes: int) -> str:
    """Put a placement group into words: ``2 nodes with 8 CPU, 8 GPU each``."""
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    return f"{nodes} nodes with {each} each" if nodes > 1 else f"1 node with {each}"


def first_line(error: BaseException) -> str:
    """Give the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def main() -> int:
    """Follow the launcher; give the exit status."""
    os.umask(0o077)
    # Ray prints; the launcher reads reports
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(**event: Any) -> None:
        with contextlib.suppress(OSError):
            reports.write(json.dumps(event) + "\n")

    told = Told()
    threading.Thread(target=told.read, name="nbdist-told", daemon=True).start()
    while True:
        if told.over.is_set():
            return 0
        with contextlib.suppress(queue.Empty):
            order = told.commands.get(timeout=TICK_S)
            break
    driver = Driver(order, told, report)
    why = driver.connect()
    if not why:
        told.holds = True
        try:
            why = driver.reserve()
            if not why:
                for node in range(order["nodes"]):
                    driver.start(node)
                driver.serve()
        finally:
            driver.end()
    if why and not told.over.is_set():
        report(event="failed", text=why)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
