"""Nodes of a Ray cluster: a placement group with one bundle per host, in each an actor that holds the host's link."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import traitlets

from nbdist.errors import ClusterError
from nbdist.launchers.remote import Plan, RemoteAgents, Slot

__all__ = ["RayAgents"]

END_S = 10.0
DRIVER = (sys.executable, "-m", "nbdist.launchers.ray_driver")


class RayAgents(RemoteAgents):
    """Ray decides where, and with which GPUs; the ranks are processes of our own, not Ray workers.

    The notebook runs on a node of the Ray cluster. A driver of its own process talks to Ray; Ray ends the actors of a
    driver that has gone, and so the ranks.
    """

    patience = 600.0  # others may hold what was asked for

    ray_address = traitlets.Unicode(
        "", help="Ray's own address, HOST:6379; else RAY_ADDRESS, else the cluster here."
    ).tag(config=True)
    nodes = traitlets.Int(1, min=1, help="Number of hosts.").tag(config=True)
    gpus_per_node = traitlets.Int(0, min=0, help="GPUs of each host.").tag(config=True)
    ranks_per_node = traitlets.Int(0, min=0, help="Ranks of each host; 0: one per GPU.").tag(config=True)
    cpus_per_rank = traitlets.Int(1, min=1, help="CPUs that Ray keeps for each rank.").tag(config=True)
    resources = traitlets.Dict(
        help="What else each host must have, as Ray counts it: {'accelerator_type:H100': 0.01}."
    ).tag(config=True)
    grows = traitlets.Bool(False, help="Ray adds nodes when they are asked for: wait for them.").tag(config=True)
    python = traitlets.Unicode("", help="The Python of the hosts; else that of their Ray.").tag(config=True)

    @classmethod
    def make_plan(cls, n: int | None, setting: Mapping[str, Any]) -> Plan:
        nodes = setting["nodes"]
        if nodes < 1:
            raise ValueError(f"--nodes {nodes}: at least 1.")
        per_node = setting["ranks_per_node"] or setting["gpus_per_node"] or (-(-n // nodes) if n else 1)
        if n is not None and n != nodes * per_node:
            hosts = f"{nodes} node{'s' if nodes > 1 else ''}"
            raise ValueError(f"-n {n}, but {hosts} × {per_node} ranks are {nodes * per_node}.")
        return Plan(n=nodes * per_node, slots=tuple(Slot(node=i, label="", room=per_node) for i in range(nodes)))

    @classmethod
    def peers(cls, setting: Mapping[str, Any]) -> Iterable[str]:
        address = ray_address(setting).rpartition("//")[2]
        return [address.rpartition(":")[0].strip("[]")] if ":" in address else []

    @property
    def bundle(self) -> dict[str, float]:
        """What each host has to have."""
        gpus = self.setting("gpus_per_node")
        cpus = self.setting("cpus_per_rank") * self.plan.slots[0].room
        return {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **self.setting("resources")}

    def describe(self) -> str:
        group = {"strategy": "STRICT_SPREAD", "bundles": [self.bundle] * len(self.plan.slots)}
        python = self.setting("python") or "(Ray's Python)"
        return (
            f"Ray cluster: {ray_address(self.settings)}\n"
            f"placement group: {json.dumps(group)}\n"
            f"each bundle's actor runs: {python} -m nbdist.engine --lifeline"
        )

    def begin(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ClusterError(
                f"Ray is not installed for {sys.executable}. Install the version of the Ray cluster: "
                "pip install 'nbdist[ray]'"
            )
        self._coming = set(self.plan.counts)  # hosts that have not said hello yet
        self._attempts: Counter[int] = Counter()  # number of a host -> how often it was started anew
        room = self.plan.slots[0].room
        first = self.first_line(room)
        own = {"OMP_NUM_THREADS": str(self.setting("cpus_per_rank"))}
        if not self.setting("gpus_per_node"):
            own["CUDA_VISIBLE_DEVICES"] = ""  # Ray leaves those in sight that it has not given us
        first["environment"] = {**own, **first["environment"]}
        with open(self._log, "wb") as log:
            self._driver = Popen(DRIVER, stdin=PIPE, stdout=PIPE, stderr=log, start_new_session=True)
        self._tell_driver(
            op="begin",
            address=ray_address(self.settings),
            bundle=self.bundle,
            nodes=len(self.plan.slots),
            python=self.setting("python"),
            first=first,
            grows=self.setting("grows"),
            keep=bool(self.order.get("keep")),
        )
        self.report(event="state", text="joining the Ray cluster")
        threading.Thread(target=self._watch, name="nbdist-ray", daemon=True).start()

    async def submit(self) -> None:
        self._tell_driver(op="submit", second=self.second_line())

    def revive(self, node: int) -> None:
        self._failures.pop(self._labels[node], None)
        self._failed_at = 0.0
        self._coming.add(node)
        self._attempts[node] += 1
        self._tell_driver(op="revive", node=node, attempt=self._attempts[node])

    async def finish(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is None:
            return
        self._tell_driver(op="end")
        with contextlib.suppress(OSError):
            driver.stdin.close()
        deadline = time.monotonic() + END_S
        while driver.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if driver.poll() is None:
            driver.kill()  # Ray ends the actors of a driver that has gone
        driver.wait()

    def _on_line(self, event: dict[str, Any]) -> None:
        if event["event"] == "hello":
            self._coming.discard(event["node"])
        super()._on_line(event)

    def _tell_driver(self, **command: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._driver.stdin.write((json.dumps(command) + "\n").encode())  # type: ignore[union-attr]
            self._driver.stdin.flush()  # type: ignore[union-attr]

    def _watch(self) -> None:
        """Pass on what the driver says until it ends."""
        driver = self._driver
        assert driver.stdout is not None
        told = False
        with driver.stdout:
            for line in driver.stdout:
                event = json.loads(line)
                if event["event"] == "host":
                    self._labels[event["node"]] = event["label"]
                elif event["event"] == "failed":
                    told = True
                    self.report(event="failed", text=f"Ray: {event['text']}")
                elif event["event"] == "ended":
                    # the driver may learn of a lost actor's end later than we, who start another one
                    is_late = event["attempt"] != self._attempts[event["node"]]
                    if not self._stopping and event["node"] in self._coming and not is_late:
                        self.fail(event["label"], why_ended(event))
                else:
                    self.report(**event)
        code = driver.wait()
        if self._stopping:
            return
        if self._ran and not self.order.get("keep"):  # Ray has ended its actors: nobody is left to say so
            self.report(
                event="notice", text=f"the driver in the Ray cluster ended with code {code}, and with it all ranks."
            )
            for node, hello in list(self._hellos.items()):
                self._on_line({"event": "ended", "node": node, "host": hello["host"]})
        elif not self._ran and not told:
            lines = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()]
            self.fail("ray", f"the driver ended with code {code}: " + "\n    ".join(lines[-8:]))

    @property
    def _log(self) -> Path:
        return Path(self.profile_dir) / "log" / "ray.err"


def ray_address(setting: Mapping[str, Any]) -> str:
    """Give the address of the Ray cluster: as set, as in the environment, or Ray's word for the one of this host."""
    return str(setting["ray_address"] or os.environ.get("RAY_ADDRESS") or "auto")


def why_ended(event: Mapping[str, Any]) -> str:
    """Put into words why a host did not come up."""
    lines = [line.strip() for line in event["log"].splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if event["told"]:
        return str(event["told"])
    if "No module named" in last:
        return f"nbdist or torch is not installed for the Python there ({last}). Install it, or give another --python."
    return f"its link ended with code {event['code']}{': ' + last if last else ''}"
