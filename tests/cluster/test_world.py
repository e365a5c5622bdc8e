"""Ranks, generations, and what torchrun's users expect."""

from __future__ import annotations

import os

import psutil
import pytest

from nbdist import Cluster
from nbdist.errors import CollectiveTimeout, DistributedError, WorldError
from tests.cluster.checks import value
from tests.kernel import Kernel

WHOLE = "x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 2.0"


def test_ranks_have_torchruns_variables(cluster: Cluster) -> None:
    wanted = {
        "RANK": ["0", "1"],
        "LOCAL_RANK": ["0", "1"],
        "WORLD_SIZE": ["2", "2"],
        "LOCAL_WORLD_SIZE": ["2", "2"],
        "GROUP_RANK": ["0", "0"],
    }
    for name, values in wanted.items():
        assert cluster.evaluate(f"__import__('os').environ.get({name!r})") == values, name


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_ranks_have_an_address_as_torchruns_users_expect(cluster: Cluster, name: str) -> None:
    first, second = cluster.evaluate(f"__import__('os').environ.get({name!r})")
    assert first is not None
    assert first == second


def test_the_group_of_a_pasted_script_can_be_made_with_the_variables_alone(fresh_cluster: Cluster) -> None:
    fresh_cluster.run(
        "dist.destroy_process_group()\nif not dist.is_initialized():\n    dist.init_process_group('gloo')\n" + WHOLE,
        timeout=20,
    )


def test_ranks_know_who_they_are(cluster: Cluster) -> None:
    infos = cluster.evaluate("nbdist.rank_info()")
    assert [info.rank for info in infos] == [0, 1]
    assert {info.pid: info.rank for info in infos} == {pid: rank for rank, pid in cluster.pids.items()}
    for info in infos:
        assert (info.world_size, info.local_world_size, info.backend, info.device) == (2, 2, "gloo", "cpu")
        assert info.generation == cluster.world.generation


def test_pids_are_those_of_living_processes_that_are_not_ours(cluster: Cluster) -> None:
    assert sorted(cluster.pids) == [0, 1]
    assert all(psutil.pid_exists(pid) for pid in cluster.pids.values())
    assert os.getpid() not in cluster.pids.values()


def test_a_new_generation_keeps_processes_and_variables(cluster: Cluster) -> None:
    before, generation = cluster.pids, cluster.world.generation
    cluster.run("kept = 100 + rank")
    cluster.world.form()
    assert cluster.world.generation == generation + 1
    assert cluster.pids == before
    assert cluster.pull("kept") == [100, 101]
    cluster.run(WHOLE)


def test_a_model_of_an_old_generation_fails_at_once_and_can_be_wrapped_again(cluster: Cluster) -> None:
    cluster.run(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "net = nn.Linear(2, 1); ddp = DDP(net); ddp(torch.ones(1, 2)).sum().backward()"
    )
    for _ in range(3):
        cluster.world.form()
        cluster.run(WHOLE)
    with pytest.raises(DistributedError, match=r"rank \d"):
        cluster.run("ddp(torch.ones(1, 2)).sum().backward()", timeout=20)
    cluster.run("ddp = DDP(net); ddp(torch.ones(1, 2)).sum().backward()")
    cluster.run(WHOLE)


def test_generations_leave_no_socket_or_thread_behind(cluster: Cluster) -> None:
    cluster.world.form()
    cluster.run("import os, threading\ndef held(): return len(os.listdir('/proc/self/fd')), threading.active_count()")
    before = cluster.evaluate("held()")
    for _ in range(5):
        cluster.world.form()
    after = cluster.evaluate("held()")
    for (files, threads), (files_then, threads_then) in zip(before, after, strict=True):
        assert abs(files_then - files) <= 3
        assert abs(threads_then - threads) <= 1


def test_ranks_follow_host_and_local_rank_and_not_the_order_of_registration(cluster: Cluster) -> None:
    engines = cluster.world.engines
    try:
        cluster.world.form(
            {engines[0]: {"host": "here", "local_rank": 1}, engines[1]: {"host": "here", "local_rank": 0}}
        )
        assert cluster.world.engines == (engines[1], engines[0])
        assert cluster.evaluate("rank") == [0, 1]
        cluster.run(WHOLE)
    finally:
        cluster.world.form({engine: {"host": "here", "local_rank": i} for i, engine in enumerate(engines)})
    assert cluster.world.engines == engines


def test_a_rank_that_cannot_join_is_named(fresh_cluster: Cluster) -> None:
    fresh_cluster.run(
        "def fail(*a, **k): raise OSError('no network today')\nfrom nbdist.engine.world import process_group\n"
        "if rank == 1: process_group.init_process_group = fail"
    )
    with pytest.raises(WorldError, match=r"rank 1 .*no network today"):
        fresh_cluster.world.form(wait=10)


def test_subgroups_work(cluster: Cluster) -> None:
    cluster.run(
        "groups = [dist.new_group([0]), dist.new_group([0, 1])]\n"
        "x = torch.ones(1); dist.all_reduce(x, group=groups[1]); assert x.item() == 2.0\n"
        "if rank == 0: dist.all_reduce(x, group=groups[0])"
    )
    cluster.run(WHOLE)


def test_a_collective_gives_up_after_its_timeout_and_the_state_stays(no_cluster: None) -> None:
    with Cluster(2, backend="gloo", collective_timeout=2.0).start() as cluster:
        cluster.run("kept = 7")
        with pytest.raises(CollectiveTimeout, match=r"rank 1 .* not ") as caught:
            cluster.run("import time\nif rank == 0: dist.all_reduce(torch.ones(1))\nelse: time.sleep(4)")
        assert "all_reduce" in str(caught.value)
        assert cluster.pull("kept") == [7, 7]
        cluster.run(WHOLE)


def test_status_says_where_busy_ranks_are(shared_notebook: Kernel) -> None:
    detached = shared_notebook.check(
        "%%distributed --detach\nimport time\n"
        "if rank == 0:\n    dist.all_reduce(torch.ones(1))\nelse:\n    time.sleep(60)"
    )
    number = detached.reply["execution_count"]
    shared_notebook.check("import time; time.sleep(1)")
    status = shared_notebook.check("%cluster status")
    assert status.seconds < 1
    rows = status.text.splitlines()[1:]
    assert f"In[{number}], line 4" in rows[0]
    assert "all_reduce" in rows[0]
    assert f"In[{number}], line 6" in rows[1]
    shared_notebook.run("%cluster interrupt", timeout=15)
    assert value(shared_notebook, "cluster.cell is None")
    shared_notebook.check(f"%%distributed\n{WHOLE}")
