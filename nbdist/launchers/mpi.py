"""Hosts that mpiexec reaches: it starts one link per host. mpi4py is not needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import traitlets

from nbdist.launchers.remote import Plan, RemoteAgents, Slot, parse_hosts

__all__ = ["MPIAgents"]

END_S = 5.0


class MPIAgents(RemoteAgents):
    """Open MPI's mpiexec, run by this notebook; the links end with it."""

    mpi_cmd = traitlets.List(traitlets.Unicode(), ["mpiexec"]).tag(config=True)
    # without --enable-recovery the death of one link takes all others with it
    mpi_args = traitlets.List(traitlets.Unicode(), ["--enable-recovery", "--stdin", "all"]).tag(config=True)

    @classmethod
    def make_plan(cls, n: int | None, setting: Mapping[str, Any]) -> Plan:
        hosts = parse_hosts(setting["hosts"]) if setting["hosts"] else [("", n or 2)]
        room = sum(count for _, count in hosts)
        if n is not None and n > room:
            raise ValueError(f"-n {n}: --hosts {setting['hosts']} takes {room}.")
        return Plan(n=n or room, slots=tuple(Slot(node=i, label=h, room=c) for i, (h, c) in enumerate(hosts)))

    @classmethod
    def peers(cls, setting: Mapping[str, Any]) -> Iterable[str]:
        return [name for name, _ in parse_hosts(setting["hosts"])] if setting["hosts"] else ["127.0.0.1"]

    @property
    def command(self) -> list[str]:
        labels = [slot.label for slot in self.plan.slots if slot.node in self.plan.counts]
        where = ["--host", ",".join(labels), "--map-by", "ppr:1:node"] if any(labels) else []
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        link = [*self.find_args(), "--lifeline", "--orders", str(self._orders)]
        return [*self.mpi_cmd, *self.mpi_args, *root, "-n", str(len(labels)), *where, *link]

    @property
    def _orders(self) -> Path:
        return Path(self.profile_dir) / "security" / "orders"

    def describe(self) -> str:
        return shlex.join(self.command)

    async def submit(self) -> None:
        log = Path(self.profile_dir) / "log" / "mpiexec.err"
        names = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"]
        lines = (self.first_line(self.plan.slots[0].room), self.second_line(node_from=names))
        orders = "".join(json.dumps(line) + "\n" for line in lines)
        with open(os.open(self._orders, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as secret:
            secret.write(orders)
        with open(log, "wb") as file:
            self._process = Popen(self.command, stdin=PIPE, stdout=file, stderr=file, start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(orders.encode())
        self._process.stdin.flush()
        threading.Thread(target=self._watch, args=(log,), name="nbdist-mpi", daemon=True).start()

    async def finish(self) -> None:
        process = getattr(self, "_process", None)
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        deadline = time.monotonic() + END_S
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
        process.wait()

    def close_input(self) -> None:
        super().close_input()
        process = getattr(self, "_process", None)
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _watch(self, log: Path) -> None:
        code = self._process.wait()
        if not self._stopping and not self._started:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            self.fail("mpiexec", f"ended with code {code}: " + "\n    ".join(lines[-8:]))
