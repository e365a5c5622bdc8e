"""What a rank says of itself for ``%cluster check``."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine import network
from nbdist.engine.world import process_group, store

__all__ = ["facts", "small_all_reduce"]


def facts() -> dict[str, Any]:
    """Versions, names, limits and clock of this rank's host; cheap, and without a collective."""
    info = process_group.rank_info()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    temporary = shutil.disk_usage(os.environ.get("TMPDIR", "/tmp"))
    return {
        "host": info.host,
        "address": store.own_address(),
        "interface": network.in_use(info.backend),
        "resolved": resolved(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "nbdist": version("nbdist"),
        "nccl": _nccl() if info.backend == "nccl" else "",
        "device": device_name(info.device),
        "shm": shm.free if shm is not None else None,
        "tmp": temporary.free,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "time": time.time(),
    }


def small_all_reduce(n: int = 20) -> float:
    """Give the median time of a small all_reduce in seconds; every rank has to call it."""
    device = torch.device(process_group.rank_info().device)
    value = torch.ones(1024, device=device)
    times = []
    for _ in range(n):
        began = time.perf_counter()
        dist.all_reduce(value)
        value.div_(dist.get_world_size())
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[n // 2]


def resolved() -> str:
    """Give what this host's own name resolves to, or nothing."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def device_name(device: str) -> str:
    """Give a device as people compare it: the GPU's model, or the CPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))
