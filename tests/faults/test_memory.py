"""A long session: what notebook, controller and ranks keep of cells and records that are long gone."""

from __future__ import annotations

import gc

import psutil
import pytest

from nbdist import Cluster

FIRST, CALLS = 500, 3_000
GROWTH = 30 * 2**20
STEPS = "for step in range(3_000): nbdist.log(loss=0.5, note=float(step))"


def memory(cluster: Cluster) -> dict[str, int]:
    """Give the resident bytes of each process of the cluster, the notebook's included."""
    gc.collect()
    controller = cluster._processes.controller
    others = [controller, *controller.children(recursive=True), *map(psutil.Process, cluster.pids.values())]
    return {f"{p.name()} {p.pid}": p.memory_info().rss for p in (psutil.Process(), *others)}


@pytest.mark.timeout(240)
def test_thousands_of_cells_and_records_leave_nothing_in_any_process(ranks: Cluster) -> None:
    for _ in range(FIRST):
        ranks.run("rank", output="none")
    before = memory(ranks)
    for _ in range(CALLS - FIRST):
        ranks.run("rank", output="none")
    ranks.run(STEPS, output="none")
    after = memory(ranks)
    grown = {name: after[name] - size for name, size in before.items() if after[name] - size > GROWTH}
    assert not grown, grown
    client = ranks.client
    assert len(client.results) < 200 and len(client.history) < 200 and len(client.metadata) < 200
