"""One host's line to the cluster: connects the node agent of this host to the exchange.

The agent itself opens no socket, so that it can fork safely; this process does, and passes lines on: commands of the
notebook to the agent's standard input, the agent's reports to the exchange. It ends the agent, and with it every rank
of the host, when it is told to, when its launcher's end of standard input closes (``lifeline``), or when the exchange
has not answered for a while.

What it is told on its own standard input, one JSON object a line::

    {"prepare": 8, "environment": {"NCCL_DEBUG": "INFO"}, "folder": "/home/me/project"}
    {"exchange": {"host": "10.0.0.1", …}, "node": 0, "label": "gpu1", "keep": false}

Where one order goes to all hosts (srun, mpiexec), ``"node_from": ["SLURM_NODEID"]`` stands for ``"node"``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import zmq

from nbdist import host
from nbdist.channel import LINE, ExchangeAddress, connect, local_address, reachable
from nbdist.skew import Skew

__all__ = ["Link", "run"]

PING_S = 1.0
SKEW_S = 0.01  # a difference of clocks that has changed by so much is reported
ORPHANED_AFTER_S = 60.0  # a notebook's host that only sleeps must not cost the ranks' state
CONNECT_S = 10.0
END_S = 3.0


class Link:
    """Runs the agent of this host and passes lines between it and the exchange."""

    def __init__(self, first: dict[str, Any], *, lifeline: bool) -> None:
        self.lifeline = lifeline
        self.keep = False
        self.node = -1
        self.label = ""
        self.run_dir = Path(tempfile.mkdtemp(prefix="nbdist-"))
        for name in ("log", "security"):
            (self.run_dir / name).mkdir(mode=0o700)
        self.folder, self.folder_missing = _folder(first.get("folder"))
        self.environment = {
            **first.get("environment", {}),
            "NBDIST_RUN_DIR": str(self.run_dir),
            "IPYTHONDIR": str(self.run_dir / "ipython"),
        }
        self.agent: Popen[bytes] = host.spawn(
            host.AGENT, self.environment, log=self.run_dir / "log" / "agent.log", stdout=PIPE, folder=self.folder
        )
        self._tell_agent({"prepare": int(first["prepare"])})
        self._socket: zmq.Socket[Any] | None = None
        self.at_end: Callable[[], object] = lambda: None  # what has to be done first: a scheduler gives little time
        self._skew, self._told_skew = Skew(), 0.0
        self._exchange: dict[str, Any] = {}
        self._rest = b""
        self._why = ""

    def connect(self, order: dict[str, Any], patience: float = CONNECT_S) -> str:
        """Connect to the exchange and say hello; give why that was impossible, or nothing."""
        self._exchange = order["exchange"]
        address = ExchangeAddress(**self._exchange)
        self.keep = bool(order.get("keep"))
        self.node = _node(order)
        self.label = order.get("label") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        why = reachable(address.host, address.port, patience)
        if why:
            return f"cannot reach the controller at {address.host}:{address.port}: {why}"
        self._socket = connect(zmq.Context(), address)
        self._send(
            event="hello",
            address=local_address(address.host),
            hostname=socket.gethostname(),
            python=platform.python_version(),
            torch=importlib.metadata.version("torch"),
            nbdist=importlib.metadata.version("nbdist"),
            gpus=host.visible_gpus(),
            room=int(order["room"]) if order.get("room") else None,
            local_rank=int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))),
            run_dir=str(self.run_dir),
            folder_missing=self.folder_missing,
            executable=sys.executable,
        )
        if "starts" in order:  # a rank of a job: nobody gives it further orders
            starts = order["starts"]
            self._start(
                {
                    "op": "start",
                    "n": 1,
                    "first_id": starts["id"],
                    "first_local_rank": starts["local_rank"],
                    "world_size": order["world_size"],
                    "connection": order["connection"],
                }
            )
        return ""

    def serve(self) -> None:
        """Pass lines until there is a reason to end; then end the agent and remove what it left."""
        assert self._socket is not None and self.agent.stdout is not None
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self.agent.stdout.fileno(), zmq.POLLIN)
        if self.lifeline and not self.keep:
            poller.register(0, zmq.POLLIN)
        heard = pinged = time.monotonic()
        while not self._why:
            ready = dict(poller.poll(int(PING_S * 500)))
            now = time.monotonic()
            if now - pinged > 10 * PING_S:
                heard += now - pinged  # this process was stopped itself
            if self._socket in ready:
                heard = now
                self._receive()
            if self.agent.stdout.fileno() in ready:
                self._relay()
            if 0 in ready and not os.read(0, 4096):
                self._why = "the launcher has ended"
            if now - pinged >= PING_S:
                pinged = now
                self._send(op="ping", greeted=True, sent=time.time())
            if now - heard > ORPHANED_AFTER_S:
                self._why = f"the controller has not answered for {ORPHANED_AFTER_S:g} s"
        self.end()

    def end(self) -> None:
        """End the agent with all its ranks; remove this cluster's folder on this host."""
        self.at_end()
        if self.agent.poll() is None:
            self._tell_agent({"op": "stop"})
            with contextlib.suppress(OSError):
                self.agent.stdin.close()  # type: ignore[union-attr]
            try:
                self.agent.wait(END_S)
            except TimeoutExpired:
                self.agent.kill()
                self.agent.wait()
        if self._socket is not None:
            self._send(event="ended", code=self.agent.returncode)
            self._socket.close(linger=500)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def warn_of_time_limit(self) -> None:
        """Pass on the scheduler's warning that this job ends soon."""
        self._send(event="notice", text=f"host {self.label}: the job's time limit is near. Save a checkpoint now.")

    def stop(self, why: str) -> None:
        """Leave ``serve`` at its next turn."""
        self._why = why

    def _receive(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(zmq.Again):
            while True:
                _, text = self._socket.recv_multipart(zmq.NOBLOCK)
                command = json.loads(text)
                if command["op"] == "bye":
                    self._why = "the cluster has ended"
                elif command["op"] == "start":
                    self._start(command)
                elif command["op"] == "pong":
                    self._compare_clocks(command)
                else:
                    self._tell_agent(command)

    def _compare_clocks(self, pong: dict[str, Any]) -> None:
        """Tell the notebook how far its side's clock is ahead of this host's, when that has changed."""
        self._skew.add(pong["sent"], pong["time"], time.time())
        ahead = self._skew.seconds
        if abs(ahead - self._told_skew) > SKEW_S:
            self._told_skew = ahead
            self._send(event="clock", ahead=ahead)

    def _start(self, order: dict[str, Any]) -> None:
        """Add to the order what only this host knows, and hand it to the agent."""
        connection = self.run_dir / "security" / "ipcontroller-engine.json"
        with open(os.open(connection, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(order.pop("connection"), file)
        self._tell_agent(
            {
                **order,
                "url_file": str(connection),
                "profile_dir": str(self.run_dir),
                "run_dir": str(self.run_dir),
                "host": self.label,
                "exchange": self._exchange,
            }
        )

    def _relay(self) -> None:
        chunk = os.read(self.agent.stdout.fileno(), 65536)  # type: ignore[union-attr]
        if not chunk:
            self._why = "the node agent has ended"
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._send(**json.loads(line))

    def _send(self, **line: Any) -> None:
        if self._socket is not None:
            if "event" in line:
                line |= {"node": self.node, "host": self.label}
            self._socket.send_multipart([LINE, json.dumps(line).encode()])

    def _tell_agent(self, command: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.agent.stdin.write((json.dumps(command) + "\n").encode())  # type: ignore[union-attr]
            self.agent.stdin.flush()  # type: ignore[union-attr]


def run(first: dict[str, Any], second: dict[str, Any], *, lifeline: bool) -> int:
    """Be the link of this host; give the exit status."""
    return serve(Link(first, lifeline=lifeline), second)


def serve(link: Link, order: dict[str, Any]) -> int:
    """Connect the link and let it pass lines; give the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: link.stop("told to end"))
    signal.signal(signal.SIGUSR1, lambda *_: link.warn_of_time_limit())
    why = link.connect(order)
    if why:
        print(json.dumps({"event": "failed", "host": link.label, "text": why}), flush=True)
        link.end()
        return 1
    link.serve()
    return 0


def _node(order: dict[str, Any]) -> int:
    """Give the number of this host: told, or found in a variable that the launcher of several hosts at once has set."""
    if "node" in order:
        return int(order["node"])
    return next((int(os.environ[name]) for name in order["node_from"] if name in os.environ), 0)


def _folder(wanted: str | None) -> tuple[str, bool]:
    """Give the folder to work in: the notebook's where this host has it too, else where the launcher put us."""
    if wanted and os.path.isdir(wanted):
        return wanted, False
    return os.getcwd(), bool(wanted)
