"""The node agent: imports torch once, forks one engine per rank of its host, and ends them when its input ends.

It is single-threaded from birth to death, touches no GPU and opens no socket to the cluster: that is what makes its
forks safe. It is told what to do by JSON lines on its standard input and reports by JSON lines on its standard output::

    <- {"op": "start", "n": 2, "first_id": 0, "run_dir": "/tmp/nbdist-x", ...}
    -> {"event": "imported", "seconds": 1.4}
    -> {"event": "forked", "local_rank": 0, "pid": 4711}
    -> {"event": "exited", "local_rank": 0, "pid": 4711, "code": null, "signal": 9, "stderr": "..."}
    <- {"op": "fork", "local_rank": 0, "id": 0}
    <- {"op": "signal", "pid": 4711, "signal": 9}
    <- {"op": "tail", "local_rank": 0, "ticket": 1}

Where the agent is on another host, these lines pass through ``nbdist.engine.link``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["Agent", "main"]

PARENT_POLL_S = 0.25
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.functional",
    "torch.nn.parallel",
    "ipyparallel.engine.app",
    "ipyparallel.engine.nanny",
    "nbdist.engine.control",
    "nbdist.engine.rank_engine",
    "nbdist.engine.bootstrap",
    "nbdist.engine.world.store",
)
STDERR_TAIL = 4096


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask Linux to send ``sig`` to this process when its parent ends; elsewhere the agent's own clean-up has to do."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sig, 0, 0, 0)


class Agent:
    """Forks, watches and ends the engines of one host."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.run_dir = Path(spec["run_dir"])
        self.keep = bool(spec.get("keep"))
        self.parent = os.getppid()
        self.told_to_stop = False
        self.engines: dict[int, int] = {}  # pid -> local_rank
        self.nannies: set[int] = set()
        self.listener: socket.socket | None = None  # of a kept cluster: where a later notebook's commands come in
        self.callers: dict[socket.socket, bytes] = {}  # connection -> what has come of its next line
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def report(self, **event: Any) -> None:
        line = (json.dumps(event) + "\n").encode()
        # a kept cluster outlives its reader: nobody to tell is no reason to end
        with contextlib.suppress(BrokenPipeError):
            os.write(1, line)
        for caller in self.callers:
            with contextlib.suppress(OSError):
                caller.sendall(line)

    def run(self) -> None:
        """Import what every engine needs, fork them all, then serve until the input or the parent ends."""
        prepare_threads(int(self.spec["n"]))
        began = time.perf_counter()
        preload()
        self.report(event="imported", seconds=time.perf_counter() - began)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for sig in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, lambda *_: self.end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for index in range(int(self.spec["n"])):
            self.fork_engine(
                int(self.spec.get("first_local_rank", 0)) + index, int(self.spec.get("first_id", 0)) + index
            )
        self.serve()
        self.end()

    def serve(self) -> None:
        """Follow commands until the input ends (unless kept), the parent is gone, or a command says stop."""
        if self.keep:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(self.run_dir / "agent.sock"))
            self.listener.listen()
        has_input, pending = True, b""
        while not self.told_to_stop:
            inputs: list[Any] = [self.wake_read, *self.callers]
            inputs += [0] if has_input else []
            inputs += [self.listener] if self.listener is not None else []
            readable, _, _ = select.select(inputs, [], [], PARENT_POLL_S)
            if self.wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
            self.reap()
            if 0 in readable:
                chunk = os.read(0, 65536)
                has_input = bool(chunk)
                pending = self.follow(pending + chunk)
            if self.listener in readable and self.listener is not None:
                self.callers[self.listener.accept()[0]] = b""
            for caller in [c for c in readable if c in self.callers]:
                try:
                    chunk = caller.recv(65536)
                except OSError:
                    chunk = b""
                if chunk:
                    self.callers[caller] = self.follow(self.callers[caller] + chunk)
                else:
                    del self.callers[caller]
                    caller.close()
            if not self.keep and (not has_input or os.getppid() != self.parent):
                return
            if self.keep and not self.engines:
                return

    def follow(self, text: bytes) -> bytes:
        """Carry out the whole lines of ``text``; give the rest."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            self.handle(json.loads(line))
        return rest

    def handle(self, command: dict[str, Any]) -> None:
        op = command["op"]
        if op == "fork":
            self.fork_engine(int(command["local_rank"]), int(command["id"]))
        elif op == "signal" and command["pid"] in self.engines:
            os.kill(command["pid"], command["signal"])
        elif op == "tail":
            local_rank = command["local_rank"]
            text = tail(self.run_dir / "log" / f"rank-{local_rank}.err")
            self.report(event="tail", local_rank=local_rank, text=text, ticket=command["ticket"])
        elif op == "stop":
            self.told_to_stop = True

    def fork_engine(self, local_rank: int, engine_id: int) -> None:
        """Fork an engine and, beside it, the nanny that relays its control channel and notices its end."""
        engine_end, nanny_end = socket.socketpair()
        sys.stdout.flush()
        nanny = os.fork()
        if nanny == 0:
            become_nanny(nanny_end.fileno())
        pid = os.fork()
        if pid == 0:
            become_engine(self.spec, local_rank, engine_id, engine_end.fileno())
        engine_end.close()
        nanny_end.close()
        self.nannies.add(nanny)
        self.engines[pid] = local_rank
        self.report(event="forked", local_rank=local_rank, id=engine_id, pid=pid, nanny=nanny)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.nannies.discard(pid)
            local_rank = self.engines.pop(pid, None)
            if local_rank is None:
                continue
            end_session(pid)
            self.report(
                event="exited",
                local_rank=local_rank,
                pid=pid,
                code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                stderr=tail(self.run_dir / "log" / f"rank-{local_rank}.err"),
            )

    def end(self) -> None:
        """End everything that was forked here. SIGKILL: an engine blocked in a collective obeys nothing else."""
        for pid in (*self.engines, *self.nannies):
            end_session(pid)
        # in a container nobody may reap what its parent has not
        for pid in (*self.engines, *self.nannies):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not self.told_to_stop:  # whoever started us is gone and cannot clean up
            shutil.rmtree(self.run_dir, ignore_errors=True)
        os._exit(0)


def end_session(pid: int) -> None:
    """Kill an engine and what it started (loader workers): it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def prepare_threads(n: int) -> None:
    """Share the cores of the host among its ranks; OpenMP reads this when torch is loaded."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // max(1, n)))


def preload() -> None:
    """Import once what each engine would import again; the forks share the pages."""
    for module in PRELOADED:
        importlib.import_module(module)
    bars = importlib.import_module("nbdist.engine.cells.bars")
    bars.use_text_bars()
    gc.collect()
    gc.freeze()


def become_nanny(channel: int) -> None:
    """Wait for the engine's request, then be ipyparallel's nanny for it; never returns."""
    die_with_parent()
    os.setsid()
    keep_only(channel)
    signal.set_wakeup_fd(-1)
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(sig, signal.SIG_DFL)
    try:
        from ipyparallel.engine.nanny import KernelNanny

        request = receive(channel)
        if request is not None:
            KernelNanny.main(**request, pipe=os.fdopen(channel, "w", buffering=1))
    finally:
        os._exit(0)


def become_engine(spec: dict[str, Any], local_rank: int, engine_id: int, channel: int) -> None:
    """Be the engine of one rank; never returns."""
    die_with_parent()
    os.setsid()
    signal.set_wakeup_fd(-1)
    for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(sig, signal.SIG_DFL)
    log = Path(spec["run_dir"]) / "log"
    # descriptors 1 and 2 are files, so that what a library or a dying process writes there can still be read
    for name, descriptor in (("out", 1), ("err", 2)):
        opened = os.open(log / f"rank-{local_rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(opened, descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    keep_only(channel)
    local_world_size = int(spec.get("local_world_size", spec["n"]))
    os.environ.update(
        RANK=str(engine_id),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(spec.get("world_size", local_world_size)),
        LOCAL_WORLD_SIZE=str(local_world_size),
        NBDIST_HOST=spec.get("host") or socket.gethostname(),
        NBDIST_LOG_DIR=str(log),
    )
    try:
        from nbdist.engine.rank_engine import run_engine

        run_engine(spec, engine_id, channel)
    except SystemExit as exit_:
        os._exit(exit_.code if isinstance(exit_.code, int) else 1)
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)


def start_paired_nanny(channel: int, **request: Any) -> tuple[str, socket.socket]:
    """Stand in for ipyparallel's ``start_nanny``: hand the request to the nanny that was forked beside this engine."""
    request["pid"] = os.getpid()
    data = pickle.dumps(request)
    connection = socket.socket(fileno=channel)
    connection.sendall(struct.pack("!I", len(data)) + data)
    url = b""
    while not url.endswith(b"\n"):
        chunk = connection.recv(1024)
        if not chunk:
            raise RuntimeError("the nanny of this engine ended before it was ready")
        url += chunk
    return url.decode().strip(), connection


