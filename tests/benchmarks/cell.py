"""A trivial cell on 4 ranks, timed at the front end: ``%%distributed`` against ``%%px --no-stream``.

One real kernel holds both clusters, and the cells alternate; the clock runs from the request to reply and idle.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.benchmarks.private import private
from tests.benchmarks.table import Table, interleave, percentile
from tests.kernel import Kernel

CELLS = {
    "trivial": "1 + 1",
    "print": "print('hello')",
    "all_reduce": "dist.all_reduce(torch.ones(1))",
}

STOCK_GROUP = """%%px --no-stream
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=place, world_size=4)
"""

STOCK = """
import ipyparallel as ipp, socket
stock = ipp.Cluster(n=4, log_level=40)
client = stock.start_and_connect_sync(activate=True)
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    client[:]["port"] = s.getsockname()[1]
_ = client[:].scatter("place", list(range(4)), flatten=True, block=True)
"""


def run(repeats: int = 100) -> Table:
    table = Table(
        "cell: request → reply, 4 ranks (median, p95)",
        ["cell", "%%distributed", "%%px --no-stream", "plain local cell", "ratio to %%px"],
    )
    with TemporaryDirectory(prefix="bench-") as home, Kernel(cwd=home, env=private(Path(home))) as kernel:
        kernel.check("%load_ext nbdist\n%cluster start -n 4 --backend gloo", timeout=120)
        kernel.check(STOCK, timeout=120)
        kernel.check(STOCK_GROUP, timeout=120)

        def seconds(code: str) -> float:
            return kernel.check(code).seconds

        for name, code in CELLS.items():
            sides = {
                "ours": lambda code=code: seconds(f"%%distributed\n{code}"),  # type: ignore[misc]
                "px": lambda code=code: seconds(f"%%px --no-stream\n{code}"),  # type: ignore[misc]
                "local": lambda: seconds("1 + 1"),
            }
            interleave(sides, 5)  # warm
            values = interleave(sides, repeats)
            ratio = median(values["ours"]) / median(values["px"])
            table.add(
                name,
                *(f"{1e3 * median(v):.1f} ms, {1e3 * percentile(v, 0.95):.1f} ms" for v in values.values()),
                table.verdict(ratio, at_most=0.6) if name == "trivial" else f"{ratio:.3g}",
            )
        kernel.check("client.shutdown(targets='all', block=True)\nstock.stop_cluster_sync()\n%cluster stop", timeout=60)
    table.notes.append(f"{repeats} of each, alternating in one kernel")
    return table
