"""One engine per GPU, NCCL, the same cells; and the GPU's memory after whatever went wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

import nbdist
from tests.gpu.conftest import number_of_gpus
from tests.kernel import Kernel

pytestmark = pytest.mark.gpu

WHOLE = "x = torch.full((1,), rank + 1.0, device=device)\ndist.all_reduce(x)\nvalue, kind = x.item(), device.type"
MEMORY = "import gc\ngc.collect()\nheld = torch.cuda.memory_allocated()"


def users_of_the_gpu() -> set[int]:
    """Give the pids that hold memory of a GPU."""
    asked = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return {int(line) for line in subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split()}


def test_cluster_on_one_gpu_forms_an_nccl_group_and_reduces_on_it(no_cluster: None) -> None:
    with nbdist.Cluster(1, backend="nccl").start() as cluster:
        cluster.run(WHOLE)
        assert cluster.pull("value") == [1.0]
        assert cluster.pull("kind") == ["cuda"]
        before = cluster.pids
        with pytest.raises(nbdist.DistributedError, match="ZeroDivisionError"):
            cluster.run("1 / 0")
        cluster.run(WHOLE)
        assert cluster.pids == before


def test_a_notebook_that_has_used_the_gpu_starts_ranks_that_are_no_forks_of_it(kernel: Kernel) -> None:
    kernel.check("import torch\nmine = torch.ones(1000, device='cuda')\n%load_ext nbdist")
    kernel.check("%cluster start -n 1 --backend nccl", timeout=120)
    assert "[0] held 0" in kernel.check("%%distributed\nprint('held', torch.cuda.memory_allocated())").text
    kernel.check("%%distributed\n" + WHOLE)
    kernel.check("assert float(mine.sum()) == 1000\n%cluster stop")


def test_one_rank_too_many_for_the_gpus_is_refused_and_shares_them_by_gloo(no_cluster: None) -> None:
    many = number_of_gpus() + 1
    refused = rf"{many} ranks, {many - 1} GPU.*: use -n {many - 1}, or --backend gloo to share"
    with pytest.raises(ValueError, match=refused):
        nbdist.Cluster(many, backend="nccl")
    with nbdist.Cluster(many, backend="gloo").start() as cluster:
        cluster.run("x = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)\nvalue = x.item()")
        assert cluster.pull("value") == [sum(range(1, many + 1))] * many


def test_memory_is_given_back_after_an_interrupted_step_an_error_and_the_end(no_cluster: None) -> None:
    with nbdist.Cluster(1, backend="nccl").start() as cluster:
        cluster.run("net = nbdist.parallelize(nn.Linear(4096, 4096), 'ddp')\n" + MEMORY)
        (held,) = cluster.pull("held")
        loop = "def steps():\n    while True:\n        net(torch.randn(4096, 4096, device=device)).sum().backward()\n"
        threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            cluster.run(loop + "steps()")
        cluster.run("net.zero_grad(set_to_none=True)\n" + MEMORY)
        assert cluster.pull("held") == [held]
        with pytest.raises(nbdist.DistributedError, match="OutOfMemoryError"):
            cluster.run("def fill(): return [torch.empty(2**32, device=device) for _ in range(1000)]\nfill()")
        cluster.run(MEMORY)
        assert cluster.pull("held") == [held]
        pids = set(cluster.pids.values())
    assert not pids & users_of_the_gpu()


@pytest.mark.skipif(number_of_gpus() < 2, reason="a peer that does not come takes two GPUs")
def test_a_rank_that_waits_in_nccl_is_released_and_keeps_its_process_and_state(no_cluster: None) -> None:
    with nbdist.Cluster(2, backend="nccl").start() as cluster:
        cluster.run("kept = torch.full((1000,), rank + 1.0, device=device)")
        before = cluster.pids
        for _ in range(3):
            with pytest.raises(nbdist.DistributedError, match="ZeroDivisionError"):
                cluster.run("if rank == 0: 1 / 0\ny = torch.ones(1, device=device)\ndist.all_reduce(y)\ny.item()")
            cluster.run(WHOLE)
            assert cluster.pull("value") == [3.0, 3.0]
        cluster.run("total = kept.sum().item()")
        assert cluster.pull("total") == [1000.0, 2000.0]
        assert cluster.pids == before
