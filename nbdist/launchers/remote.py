"""What all launchers of other hosts have in common: links come to the exchange, get their orders and are watched."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import traitlets
from ipyparallel.cluster.launcher import EngineLauncher

from nbdist import __version__
from nbdist.channel import FILE, ExchangeAddress, local_address
from nbdist.errors import ClusterError
from nbdist.lines import ExchangeLine

__all__ = ["Plan", "RemoteAgents", "Slot", "parse_hosts"]

SETTLE_S = 2.0  # after a first host has failed, the time in which the others' failures are told with it
POLL_S = 0.05
# settings of the notebook's environment that its ranks on other hosts get too
FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "NBDIST_")
PRIVATE = ("NBDIST_RUN_DIR", "NBDIST_KEEP", "NBDIST_EXCHANGE", "NBDIST_HOME")
ELSEWHERE = "192.0.2.1"  # an address that is nobody's: its route is the default one


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One host of a plan: its number, its name where it is known beforehand, and how many ranks it takes."""

    node: int
    label: str
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which hosts take how many of ``n`` ranks: hosts are filled in order."""

    n: int
    slots: tuple[Slot, ...]

    @property
    def counts(self) -> dict[int, int]:
        """Node to the number of ranks that start there."""
        counts, left = {}, self.n
        for slot in self.slots:
            counts[slot.node] = min(slot.room, left)
            left -= counts[slot.node]
        return {node: count for node, count in counts.items() if count}

    def only(self, nodes: Iterable[int]) -> Plan:
        """Give the plan for some of its hosts: as many of its ranks as they take."""
        slots = tuple(slot for slot in self.slots if slot.node in set(nodes))
        return Plan(n=min(self.n, sum(slot.room for slot in slots)), slots=slots)

    def first_ids(self) -> dict[int, int]:
        """Node to the number of its first engine."""
        firsts, total = {}, 0
        for node, count in self.counts.items():
            firsts[node] = total
            total += count
        return firsts


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Read ``gpu1:8,gpu2:8``; a host without a number takes one rank.

    Raises
    ------
    ValueError
        Naming the part that cannot be read.
    """
    hosts = []
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        if not name or name.startswith("-") or (count and not (count.isdigit() and int(count))):
            raise ValueError(f"--hosts {text!r}: {part!r} is not NAME or NAME:RANKS, as in gpu1:8,gpu2:8.")
        hosts.append((name, int(count or 1)))
    doubled = {name for name, _ in hosts if [n for n, _ in hosts].count(name) > 1}
    if doubled:
        raise ValueError(f"--hosts {text!r}: {', '.join(sorted(doubled))} is named twice.")
    return hosts


