"""What the machine lets this process have: open files and shared memory."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["SharedMemory", "raise_fd_limit", "shared_memory", "shared_memory_advice"]

SHM = "/dev/shm"
ENOUGH = 1 << 30


class SharedMemory(NamedTuple):
    """Size and free space of /dev/shm, in bytes."""

    size: int
    free: int


def raise_fd_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard one; give (before, now).

    Each batch from a loader's worker holds descriptors, and the usual soft limit of 1,024 is soon reached.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 0, 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft, soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft, wanted


def shared_memory() -> SharedMemory | None:
    """Give the size of /dev/shm, through which workers hand over batches; None where there is none."""
    try:
        stat = os.statvfs(SHM)
    except (FileNotFoundError, AttributeError):
        return None
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def shared_memory_advice(needed: int = ENOUGH) -> str:
    """Say what to do when /dev/shm has less than ``needed`` bytes free; empty when it has enough."""
    memory = shared_memory()
    if memory is None or memory.free >= needed:
        return ""
    return (
        f"{SHM} has {_mb(memory.free)} of {_mb(memory.size)} free, workers may need {_mb(needed)}: start the container "
        "with --shm-size=8g or --ipc=host, or call torch.multiprocessing.set_sharing_strategy('file_system'), or use "
        "num_workers=0."
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
