"""From a fault to a verified group: an error on one rank, Stop in many places, a death. How long, and what was lost?"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from nbdist import Cluster, DistributedError
from tests.benchmarks.table import Table, percentile
from tests.faults import faults
from tests.faults.faults import group_is_whole, stop

SETUP = (
    "import os, time\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"
    "kept = 100 + rank\nDDP(nn.Linear(4, 1))"
)
ERRORS = {
    "error, others in all_reduce": "if rank == 1: raise ValueError\ndist.all_reduce(torch.ones(1000))",
    "error in a DDP loop": (
        "ddp = DDP(nn.Linear(4, 1))\nfor i in range(9):\n    if rank == 1 and i == 3: raise ValueError\n"
        "    ddp(torch.ones(2, 4)).sum().backward()"
    ),
}
STOPS = {
    "Stop in a Python loop": "while True: pass",
    "Stop in time.sleep": "time.sleep(60)",
    "Stop in an all_reduce loop": "while True: dist.all_reduce(torch.ones(1000))",
    "Stop in a healthy DDP loop": "ddp = DDP(nn.Linear(4, 1))\nwhile True: ddp(torch.ones(2, 4)).sum().backward()",
    "Stop while loaders are waited for": (
        "class Slow(torch.utils.data.Dataset):\n    def __len__(self): return 10**6\n"
        "    def __getitem__(self, i): time.sleep(0.5); return i\n"
        "for batch in torch.utils.data.DataLoader(Slow(), num_workers=1): pass"
    ),
}


def run(repeats: int = 100) -> Table:
    table = Table(
        "faults: fault → cell ended, group verified", ["fault", "ranks", "n", "median", "p95", "max", "ranks lost"]
    )
    for size in (2, 4):
        with Cluster(size, backend="gloo").start() as cluster:
            cluster.run(SETUP, output="none")
            for name, source in ERRORS.items():
                _series(table, cluster, name, partial(_failed, cluster, source), 1.0, repeats)
            for name, source in STOPS.items():
                _series(table, cluster, name, partial(_stopped, cluster, source), 1.0, repeats)
            few = max(3, repeats // 10)
            _series(table, cluster, "death → named", lambda cluster=cluster: _died(cluster)[0], 2.0, few)  # type: ignore[misc]
            _series(table, cluster, "death → repaired", lambda cluster=cluster: _died(cluster)[1], 3.0, few)  # type: ignore[misc]
            assert cluster.pull("kept", 0) == 100
    return table


def _series(table: Table, cluster: Cluster, name: str, once: Callable[[], float], bound: float, n: int) -> None:
    before = cluster.pids
    seconds, lost = [], 0
    for _ in range(n):
        seconds.append(once())
        lost += sum(before[rank] != pid for rank, pid in cluster.pids.items())
        before = cluster.pids
    table.met &= lost == 0 or name.startswith("death")
    table.add(
        name,
        str(cluster.world_size),
        str(n),
        f"{1e3 * median(seconds):.0f} ms",
        table.verdict(percentile(seconds, 0.95), " s", at_most=bound),
        f"{max(seconds):.2f} s",
        "1 each, replaced" if name.startswith("death") else str(lost),
    )


def _failed(cluster: Cluster, source: str) -> float:
    began = time.perf_counter()
    assert isinstance(faults.run(cluster, source, output="none").error, DistributedError)
    group_is_whole(cluster)
    return time.perf_counter() - began


def _stopped(cluster: Cluster, source: str) -> float:
    after = random.uniform(0.2, 0.5)
    began = time.perf_counter()
    assert isinstance(faults.run(cluster, source, output="none", actions=[(after, stop)]).error, KeyboardInterrupt)
    group_is_whole(cluster)
    return time.perf_counter() - began - after


def _died(cluster: Cluster) -> tuple[float, float]:
    """Kill rank 1 while the others wait for it; seconds until it is named, and until the group is whole again."""
    after, pid = 0.3, cluster.pids[1]
    began = time.perf_counter()
    outcome = faults.run(
        cluster,
        "dist.all_reduce(torch.ones(1)) if rank != 1 else time.sleep(60)",
        output="none",
        actions=[(after, lambda: os.kill(pid, signal.SIGKILL))],
    )
    named = time.perf_counter() - began - after
    assert isinstance(outcome.error, DistributedError)
    assert outcome.error.rank == 1
    began = time.perf_counter()
    cluster.repair()
    group_is_whole(cluster)
    repaired = time.perf_counter() - began
    cluster.run(SETUP, output="none")
    return named, repaired
