"""What a record costs the training thread: ``nbdist.log`` and ``nbdist.track`` on a rank, call by call."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.private import private
from tests.benchmarks.table import Table
from tests.kernel import Kernel

# Each call is timed alone and the cost of the clock is taken off. Between two calls the thread does what it does in
# training, a bit of arithmetic: a sleep would measure how a core wakes up, a burst would measure a warm cache.
MEASURE = """%%distributed --ranks 0
import json, queue, time

clock = time.perf_counter_ns
matrix = torch.rand(256, 256)

def cost(call, times={times}):
    taken = []
    for index in range(times):
        began = clock()
        call(index)
        taken.append(clock() - began)
        matrix @ matrix
    taken.sort()
    return [taken[int(share * times)] / 1e3 for share in (0.5, 0.99)]

class Steps:
    def __len__(self):
        return {times} + 1
    def __iter__(self):
        return iter(range({times} + 1))

def loop():
    tracked = iter(nbdist.track(Steps()))
    next(tracked)
    result = cost(lambda index: next(tracked))
    for _ in tracked:
        pass
    return result

plain = queue.SimpleQueue()
floor = cost(lambda index: None)
measured = {{
    "SimpleQueue.put": cost(plain.put),
    "nbdist.log(loss=x)": cost(lambda index: nbdist.log(loss=0.5)),
    "nbdist.log(loss=x, accuracy=y)": cost(lambda index: nbdist.log(loss=0.5, accuracy=0.5)),
    "one step of nbdist.track": loop(),
}}
print("RESULT", json.dumps({{name: [p - f for p, f in zip(pair, floor)] for name, pair in measured.items()}}))
"""


def run(repeats: int = 3) -> Table:
    table = Table("records: cost on the training thread", ["call", "p50", "p99", "bound on p50"])
    with TemporaryDirectory(prefix="bench-") as home, Kernel(cwd=home, env=private(Path(home))) as kernel:
        kernel.check("%load_ext nbdist\n%cluster start -n 1 --backend gloo\n", timeout=120)
        rounds = []
        for _ in range(repeats):
            cell = kernel.check(MEASURE.format(times=2000), timeout=120)
            rounds.append(json.loads(cell.text.split("RESULT", 1)[1].strip().splitlines()[0]))
        kernel.check("%cluster stop")
    for name in rounds[0]:
        p50, p99 = (sorted(r[name][i] for r in rounds)[repeats // 2] for i in (0, 1))
        bound = table.verdict(p50, at_most=5) if "nbdist" in name else "—"
        table.add(name, f"{p50:.2f} µs", f"{p99:.1f} µs", bound)
    table.notes.append(
        f"median of {repeats} rounds of 2,000 calls, a 256 × 256 product between two, less the cost of the clock"
    )
    return table
