"""A real Ray cluster on hosts of the test's own network: one raylet each, in a folder and with a token of their own."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.multinode.lan import CLEAN, LOGIN, Lan

PORT = 6399
SECONDS = 60
END_S = 15

# no dashboard, nothing sent home, few processes: what is not used here only costs time
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class Raylets:
    """The head on the login host, which is where the notebook is, and a node on each of ``others``.

    Each has ``cpus`` CPUs and the invented resource of its own name. ``env`` is what a user needs in his environment.
    """

    def __init__(self, lan: Lan, others: tuple[str, ...], cpus: int, gpus: int = 0) -> None:
        self.lan, self.others, self.cpus, self.gpus = lan, others, cpus, gpus
        self.address = f"{LOGIN}:{PORT}"
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: socket paths end at 108 bytes
        self.temporary = self.folder / "t"  # of what runs on the hosts
        self.temporary.mkdir()
        self.env = {**QUIET, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Raylets:
        try:
            head = ("--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor")
            self.start("login", *head, f"--temp-dir={self.folder}")
            self._wait_for_port()  # the others start while the head still does
            for name in self.others:
                self.start(name, f"--address={self.address}")
            for name in self.nodes:
                self._wait_for(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in reversed(list(self.nodes)):
            self.stop(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, name: str, *options: str) -> None:
        """Start the raylet of a host, and on the head what all share."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--include-log-monitor=false", *options]
        where = LOGIN if name == "login" else self.lan.address(name)
        common = [f"--node-ip-address={where}", f"--num-cpus={self.cpus}", "--object-store-memory=80000000"]
        named = f'hostname {name}; exec "$@"'
        command = [
            *self.lan.on(name),
            "unshare",
            "--uts",
            "bash",
            "-c",
            named,
            "-",
            *ray,
            *common,
            f"--num-gpus={self.gpus}",
        ]
        with open(self.folder / f"{name}.log", "wb") as log:
            self.nodes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**CLEAN, **self.env, "TMPDIR": str(self.temporary)},
            )

    def stop(self, name: str) -> None:
        """End a host's raylet and all that it has started."""
        node = self.nodes.pop(name)
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(END_S)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=5)
        if node.poll() is None:
            node.kill()
            node.wait()

    def _wait_for_port(self) -> None:
        probe = [*self.lan.login, "bash", "-c", f"exec 3<>/dev/tcp/{LOGIN}/{PORT}"]
        deadline = time.monotonic() + SECONDS
        while subprocess.run(probe, capture_output=True).returncode:
            assert time.monotonic() < deadline and self.nodes["login"].poll() is None
            time.sleep(0.1)

    def _wait_for(self, name: str) -> None:
        log, deadline = self.folder / f"{name}.log", time.monotonic() + SECONDS
        while b"Ray runtime started" not in log.read_bytes():
            assert time.monotonic() < deadline and self.nodes[name].poll() is None, log.read_text()[-2000:]
            time.sleep(0.05)


def workers(lan: Lan, name: str) -> list[int]:
    """The processes of a host that are actors of ours."""
    found = []
    for pid in lan.pids(name):
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).name().startswith("ray::Holder"):
                found.append(pid)
    return found
