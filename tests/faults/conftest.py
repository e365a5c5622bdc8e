"""One cluster for all faults, mended between them: what one test breaks must not cost the next one a start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist import Cluster
from tests.faults.faults import group_is_whole, ready


@pytest.fixture
def ranks(cluster: Cluster) -> Iterator[Cluster]:
    """The shared cluster of 2 ranks, which may lose ranks here. Each holds ``kept``, 100 + its rank."""
    ready(cluster)
    yield cluster
    if cluster.running and not cluster.defunct:
        ready(cluster)
        group_is_whole(cluster)


@pytest.fixture
def four_ranks(ranks: Cluster) -> Iterator[Cluster]:
    """The same with 4 ranks."""
    ranks.resize(4)
    ready(ranks, 4)
    yield ranks
    ready(ranks, 4)
    ranks.resize(2)
