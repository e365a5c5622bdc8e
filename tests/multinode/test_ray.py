"""A Ray cluster of two nodes: its actors hold our ranks, and nothing outlives the notebook."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.launchers.ray_driver import shortage
from tests.kernel import Kernel
from tests.multinode.lan import LOGIN, Lan
from tests.multinode.raylets import Raylets, workers

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(240)]

START = "%cluster start --profile ray --timeout 90"
WHOLE = "%%distributed\nx = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture(scope="module")
def raylets(need: Callable[..., None], lan: Lan) -> Iterator[Raylets]:
    """A Ray of two nodes with 4 CPUs and 2 invented GPUs each; the notebook is on the first."""
    need("ray")
    with Raylets(lan, ("n1",), cpus=4, gpus=2) as raylets:
        yield raylets


def nobody_is_left(lan: Lan, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(workers(lan, name) or lan.ranks(name) for name in ("login", "n1")):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_two_ray_nodes_are_one_world_that_actors_hold_and_their_end_is_its_end(
    lan: Lan, raylets: Raylets, tmp_path: Path
) -> None:
    env = {**raylets.env, "RAY_ADDRESS": raylets.address}
    with Kernel(within=lan.login, env=env, cwd=tmp_path) as kernel:
        kernel.check("%load_ext nbdist")
        started = kernel.check(f"{START} --nodes 2 --gpus-per-node 2 --backend gloo", timeout=100)
        assert "4 engines on 2 hosts · world of 4 ranks" in started.text
        where = kernel.check(
            "%%distributed\nimport os\nmine = rank\nprint(nbdist.rank_info().host, local_rank, "
            "os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS'])"
        ).text
        for line in ("login 0 0,1 1", "login 1 0,1 1", "n1 0 0,1 1", "n1 1 0,1 1"):
            assert line in where, where
        assert "[0-3] 10.0" in kernel.check(WHOLE).text
        assert [len(workers(lan, name)) for name in ("login", "n1")] == [1, 1]

        # the ranks are processes of ours: Stop reaches them although Ray's own threads block signals
        stopped = kernel.run("%%distributed\nimport time\ntime.sleep(60)", timeout=20, actions=[(1, kernel.interrupt)])
        assert stopped.error is not None and stopped.error[0] == "KeyboardInterrupt", stopped

        (actor,) = workers(lan, "n1")
        os.kill(actor, signal.SIGKILL)
        lost = kernel.run("%%distributed\nwhile True: dist.barrier()", timeout=40)
        assert "host n1 was lost" in lost.text, lost
        assert "replaced by empty ones" in kernel.check("%cluster repair", timeout=60).text
        assert "[0-3] 10.0" in kernel.check(WHOLE).text
        kept = kernel.check("%%distributed\nprint(nbdist.rank_info().host, globals().get('mine'))").text
        assert len(re.findall(r"login \d", kept)) == 2 and "n1 None" in kept, kept

        kernel.kill()
        assert nobody_is_left(lan, 20)
    assert list(raylets.temporary.glob("nbdist-*")) == []


def test_what_ray_cannot_give_is_said_with_what_there_is(lan: Lan, raylets: Raylets, tmp_path: Path) -> None:
    with Kernel(within=lan.login, env=raylets.env, cwd=tmp_path) as kernel:
        kernel.check("%load_ext nbdist")
        wrong = kernel.run(f"{START} --ray-address {LOGIN}:9", timeout=40)
        assert wrong.error == (
            "ClusterError",
            f"Ray: no Ray cluster at {LOGIN}:9: Connection refused. Start one (ray start --head), or name it: "
            "--ray-address HOST:6379, or RAY_ADDRESS.",
        ), wrong
        small = kernel.run(f"{START} --ray-address {raylets.address} --nodes 2 --ranks-per-node 8", timeout=60)
        assert small.error is not None and small.error[0] == "ClusterError", small
        assert "but none of the cluster's 2 nodes has that (" in small.error[1], small
        assert "n1: 4 CPU, 2 GPU" in small.error[1] and "--nodes" in small.error[1], small
        # where Ray adds nodes, or others hold them: told while one waits, and Stop ends it
        kernel.check(f"import os\nos.environ['RAY_ADDRESS'] = '{raylets.address}'\nimport nbdist")
        late = kernel.send("nbdist.Cluster(16, profile='ray', options={'grows': True}).start(print)")
        told = "waits for room in the Ray cluster: 1 node with 16 CPU; free are 8 of 8 CPU"
        kernel.wait(late, timeout=40, until=lambda cell: told in cell.text or cell.ended)
        kernel.interrupt()
        kernel.wait(late, timeout=20)
        assert late.error is not None and late.error[0] == "KeyboardInterrupt" and told in late.text, late
    assert nobody_is_left(lan, 10)


@pytest.mark.sample
def test_a_cluster_that_is_too_small_is_told_by_its_nodes() -> None:
    nodes = [
        {"Alive": True, "NodeManagerHostname": "a", "Resources": {"CPU": 8.0, "GPU": 1.0}},
        {"Alive": True, "NodeManagerHostname": "b", "Resources": {"CPU": 16.0}},
        {"Alive": False, "NodeManagerHostname": "c", "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    assert shortage({"CPU": 8}, 2, nodes) == ""
    text = shortage({"CPU": 8, "GPU": 1}, 2, nodes)
    assert text.startswith(
        "2 nodes with 8 CPU, 1 GPU each asked for, "
        "but 1 of the cluster's 2 nodes has that (a: 8 CPU, 1 GPU; b: 16 CPU, 0 GPU). "
    )


@pytest.mark.sample
def test_without_ray_the_error_names_the_extra_and_a_dry_run_needs_none(kernel: Kernel) -> None:
    kernel.check("import sys\nsys.modules['ray'] = None\n%load_ext nbdist")
    failed = kernel.run(f"{START} -n 2", timeout=30)
    assert failed.error == (
        "ClusterError",
        f"Ray is not installed for {sys.executable}. Install the version of the Ray cluster: pip install 'nbdist[ray]'",
    ), failed
    shown = kernel.check(f"{START} --nodes 2 --gpus-per-node 8 --cpus-per-rank 4 --dry-run").text
    group = json.loads(shown.split("placement group: ")[1].split("\n")[0])
    assert group == {"strategy": "STRICT_SPREAD", "bundles": [{"CPU": 32, "GPU": 8}] * 2}