class RemoteAgents(EngineLauncher):  # type: ignore[misc]  # ipyparallel is not typed
    """One node agent per host, each with a link to the exchange.

    Subclasses say which hosts there are (``make_plan``) and how a link gets there (``begin``, ``submit``, ``finish``).
    ``on_event`` is called, from threads of the launcher, with each report of an agent, and with what the launcher has
    to say itself: ``state`` (a line to show while one waits), ``failed`` (why it will not come up), ``lost`` (a host).
    """

    order = traitlets.Dict(help="What the agents are told beside the usual.")
    options = traitlets.Dict(help="What was said at this start; goes before the profile's settings.")
    on_event = traitlets.Any(help="Called with each report.")
    spawned = traitlets.Any(help="For the launcher of this host only.")

    hosts = traitlets.Unicode("", help="Hosts and ranks: gpu1:8,gpu2:8.").tag(config=True)
    python = traitlets.Unicode(sys.executable, help="The Python of the hosts.").tag(config=True)
    address = traitlets.Unicode("", help="The address of this host that the other hosts reach.").tag(config=True)
    patience = 60.0  # seconds that a start may take, where nothing else was said

    plan: Plan
    line: ExchangeLine | None = None

    # -- for subclasses ----------------------------------------------------------------------------------------------

    @classmethod
    def make_plan(cls, n: int | None, setting: Mapping[str, Any]) -> Plan:
        """Say which hosts take how many ranks; ``n`` None is as many as there is room for."""
        raise NotImplementedError

    @classmethod
    def peers(cls, setting: Mapping[str, Any]) -> Iterable[str]:
        """Names or addresses of hosts, for the choice of the controller's address."""
        return ()

    def describe(self) -> str:
        """Give what would be submitted or run, without keys."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start what can start before the controller has."""

    async def submit(self) -> None:
        """Start what needs the exchange."""

    async def finish(self) -> None:
        """Wait for what was started, end what does not end, take back what was submitted."""

    def all_lost(self) -> None:
        """Take note that the last host has gone: here the end of the cluster."""
        self.notify_stop({"exit_code": 1})

    def all_came(self) -> None:
        """Take note that hosts which had been lost are all back."""

    def revive(self, node: int) -> None:
        """Start the link of a lost host again."""
        label = self._labels.get(node, str(node))
        raise ClusterError(
            f"Host {label} cannot be replaced: {type(self).__name__} starts all hosts at once. "
            "Go on without it: %cluster repair --shrink."
        )

    # -- settings ----------------------------------------------------------------------------------------------------

    def setting(self, name: str) -> Any:
        """Give an option of this start, or what the profile says."""
        chosen = self.options.get(name)
        return getattr(self, name) if chosen is None else chosen

    @property
    def settings(self) -> dict[str, Any]:
        names = [name for name in self.traits(config=True) if name not in ("environment",)]
        return {name: self.setting(name) for name in names}

    @classmethod
    def controller_address(cls, setting: Mapping[str, Any]) -> str:
        """Choose the address that the controller listens on: this host's on the route to the others.

        Raises
        ------
        ClusterError
            When there is none, or it differs from host to host.
        """
        if setting.get("address"):
            return own(str(setting["address"]))
        found = {}
        for peer in cls.peers(setting):
            try:
                found[peer] = local_address(peer)
            except OSError:
                continue  # a name that only ssh knows, or a wrong one, which ssh will tell
        if len(set(found.values())) > 1:
            routes = ", ".join(f"{peer} from {address}" for peer, address in found.items())
            raise ClusterError(
                f"The hosts are reached from different addresses of this one ({routes}). Give --address."
            )
        if found:
            address = next(iter(found.values()))
            if ":" in address:
                raise ClusterError(f"{next(iter(found))} has an IPv6 address only: IPv6-only hosts are not supported.")
            return address
        try:
            return local_address(ELSEWHERE)
        except OSError:
            return "127.0.0.1"

    def first_line(self, n: int) -> dict[str, Any]:
        """Give what a link is told at once, so that its agent can begin to import torch."""
        forwarded = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED) and k not in PRIVATE}
        return {"prepare": n, "environment": {**forwarded, **self.environment}, "folder": os.getcwd()}

    def second_line(self, **where: Any) -> dict[str, Any]:
        """Give what a link is told when the exchange is there."""
        assert self._address is not None
        return {"exchange": self._address.as_dict(), "keep": bool(self.order.get("keep")), **where}

    # -- the launcher's life -----------------------------------------------------------------------------------------

    def find_args(self) -> list[str]:
        return [self.setting("python"), "-m", "nbdist.engine"]

    async def start(self, n: int) -> None:
        self._address: ExchangeAddress | None = None
        self._connection: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._hellos: dict[int, dict[str, Any]] = {}
        self._started: set[int] = set()
        self._labels: dict[int, str] = {}
        self._failures: dict[str, str] = {}
        self._failed_at = 0.0
        self._stopping = False
        self._ran = False  # the ranks were started once
        self.plan = self.make_plan(n, self.settings)
        self._labels = {slot.node: slot.label for slot in self.plan.slots}
        self.n = self.plan.n
        self.begin()
        await self._controller_is_up()
        self.line = ExchangeLine(self._address, self._on_line)  # type: ignore[arg-type]
        await self.submit()
        self.notify_start({"hosts": len(self.plan.counts)})

    async def stop(self) -> None:
        if not hasattr(self, "_hellos"):
            return
        self.close_input()
        await self.finish()
        self.hang_up()
        self.notify_stop({"exit_code": 0})

    def hang_up(self) -> None:
        """Close the line to the agents, and leave them as they are."""
        if self.line is not None:
            self.line.close()

    def tell(self, **command: Any) -> None:
        """Send one command to the agent of a node."""
        if self.line is not None:
            self.line.tell(**command)

    def close_input(self) -> None:
        """Tell all agents to end."""
        self._stopping = True
        for node in list(self._hellos):
            self.tell(op="stop", node=node)

    async def abandon(self) -> None:
        """End what can be ended without the controller, which is gone or goes now."""
        self.close_input()
        self._hellos.clear()  # nobody is left to say that he has ended
        await self.finish()

    def place(self, taken: Iterable[tuple[int, int]]) -> tuple[int, int]:
        """Give node and local rank for one more rank.

        Raises
        ------
        ClusterError
            When the hosts are full.
        """
        used = set(taken)
        # a host that was lost comes last: it has to be started again first
        for slot in sorted(self.plan.slots, key=lambda slot: slot.node not in self._hellos):
            for local_rank in range(slot.room):
                if (slot.node, local_rank) not in used:
                    return slot.node, local_rank
        hosts = ", ".join(f"{self._labels.get(slot.node) or slot.node}:{slot.room}" for slot in self.plan.slots)
        raise ClusterError(f"No room for one more rank: {hosts} are full.")

    def report(self, **event: Any) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def fail(self, label: str, text: str) -> None:
        """Say that a host will not come up; others that fail at the same time are told with it."""
        with self._lock:
            self._failures.setdefault(label, text)
            first = not self._failed_at
            self._failed_at = self._failed_at or time.monotonic()
        if first:
            threading.Thread(target=self._tell_failures, name="nbdist-failed", daemon=True).start()

    def _tell_failures(self) -> None:
        expected = len(self.plan.counts)
        while time.monotonic() - self._failed_at < SETTLE_S and len(self._failures) + len(self._hellos) < expected:
            time.sleep(POLL_S)
        up = self.plan.only(self._hellos).n
        lines = "\n".join(f"  {label}: {text}" for label, text in self._failures.items())
        advice = f"\nGo on with {up}: %cluster start … --min {up}" if up else ""
        text = f"{up} of {self.n} engines can start.\n{lines}{advice}"
        self.report(event="failed", text=text, missing=lines)

    def go_on(self, at_least: int) -> int:
        """Make do with the hosts that have come; give how many ranks they take, or 0 where that is too few."""
        plan = self.plan.only(self._hellos)
        if plan.n < at_least or self._ran:
            return 0
        self.plan, self.n = plan, plan.n
        self._failures.clear()
        self._failed_at = 0.0
        self._start_agents(plan.slots[0].node)
        return plan.n

    async def _controller_is_up(self) -> None:
        exchange = Path(self.profile_dir) / FILE
        connection = Path(self.connection_files["engine"])
        while not (exchange.exists() and connection.exists()):
            if self.parent is not None and self.parent.controller is not None and not self.parent.controller.running:
                raise RuntimeError("it ended while it was starting")
            await asyncio.sleep(POLL_S)
        self._address = ExchangeAddress.read(exchange)
        while True:
            try:
                self._connection = json.loads(connection.read_text())
                return
            except ValueError:  # it is being written
                await asyncio.sleep(POLL_S)

    def _on_line(self, event: dict[str, Any]) -> None:
        kind, node = event["event"], event.get("node", 0)
        if kind == "hello":
            self._labels[node] = event["host"]
            self._hellos[node] = event
            self.report(**event)
            self._start_agents(node)
        elif kind in ("ended", "lost"):
            self._hellos.pop(node, None)
            self._started.discard(node)
            if self._stopping:
                return
            why = f"not heard of for {event['seconds']:g} s" if kind == "lost" else "its node agent ended"
            self.report(event="lost", node=node, host=event["host"], why=why)
            if not self._hellos:
                self.all_lost()
        else:
            self.report(**event)

    def _start_agents(self, node: int) -> None:
        """Give the agents their orders, when all of them are there and alike."""
        counts = self.plan.counts
        if node not in counts:  # it came when the others had gone on without it
            self.tell(op="stop", node=node)
            return
        if self._ran:  # a host that has come back: its ranks are forked one by one
            self._order(node, 0)
            if set(counts) <= set(self._hellos):
                self.all_came()
            return
        if not set(counts) <= set(self._hellos):
            return
        unlike = different_versions(self._hellos.values())
        if unlike:
            self.report(event="failed", text=unlike)
            return
        self._ran = True
        for number, count in counts.items():
            self._order(number, count)

    def _order(self, node: int, count: int) -> None:
        self._started.add(node)
        self.tell(
            op="start",
            node=node,
            n=count,
            local_world_size=self.plan.counts.get(node, count),
            first_id=self.plan.first_ids().get(node, 0),
            world_size=self.n,
            connection=self._connection,
            engine_args=list(self.engine_args),
            **self.order,
        )


