"""Two processes that stay for the whole test run and execute functions as the ranks of a fresh gloo group."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

TIMEOUT = 60.0


class Ranks:
    """``ranks.run(function, *arguments)`` gives ``[function(*arguments) on rank 0, ... on rank 1]``.

    Inside, ``torch.distributed`` is initialized and RANK and WORLD_SIZE are set.
    """

    def __init__(self, folder: Path, size: int = 2, timeout: float = TIMEOUT) -> None:
        self.folder = folder
        self.size = size
        self.timeout = timeout
        self._meetings = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    @property
    def pids(self) -> list[int]:
        self._start()
        return [process.pid for process in self._processes]

    def run(
        self, function: Callable[..., Any], *arguments: Any, during: Callable[[], object] | None = None
    ) -> list[Any]:
        """Run on all ranks; raise the first rank's failure. ``during`` runs here meanwhile."""
        replies = self.outcomes(function, *arguments, during=during)
        for rank, (ok, value) in enumerate(replies):
            if not ok:
                raise AssertionError(f"rank {rank}:\n{value}")
        return [value for _, value in replies]

    def outcomes(
        self, function: Callable[..., Any], *arguments: Any, during: Callable[[], object] | None = None
    ) -> list[tuple[bool, Any]]:
        self._start()
        self._meetings += 1
        work = cloudpickle.dumps((function, arguments))
        for pipe in self._pipes:
            pipe.send((str(self.folder / f"store-{self._meetings}"), work))
        if during is not None:
            during()
        replies = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self.timeout):
                self.stop()
                raise AssertionError(f"rank {rank} gave no answer within {self.timeout} s")
            replies.append(cloudpickle.loads(pipe.recv()))
        return replies

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        if self._processes:
            return
        for rank in range(self.size):
            # no multiprocessing here: its resource tracker would outlive the tests in this process
            here, there = socket.socketpair()
            with there:
                command = [sys.executable, "-m", __name__, str(there.fileno()), str(rank), str(self.size)]
                self._processes.append(subprocess.Popen(command, pass_fds=[there.fileno()]))
            self._pipes.append(Connection(here.detach()))


def _serve(pipe: Connection, rank: int, size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with contextlib.suppress(EOFError):
        while True:
            store, work = pipe.recv()
            try:
                reply: tuple[bool, Any] = (True, _work(store, work, rank, size))
            except BaseException:
                reply = (False, traceback.format_exc())
            pipe.send(cloudpickle.dumps(reply))


def _work(store: str, work: bytes, rank: int, size: int) -> Any:
    import torch.distributed as dist

    from nbdist.engine.loading import data
    from nbdist.engine.telemetry import meters

    function, arguments = cloudpickle.loads(work)
    form_group(store, rank, size)
    dist.barrier()  # a rank whose function is short would leave while the others still connect
    data.seed(0)
    meters.begin_cell("cell 1")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return function(*arguments)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        meters.end_cell("done")
        if dist.is_initialized():
            dist.destroy_process_group()


def form_group(store: str, rank: int, size: int) -> None:
    """Form the default process group of these ranks, as the engines do."""
    from datetime import timedelta

    import torch.distributed as dist

    from nbdist.engine.world import process_group

    store_type: Any = getattr(dist, "FileStore")  # noqa: B009  # torch does not export it by its annotations
    process_group._watch_new_groups()
    dist.init_process_group(
        "gloo", store=store_type(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=20)
    )


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
