"""From nothing to a verified group: nbdist, stock ipyparallel with the same by hand, and torchrun of a script.

Each side is a fresh interpreter. The clock starts when it is launched and stops when an ``all_reduce`` has come back
right on every rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.benchmarks.private import private
from tests.benchmarks.table import Table, interleave, spread

READY = "group verified"

NBDIST = """
import sys, nbdist
with nbdist.Cluster(int(sys.argv[1]), backend="gloo").start():
    print("group verified", flush=True)
"""

STOCK = """
import socket, sys
import ipyparallel as ipp

def form(rank, n, port):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    x = torch.full((1,), rank + 1.0)
    dist.all_reduce(x)
    return x.item()

n = int(sys.argv[1])
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
cluster = ipp.Cluster(n=n, log_level=40)
client = cluster.start_and_connect_sync(activate=False)
futures = [client[e].apply_async(form, rank, n, port) for rank, e in enumerate(client.ids)]
assert {f.get(timeout=60) for f in futures} == {n * (n + 1) / 2}
print("group verified", flush=True)
client.shutdown(targets="all", hub=False, block=True)
cluster.stop_cluster_sync()
"""

TORCHRUN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
x = torch.full((1,), rank + 1.0)
dist.all_reduce(x)
right = torch.tensor([int(x.item() == n * (n + 1) / 2)])
dist.all_reduce(right)
if rank == 0:
    assert right.item() == n
    print("group verified", flush=True)
dist.destroy_process_group()
"""


def seconds_until_ready(command: list[str], home: Path, ended: Callable[[str], object] = lambda rest: None) -> float:
    """Launch a command, give the seconds to its READY line, and wait for its end; ``ended`` gets what it said then."""
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **private(home)}
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if READY in line:
                took = time.perf_counter() - began
                break
        else:
            raise RuntimeError(f"{command} ended before the group was verified:\n{process.stderr.read()[-2000:]}")
        ended(process.communicate(timeout=60)[0])
    return took


def run(repeats: int = 5) -> Table:
    table = Table(
        "start: nothing → verified group (median, range)",
        ["ranks", "nbdist", "stock ipyparallel", "torchrun", "against ipyparallel", "against torchrun"],
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        home = Path(folder)
        for name, source in (("nbdist", NBDIST), ("stock", STOCK), ("torchrun", TORCHRUN)):
            (home / f"{name}_start.py").write_text(source)
        for n in (2, 4):
            script = [sys.executable, str(home / "nbdist_start.py"), str(n)]
            stock = [sys.executable, str(home / "stock_start.py"), str(n)]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
            torchrun.append(str(home / "torchrun_start.py"))
            values = interleave(
                {
                    "nbdist": lambda command=script: seconds_until_ready(command, home),  # type: ignore[misc]
                    "stock": lambda command=stock: seconds_until_ready(command, home),  # type: ignore[misc]
                    "torchrun": lambda command=torchrun: seconds_until_ready(command, home),  # type: ignore[misc]
                },
                repeats,
            )
            ours = median(values["nbdist"])
            table.add(
                str(n),
                *(spread(values[name], "s") for name in ("nbdist", "stock", "torchrun")),
                table.verdict(ours / median(values["stock"]), at_most=0.3),
                table.verdict(ours / median(values["torchrun"]), at_most=1.0),
            )
    table.notes.append(f"{repeats} launches of each, interleaved; interpreter start and imports included on all sides")
    return table