def own(address: str) -> str:
    """Give an address of this host back.

    Raises
    ------
    ClusterError
        When it is none, or a name that cannot be resolved.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(target)
    except OSError as error:
        why = error.strerror or str(error)
        raise ClusterError(
            f"--address {address}: this host cannot listen there ({why}). Leave it out, or see: ip addr"
        ) from None
    return address


def different_versions(hellos: Iterable[Mapping[str, Any]]) -> str:
    """Say which hosts differ in Python, torch or nbdist, from each other or from the notebook; nothing if none does."""
    found: dict[str, dict[str, list[str]]] = {"python": {}, "torch": {}, "nbdist": {}}
    # values travel pickled: the notebook's own Python has to match in its minor version, its torch need not exist
    for hello in hellos:
        for package, hosts in found.items():
            hosts.setdefault(hello[package], []).append(hello["host"])
    own = {"python": platform.python_version(), "nbdist": __version__}
    for package, version in own.items():
        known = [v for v in found[package] if _alike(package, v, version)]
        found[package].setdefault(known[0] if known else version, []).append("this notebook")
    lines = []
    for package, hosts in found.items():
        kinds = {".".join(version.split(".")[:2]) if package == "python" else version for version in hosts}
        if len(kinds) > 1:
            lines.append(
                f"{package} differs: "
                + "; ".join(f"{version} on {', '.join(names)}" for version, names in hosts.items())
            )
    fix = "Install the same versions everywhere, or name another interpreter with --python."
    return "\n".join([*lines, fix]) if lines else ""


def _alike(package: str, one: str, other: str) -> bool:
    return one == other or (package == "python" and one.split(".")[:2] == other.split(".")[:2])
