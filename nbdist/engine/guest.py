"""An engine of an ipyparallel cluster that its user has started: be a rank for as long as a notebook visits it.

Such an engine has no node agent of ours beside it. What it lacks is put in place by a call, and taken back at the end
of the visit: the engine, its variables and whoever else works with it stay.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import torch

from nbdist.engine import bootstrap, control
from nbdist.engine.cells import bars, runner
from nbdist.engine.streams import RankStream

__all__ = ["leave", "settle"]

_ours: tuple[Any, Any] | None = None
_theirs: tuple[Any, Any] = (None, None)


def settle(engine: int, local_rank: int, local_world_size: int) -> dict[str, Any]:
    """Answer nbdist's requests from here on; give who this process belongs to, and where it runs."""
    global _ours, _theirs
    kernel = runner._shell().kernel
    os.environ["LOCAL_RANK"] = str(local_rank)
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_world_size))
    if _ours is None:
        _ours = _stream(kernel, engine, "stdout"), _stream(kernel, engine, "stderr")
        bars.use_text_bars()
        control.install(kernel)
    if sys.stdout is not _ours[0]:
        _theirs = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _ours
    return {"user": os.getuid(), "host": socket.gethostname(), "pid": os.getpid()}


def leave() -> None:
    """Leave the process group; let the engine write as it did before."""
    bootstrap.leave_world()
    sys.stdout, sys.stderr = _theirs


def _stream(kernel: Any, engine: int, name: str) -> RankStream:
    stream = RankStream(kernel.session, kernel.iopub_socket, name)
    stream.topic = f"engine.{engine}.{name}".encode()
    return stream
