"""How costs grow with the number of ranks: engines, their group and a cell at 8 to 64 ranks, records of 256.

All of it on this machine. 64 ranks on a few cores say nothing of the speed of training, but the work of the notebook's
side, one registration, request and reply for each rank, is what it would be with 64 hosts. The records of 256 ranks are
real ones from the ranks' own recorder, on ipyparallel's own channel; four processes stand for 64 ranks each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import psutil

from nbdist import Cluster
from tests.benchmarks.table import Table, percentile

SIZES = (8, 16, 32, 64)
SENDERS, RANKS, HERTZ, SECONDS = 4, 256, 10, 10

# Every simulated rank makes a record each 100 ms and empties its queue each PERIOD, as the flusher thread does;
# they are out of step with each other, as ranks are.
SEND = f"""
import heapq, random, time
from nbdist.engine.telemetry import recorder as real
each = {RANKS} // world_size
agenda, made = [], {{}}
for number in range(each):
    sender = real.Recorder()
    sender.publish, sender.rank, sender.world_size = real.recorder.publish, rank * each + number, {RANKS}
    run = real.Run("many")
    begin = time.time() + 1
    sender.event("begin", run)
    sender.drain()
    heapq.heappush(agenda, (begin + random.random() / {HERTZ}, number, "record"))
    heapq.heappush(agenda, (begin + random.random() * real.PERIOD, number, "drain"))
    made[number] = sender, run
while agenda:
    at, number, what = heapq.heappop(agenda)
    sender, run = made[number]
    time.sleep(max(0.0, at - time.time()))
    if what == "record":
        run.step += 1
        sender.put((run.name, run.step, time.time(), None, {{"loss": 1.0, "step_time": 0.1, "samples": 32}}))
        if run.step < {HERTZ * SECONDS}:
            heapq.heappush(agenda, (at + 1 / {HERTZ}, number, what))
    else:
        sender.drain()
        if run.step < {HERTZ * SECONDS} or sender.queue:
            heapq.heappush(agenda, (at + real.PERIOD, number, what))
"""


def run(repeats: int = 5) -> Table:
    table = Table(
        "scale: what a rank more costs",
        ["ranks", "engines registered", "group verified", "start, a rank", "cell", "cell, a rank", "private memory"],
    )
    starts, cells = {}, {}
    for n in SIZES:
        engines, group, cell, private = _measure(n, repeats)
        starts[n], cells[n] = engines, cell
        table.add(
            str(n),
            f"{engines:.2f} s",
            f"{group:.2f} s",
            f"{1e3 * engines / n:.0f} ms",
            f"{1e3 * cell:.1f} ms",
            f"{1e3 * cell / n:.2f} ms",
            table.verdict(private / 2**20, " MiB", at_most=60),
        )
    first, last = SIZES[0], SIZES[-1]
    for name, costs in (("start", starts), ("cell", cells)):
        growth = (costs[last] / last) / (costs[first] / first)
        said = table.verdict(growth, at_most=1.0)
        table.notes.append(f"{name}: a rank of {last} costs {said} times what one of {first} does")
    table.notes.append("group: gloo's connections of every rank to every other, on this machine's cores")
    latencies = _records()
    p99 = table.verdict(1e3 * percentile(latencies, 0.99), " ms", at_most=250)
    expected = RANKS * HERTZ * SECONDS
    lost = table.verdict(expected - len(latencies), at_most=0)
    table.notes.append(
        f"records of {RANKS} ranks at {HERTZ} Hz for {SECONDS} s, made → in the table: median "
        f"{1e3 * median(latencies):.0f} ms, p99 {p99}; {expected:,} sent, lost {lost}"
    )
    return table


def _measure(n: int, repeats: int) -> tuple[float, float, float, float]:
    """Seconds to registered engines, from there to a verified group, of a cell; private bytes of the largest rank."""
    stages: dict[str, float] = {}
    began = time.perf_counter()
    cluster = Cluster(n, backend="gloo", timeout=170, oversubscribe=True)
    with cluster.start(lambda line: stages.setdefault(line.split()[0], time.perf_counter() - began)):
        private = max(psutil.Process(pid).memory_full_info().uss for pid in cluster.pids.values())
        cluster.run("0", output="none")
        seconds = []
        for _ in range(4 * repeats):
            at = time.perf_counter()
            cluster.run("rank", output="none")
            seconds.append(time.perf_counter() - at)
    return stages["forming"], stages["ready"] - stages["forming"], median(seconds), float(private)


def _records() -> list[float]:
    """Seconds from the making of each record to its place in the notebook's table."""
    latencies: list[float] = []
    with Cluster(SENDERS, backend="gloo").start() as cluster:
        receive = cluster.telemetry.receive

        def timed(payload: Mapping[str, Any]) -> None:
            receive(payload)
            if payload["kind"] == "steps":
                now = time.time()
                latencies.extend(now - record["time"] for record in payload["records"])

        cluster.telemetry.receive = timed
        cluster.run(SEND, output="none")
        deadline = time.monotonic() + 5
        while len(latencies) < RANKS * HERTZ * SECONDS and time.monotonic() < deadline:
            time.sleep(0.05)
        frame = cluster.telemetry.to_frame()
        assert len(frame) == len(latencies) and cluster.telemetry.dropped == 0
    return latencies
