"""Hosts on this machine: network namespaces on one bridge, each with its own name, address and sshd.

The machine's own network is not touched. Every host is as awkward as real ones are: its own name resolves to 127.0.1.1,
as Debian writes it, and a second interface has an address that is the same on all hosts, as docker's bridge is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

LOGIN = "10.77.0.1"
SECONDS = 20

SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
PermitRootLogin prohibit-password
MaxStartups 100:30:200
"""

SSH = """\
Host *
  IdentityFile {folder}/id
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  User root
"""


def sh(*command: str, check: bool = True, **options: Any) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL, **options)
    assert not check or ran.returncode == 0, f"{' '.join(command)}: {ran.stderr or ran.stdout}"
    return str(ran.stdout)


class Lan:
    """A login host and ``n`` others, ``n1``, ``n2``, …; a context manager that leaves nothing."""

    def __init__(self, folder: Path, n: int) -> None:
        self.folder = folder
        self.names = [f"n{i}" for i in range(1, n + 1)]
        self.prefix = f"nbd{os.getpid()}-"
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def login(self) -> tuple[str, ...]:
        """The command that executes another one on the login host."""
        return self.on("login")

    def on(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.prefix + name)

    def address(self, name: str) -> str:
        return f"10.77.0.{10 + int(name[1:])}"

    def __enter__(self) -> Lan:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._down()

    def cut(self, name: str) -> None:
        """Take the network of a host down: packets vanish, and nobody is told."""
        sh("ip", "netns", "exec", self.prefix + "login", "ip", "link", "set", f"v{name}", "down")

    def mend(self, name: str) -> None:
        sh("ip", "netns", "exec", self.prefix + "login", "ip", "link", "set", f"v{name}", "up")

    def pids(self, name: str) -> list[int]:
        """The processes of a host, without its sshd's own."""
        found = sh("ip", "netns", "pids", self.prefix + name, check=False).split()
        daemons = {daemon.pid for daemon in self._daemons}
        return [int(pid) for pid in found if int(pid) not in daemons]

    def ranks(self, name: str) -> list[int]:
        """The processes of ours on a host."""
        ours = []
        for pid in self.pids(name):
            with contextlib.suppress(psutil.Error):
                if "nbdist" in " ".join(psutil.Process(pid).cmdline()):
                    ours.append(pid)
        return ours

    def _up(self) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("id", "hostkey"):
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        shutil.copy(folder / "id.pub", folder / "authorized_keys")
        key = " ".join((folder / "hostkey.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text("".join(f"{self.address(n)} {key}\n{n} {key}\n" for n in self.names))
        config = SSH.format(folder=folder)
        (folder / "ssh_config").write_text(
            "".join(f"Host {n}\n  HostName {self.address(n)}\n  HostKeyAlias {n}\n" for n in self.names) + config
        )
        login = self.prefix + "login"
        sh("ip", "netns", "add", login)
        inside = self.login
        sh(*inside, "ip", "link", "set", "lo", "up")
        sh(*inside, "ip", "link", "add", "br0", "type", "bridge")
        sh(*inside, "ip", "addr", "add", f"{LOGIN}/24", "dev", "br0")
        sh(*inside, "ip", "link", "set", "br0", "up")
        sh(*inside, "ip", "link", "add", "docker0", "type", "bridge")
        sh(*inside, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in self.names:
            self._add_host(name)
        deadline = time.monotonic() + SECONDS
        for name in self.names:
            while not self._answers(name):
                assert time.monotonic() < deadline, f"sshd of {name} does not answer"
                time.sleep(0.05)

    def _add_host(self, name: str) -> None:
        namespace, folder = self.prefix + name, self.folder
        sh("ip", "netns", "add", namespace)
        sh(
            "ip",
            "link",
            "add",
            "e0",
            "netns",
            namespace,
            "type",
            "veth",
            "peer",
            f"v{name}",
            "netns",
            self.prefix + "login",
        )
        sh(*self.login, "ip", "link", "set", f"v{name}", "master", "br0", "up")
        inside = self.on(name)
        sh(*inside, "ip", "link", "set", "lo", "up")
        sh(*inside, "ip", "link", "add", "docker0", "type", "bridge")
        sh(*inside, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        sh(*inside, "ip", "link", "set", "docker0", "up")
        sh(*inside, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "e0")
        sh(*inside, "ip", "link", "set", "e0", "up")
        hosts = Path("/etc/netns") / namespace / "hosts"  # `ip netns exec` binds this over /etc/hosts
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        config = folder / f"sshd-{name}.conf"
        config.write_text(SSHD.format(folder=folder, address=self.address(name)))
        script = f"hostname {name}; exec /usr/sbin/sshd -D -e -f {config} 2>{folder}/sshd-{name}.log"
        self._daemons.append(
            subprocess.Popen([*inside, "unshare", "--uts", "bash", "-c", script], stdin=subprocess.DEVNULL, env=CLEAN)
        )

    def _answers(self, name: str) -> bool:
        probe = f"exec 3<>/dev/tcp/{self.address(name)}/22"
        command = [*self.login, "bash", "-c", probe]
        return subprocess.run(command, capture_output=True, timeout=SECONDS).returncode == 0

    def _down(self) -> None:
        listed = [line.split()[0] for line in sh("ip", "netns", "list", check=False).splitlines() if line]
        ours = [name for name in listed if name.startswith(self.prefix)]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for name in ours:
                for pid in sh("ip", "netns", "pids", name, check=False).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), number)
            for daemon in self._daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(1)
        for name in ours:
            sh("ip", "netns", "del", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()


# a daemon is nobody's cluster: it does not get the settings of the test run
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("NBDIST_", "IPYTHON", "JUPYTER", "TMPDIR"))}
