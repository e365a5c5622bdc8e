"""What this host offers to engines, and the environment that they are given; light to import."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO

from nbdist.errors import ClusterError

__all__ = ["AGENT", "check_ports", "check_size", "clean_environment", "cores", "notices", "spawn", "visible_gpus"]

PORTS = 24  # of the controller's sockets, and a few to spare
AGENT = (sys.executable, "-m", "nbdist.engine.agent")

STALE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Give the environment of engines: without the rank of some other job that the notebook itself may be part of."""
    return {k: v for k, v in environment.items() if k not in STALE and not k.startswith("TORCHELASTIC_")}


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def check_size(n: int, gpus: int, backend: str, oversubscribe: bool) -> None:
    available = cores()
    limit = max(8, 4 * available)
    if n < 1:
        raise ValueError(f"-n {n}: a world has at least 1 rank.")
    if backend == "nccl" and gpus == 0:
        raise ValueError("--backend nccl needs a GPU and there is none here. Use --backend gloo.")
    if backend == "nccl" and n > gpus:
        raise ValueError(f"{n} ranks, {gpus} GPU{'s' if gpus > 1 else ''}: use -n {gpus}, or --backend gloo to share.")
    if n > limit and not oversubscribe:
        raise ValueError(f"{n} ranks on {available} cores: at most {limit} without --oversubscribe.")


def check_ports() -> None:
    """Raise a ClusterError when this host has too few free TCP ports: the controller would wait for one in vain."""
    with contextlib.ExitStack() as held:
        try:
            for _ in range(PORTS):
                held.enter_context(socket.socket()).bind(("127.0.0.1", 0))
        except OSError as error:
            raise ClusterError(
                f"A cluster needs {PORTS} free TCP ports on 127.0.0.1, and there are fewer ({error.strerror}). "
                "End programs that hold them, or widen net.ipv4.ip_local_port_range."
            ) from None


def notices(backend: str, n: int) -> list[str]:
    """Give one line for each thing about this start that the user may not expect."""
    found = []
    if backend == "gloo" and n > cores():
        found.append(
            f"{n} ranks on {cores()} core{'s' if cores() > 1 else ''}: they take turns, and each step takes longer."
        )
    stale = [name for name in STALE if name in os.environ]
    if stale:
        found.append(f"{', '.join(stale)} of the notebook's environment ignored: the ranks get their own.")
    if backend == "gloo" and os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found.append(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL lowered to INFO on the ranks: with it, building DDP on gloo ends the "
            "process. %cluster debug on checks collectives instead."
        )
    return found


def visible_gpus() -> int:
    """How many GPUs of this host a process may use, found without importing torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([d for d in chosen.split(",") if d.strip() and d.strip() != "-1"])
    proc = Path("/proc/driver/nvidia/gpus")
    return len(list(proc.iterdir())) if proc.is_dir() else 0


def spawn(
    argv: tuple[str, ...] | list[str],
    environment: Mapping[str, str],
    *,
    log: Path,
    stdout: int | IO[bytes] | None = None,
    has_input: bool = True,
    folder: str = ".",
) -> Popen[bytes]:
    """Start a process in a session of its own, which ends when our end of its standard input is closed."""
    with open(log, "ab") as file, open(os.devnull, "rb") as null:
        return Popen(
            argv,
            stdin=PIPE if has_input else null,
            stdout=stdout if stdout is not None else file,
            stderr=file,
            env=clean_environment({**os.environ, **environment}),
            cwd=folder,
            start_new_session=True,
        )
