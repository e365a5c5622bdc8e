"""One engine per GPU, NCCL, the same cells."""

from __future__ import annotations

import pytest

import nbdist

pytestmark = pytest.mark.gpu


def test_cluster_on_one_gpu_forms_an_nccl_group_and_reduces_on_it(no_cluster: None) -> None:
    with nbdist.Cluster(1, backend="nccl").start() as cluster:
        cluster.run("x = torch.full((1,), 2.0, device=device)\ndist.all_reduce(x)\nvalue, kind = x.item(), device.type")
        assert cluster.pull("value") == [2.0]
        assert cluster.pull("kind") == ["cuda"]