def receive(channel: int) -> dict[str, Any] | None:
    """Read one length-prefixed request from the engine next door; None when it ended without asking."""

    def exactly(count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            chunk = os.read(channel, count - len(data))
            if not chunk:
                return None
            data += chunk
        return data

    header = exactly(4)
    body = exactly(struct.unpack("!I", header)[0]) if header else None
    return pickle.loads(body) if body else None


def keep_only(channel: int) -> None:
    """Close every inherited descriptor but the standard ones and ``channel``: a copy would keep a pipe open."""
    limit = min(os.sysconf("SC_OPEN_MAX"), 65536)
    os.closerange(3, channel)
    os.closerange(channel + 1, limit)


def tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - STDERR_TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def main() -> None:
    """Read from standard input how many engines there will be, import, read the start order, then serve."""
    os.umask(0o077)
    order = read_line()
    if "prepare" in order:
        prepare_threads(int(order["prepare"]))
        preload()
        order = read_line()
    if order:
        Agent(order).run()


def read_line() -> dict[str, Any]:
    """Read one JSON line from standard input, byte by byte: what follows is for the agent's loop. Empty at its end."""
    line = b""
    while not line.endswith(b"\n"):
        char = os.read(0, 1)
        if not char:
            return {}
        line += char
    command: dict[str, Any] = json.loads(line)
    return command


if __name__ == "__main__":
    main()
