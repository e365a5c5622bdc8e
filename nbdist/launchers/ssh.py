"""Hosts that one can log in to: one ssh connection per host, all at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import traitlets

from nbdist.errors import ClusterError
from nbdist.launchers.remote import Plan, RemoteAgents, Slot, parse_hosts

__all__ = ["SSHAgents"]

END_S = 5.0
ROUTES = 8  # hosts whose route is looked at when the controller's address is chosen

# BatchMode: a question (password, unknown host key) would wait for ever for an answer that no notebook can give.
# ControlPath: behind a shared connection a host that has vanished looks alive.
ALWAYS = ("-T", "-o", "BatchMode=yes", "-o", "ControlPath=none")
UNLESS_CONFIGURED = ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")

MEANINGS = (
    ("host identification has changed", "its host key is not the one in known_hosts. If the host was reinstalled: "
     "ssh-keygen -R {host}, then log in once from a terminal"),
    ("host key verification failed", "its host key is unknown. Log in once from a terminal: ssh {host}"),
    ("permission denied", "login refused ({last}). A notebook cannot type a password: set up a key "
     "(ssh-copy-id {host}) or an ssh agent"),
    ("could not resolve hostname", "no such host name"),
    ("connection refused", "nothing listens for ssh there ({last})"),
    ("connection timed out", "no answer ({last})"),
    ("no route to host", "no route to it ({last})"),
    ("no usable temporary directory", "no room for temporary files there ({last})"),
    ("no space left on device", "no room on its disk ({last})"),
    ("no module named", "nbdist or torch is not installed for {python} there ({last})"),
    ("no such file or directory", "there is no {python}. Name that host's interpreter with --python"),
    ("not found", "there is no {python}. Name that host's interpreter with --python"),
)  # fmt: skip


class SSHAgents(RemoteAgents):
    """A link per host at the end of an ssh connection; it ends when the connection does, unless the cluster is kept.

    Hosts, users, keys and jump hosts are those of the user's own ssh configuration.
    """

    ssh_cmd = traitlets.List(traitlets.Unicode(), ["ssh"]).tag(config=True)
    ssh_args = traitlets.List(traitlets.Unicode(), help="Further arguments of ssh.").tag(config=True)

    @classmethod
    def make_plan(cls, n: int | None, setting: Mapping[str, Any]) -> Plan:
        if not setting["hosts"]:
            raise ClusterError("Which hosts? %cluster start --profile ssh --hosts gpu1:8,gpu2:8")
        hosts = parse_hosts(setting["hosts"])
        room = sum(count for _, count in hosts)
        if n is not None and n > room:
            raise ValueError(f"-n {n}: --hosts {setting['hosts']} takes {room}.")
        slots = tuple(Slot(node=i, label=name, room=count) for i, (name, count) in enumerate(hosts))
        return Plan(n=n or room, slots=slots)

    @classmethod
    def peers(cls, setting: Mapping[str, Any]) -> Iterable[str]:
        for name, _ in parse_hosts(setting["hosts"])[:ROUTES]:
            yield host_name(name, [*setting["ssh_cmd"], *setting["ssh_args"]])

    def describe(self) -> str:
        plan = self.plan
        lines = [shlex.join(self.command(slot.label)) for slot in plan.slots if slot.node in plan.counts]
        return "\n".join(lines)

    def command(self, label: str) -> list[str]:
        """Give the command that starts the link of a host."""
        # exec: the remote shell would outlive us
        remote = f"exec {shlex.quote(self.setting('python'))} -m nbdist.engine"
        if not self.order.get("keep"):
            remote += " --lifeline"
        return [*self.setting("ssh_cmd"), *ALWAYS, *self.setting("ssh_args"), *UNLESS_CONFIGURED, label, remote]

    def begin(self) -> None:
        self._links: dict[int, Popen[bytes]] = {}
        for node in self.plan.counts:
            self._connect(node)

    async def submit(self) -> None:
        for node in list(self._links):
            self._tell_link(node, self.second_line(node=node, label=self._labels[node]))

    def revive(self, node: int) -> None:
        old = self._links.pop(node, None)  # first, so that its end is nobody's failure
        self._failures.pop(self._labels[node], None)
        self._failed_at = 0.0
        if old is not None and old.poll() is None:
            old.kill()
            old.wait()
        self._connect(node)
        self._tell_link(node, self.second_line(node=node, label=self._labels[node]))

    async def finish(self) -> None:
        deadline = time.monotonic() + END_S
        links = list(getattr(self, "_links", {}).values())
        connected = set(self._hellos)
        for node, link in getattr(self, "_links", {}).items():
            if node not in connected and link.stdin is not None:
                with contextlib.suppress(OSError):
                    link.stdin.close()  # it never got its orders
        while any(link.poll() is None for link in links) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for link in links:
            if link.poll() is None:
                link.kill()
            link.wait()
            for pipe in (link.stdin, link.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def close_input(self) -> None:
        super().close_input()
        for node, link in self._links.items():
            if node in self._hellos and link.stdin is not None:
                with contextlib.suppress(OSError):
                    link.stdin.close()

    def _connect(self, node: int) -> None:
        label = self._labels[node]
        with open(self._log(label), "wb") as log:
            link = self._links[node] = Popen(
                self.command(label), stdin=PIPE, stdout=PIPE, stderr=log, start_new_session=True
            )
        self._tell_link(node, self.first_line(self.plan.slots[node].room))
        threading.Thread(target=self._watch, args=(node, link), name=f"nbdist-ssh-{node}", daemon=True).start()

    def _tell_link(self, node: int, line: dict[str, Any]) -> None:
        pipe = self._links[node].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            pipe.write((json.dumps(line) + "\n").encode())
            pipe.flush()

    def _watch(self, node: int, link: Popen[bytes]) -> None:
        """Wait for the end of a connection; say why a host did not come up."""
        label, told = self._labels[node], ""
        assert link.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in link.stdout:
                with contextlib.suppress(ValueError):  # what a login script prints is no report
                    event = json.loads(line)
                    told = event["text"] if event.get("event") == "failed" else told
        code = link.wait()
        if self._stopping or self._links.get(node) is not link:
            return
        if node not in self._started:
            self.fail(label, told or explain(self._log(label), code, label, self.setting("python")))

    def _log(self, label: str) -> Path:
        return Path(self.profile_dir) / "log" / f"ssh-{label.replace('/', '_')}.err"


def host_name(label: str, command: list[str]) -> str:
    """Give the address that ssh would connect to for a name, as the user's ssh configuration says."""
    asked = subprocess.run(
        [*command, "-G", label], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=os.environ
    )
    names = [line.split()[1] for line in asked.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else label


def explain(log: Path, code: int, host: str, python: str) -> str:
    """Put into words why ssh ended before the host had come up."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    text = "\n".join(lines).lower()
    last = lines[-1] if lines else f"exit code {code}"
    for sign, meaning in MEANINGS:
        if sign in text:
            return meaning.format(host=host, last=last, python=python) + "."
    return f"ssh ended with code {code}: {last}"
