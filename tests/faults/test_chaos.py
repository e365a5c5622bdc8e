"""Forty random faults, one after the other, on one cluster; ``make chaos`` does two hundred."""

from __future__ import annotations

import secrets

import pytest

from nbdist import Cluster
from tests.faults.chaos import Chaos


@pytest.mark.timeout(400)
def test_nothing_is_lost_in_forty_random_faults(no_cluster: None, record_property) -> None:
    seed = secrets.randbelow(10**6)
    record_property("seed", seed)
    print(f"seed {seed}")
    with Cluster(3, backend="gloo").start() as cluster:
        chaos = Chaos(cluster, seed)
        for _ in range(40):
            chaos.one()
        assert sum(chaos.done.values()) == 40
