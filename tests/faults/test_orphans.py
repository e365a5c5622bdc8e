"""Whatever ends, nothing of ours lives on: kernel, agent, controller; and a kept cluster lives until it is stopped."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.kernel import Kernel

pytestmark = pytest.mark.timeout(180)

PROCESSES = "print(cluster._processes.controller.pid, cluster._processes._cluster.engine_set.pid)"


def started(kernel: Kernel, options: str = "") -> tuple[int, int]:
    """Start a cluster; give the pids of controller and agent."""
    kernel.check(f"%load_ext nbdist\ncluster = %cluster start -n 2 {options}", timeout=90)
    controller, agent = kernel.check(PROCESSES).text.split()
    return int(controller), int(agent)


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("nbdist-*"))


BUSY = {
    "nothing": "1",
    "collective": "if rank == 0: dist.all_reduce(torch.ones(1))\nelse: __import__('time').sleep(90)",
    "workers": (
        "import time\n"
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 1000\n"
        "    def __getitem__(self, i): time.sleep(0.2); return i\n"
        "for batch in torch.utils.data.DataLoader(Slow(), num_workers=2): dist.all_reduce(batch)"
    ),
}


@pytest.mark.parametrize("cell", BUSY.values(), ids=BUSY)
def test_nothing_is_left_two_seconds_after_the_kernel_was_killed(kernel: Kernel, cell: str) -> None:
    before = folders()
    started(kernel)
    kernel.send(f"%%distributed\n{cell}")
    time.sleep(2)
    assert kernel.processes()
    kernel.kill()
    assert kernel.seconds_until_gone(10) < 2
    assert folders() <= before


def test_nothing_is_left_after_the_kernel_was_restarted(kernel: Kernel) -> None:
    before = folders()
    started(kernel)
    old = kernel.processes()
    kernel.restart()
    _, alive = psutil.wait_procs(old, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert folders() <= before
    started(kernel)


@pytest.mark.parametrize("which", ["controller", "node agent"])
def test_the_loss_of_controller_or_agent_is_named_and_a_new_start_works(kernel: Kernel, which: str) -> None:
    controller, agent = started(kernel)
    victim = controller if which == "controller" else agent
    old = kernel.processes()
    cell = kernel.run(
        "%%distributed\nimport time; time.sleep(60)", actions=[(1.0, lambda: os.kill(victim, signal.SIGKILL))]
    )
    assert cell.seconds < 1 + 5
    assert f"The {which} of the cluster ended" in cell.error[1]
    _, alive = psutil.wait_procs(old, timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    started(kernel)
    assert "[0-1] 2.0" in kernel.check("%%distributed\nx = torch.ones(1); dist.all_reduce(x); x.item()").text


def test_stop_ends_frozen_and_dead_ranks_too(kernel: Kernel) -> None:
    started(kernel)
    kernel.check(
        "import os, signal\nos.kill(cluster.pids[1], signal.SIGKILL); os.kill(cluster.pids[0], signal.SIGSTOP)"
    )
    began = time.monotonic()
    stopped = kernel.check("%cluster stop")
    assert time.monotonic() - began < 15
    assert "rank 0 (no answer in 0.8 s), rank 1 (dead)." in stopped.text
    assert kernel.check("%cluster stop").text == "No cluster is running.\n"
    assert kernel.seconds_until_gone(5) < 5


def test_a_kept_cluster_is_found_again_with_its_state_and_its_running_curve(kernel: Kernel) -> None:
    started(kernel, "--keep --name lasting")
    kernel.check("%%distributed\nkept = 100 + rank")
    kernel.check(
        "%%distributed --detach\nimport time\nfor i in range(40):\n    nbdist.log(loss=1 / (i + 1)); time.sleep(0.1)"
    )
    kernel.restart()
    kernel.check("%load_ext nbdist\ncluster = %cluster attach lasting")
    assert "running In[" in kernel.check("%cluster status").text
    kernel.check("cluster.cell and cluster.cell.wait()\nassert cluster.telemetry.current.step == 40", timeout=30)
    kernel.check("assert cluster.pull('kept') == [100, 101]")
    assert "2.0" in kernel.check("%%distributed\nx = torch.ones(1); dist.all_reduce(x); x.item()").text
    kernel.check("%cluster stop")
    assert kernel.seconds_until_gone(5) < 5
    assert (
        "has ended" in kernel.run("%cluster attach lasting").error[1]
        or "No kept" in kernel.run("%cluster attach").error[1]
    )


def test_attach_without_a_kept_cluster_says_how_to_start_one(kernel: Kernel) -> None:
    kernel.check("%load_ext nbdist")
    assert "%cluster start --keep" in kernel.run("%cluster attach").error[1]
