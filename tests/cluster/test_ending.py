"""Everything ends with the notebook, whichever way that ends."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from nbdist import Cluster
from tests.cluster.checks import fails, folders, group_is_whole, pids, value
from tests.kernel import Kernel
from tests.leaks import alive, tagged

START = "%load_ext nbdist\n%cluster start -n 2 --backend gloo"


def test_stop_ends_all_processes_also_those_that_were_killed_or_stopped(fresh_cluster: Cluster) -> None:
    run_dir = fresh_cluster.run_dir
    processes = tagged("NBDIST_RUN_DIR", str(run_dir))
    assert len(processes) >= 6  # a controller, an agent, and two engines with their nannies
    pids = fresh_cluster.pids
    os.kill(pids[1], signal.SIGKILL)
    os.kill(pids[0], signal.SIGSTOP)
    began = time.monotonic()
    fresh_cluster.stop()
    assert time.monotonic() - began < 15
    _, left = psutil.wait_procs(processes, timeout=1)
    assert left == []  # nor a zombie: process 1 of a container may not reap what is left to it
    assert run_dir is not None and not run_dir.exists()
    fresh_cluster.stop()
    with Cluster(2, backend="gloo").start() as another:
        another.run("x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 2.0")


def test_stop_is_quick(fresh_cluster: Cluster) -> None:
    began = time.monotonic()
    fresh_cluster.stop()
    assert time.monotonic() - began < 3


def test_a_stop_while_a_cell_runs_ends_it(fresh_cluster: Cluster) -> None:
    cell = fresh_cluster.run("import time; time.sleep(60)", detach=True)
    time.sleep(0.5)
    fresh_cluster.stop()
    assert cell.finished.wait(5)


def test_a_restarted_kernel_has_no_ranks_left_and_can_start_new_ones(tmp_path: Path) -> None:
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as kernel:
        kernel.check(START, timeout=90)
        before = [psutil.Process(pid) for pid in pids(kernel).values()]
        kernel.restart()
        kernel.seconds_until_gone(15)
        assert folders(tmp_path) == []
        kernel.check(START, timeout=90)
        group_is_whole(kernel)
        assert not {process.pid for process in before} & set(pids(kernel).values())


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a collective"])
def test_a_killed_kernel_leaves_nothing(tmp_path: Path, busy: bool) -> None:
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as kernel:
        kernel.check(START, timeout=90)
        if busy:
            kernel.check(
                "%%distributed --detach\nif rank == 0: dist.all_reduce(torch.ones(1))\nimport time; time.sleep(60)"
            )
        kernel.kill()
        kernel.seconds_until_gone(15)
        deadline = time.monotonic() + 2
        while folders(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert folders(tmp_path) == []


def test_a_kernel_that_is_shut_down_leaves_nothing(tmp_path: Path) -> None:
    kernel = Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    try:
        kernel.check(START, timeout=90)
        processes = kernel.processes()
    finally:
        kernel.stop()
    assert processes
    assert not any(map(alive, processes))
    assert folders(tmp_path) == []


def test_a_kept_cluster_outlives_its_kernel(tmp_path: Path) -> None:
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as kernel:
        kernel.check(f"{START} --keep", timeout=90)
        kernel.check("%%distributed\nkept = 41 + rank")
        ranks = [psutil.Process(pid) for pid in pids(kernel).values()]
        run_dir = Path(value(kernel, "str(cluster.run_dir)"))
        try:
            kernel.restart(now=True)
            time.sleep(2)
            assert all(map(alive, ranks))
            kernel.check("%load_ext nbdist")
            kernel.check("%cluster attach", timeout=30)
            assert kernel.check("%%distributed\nkept").text == "[0] 41\n[1] 42\n"
            assert set(pids(kernel).values()) == {process.pid for process in ranks}
            group_is_whole(kernel)
            kernel.check("%cluster stop", timeout=30)
        finally:
            for process in ranks:
                if alive(process):
                    process.kill()
        kernel.seconds_until_gone(15)
        shutil.rmtree(run_dir, ignore_errors=True)


def test_a_controller_that_ends_is_told_and_the_next_start_works(tmp_path: Path) -> None:
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as kernel:
        kernel.check(START, timeout=90)
        controller = next(
            p for p in kernel.processes() if "nbdist.controller" in p.cmdline() and p.ppid() == kernel.pid
        )
        cell = kernel.run(
            "%%distributed\nimport time; time.sleep(60)",
            timeout=30,
            actions=[(0.5, lambda: os.kill(controller.pid, 9))],
        )
        assert cell.seconds < 8
        assert "controller" in cell.error[1]
        assert "%cluster stop" in cell.error[1] or "%cluster start" in cell.error[1]
        kernel.check("%cluster stop", timeout=30)
        kernel.seconds_until_gone(5)
        kernel.check("%cluster start -n 2 --backend gloo", timeout=60)
        group_is_whole(kernel)


def test_unloading_the_extension_stops_the_cluster(kernel: Kernel) -> None:
    kernel.check(START, timeout=90)
    kernel.check("%unload_ext nbdist", timeout=30)
    kernel.seconds_until_gone(5)
    assert fails(kernel, "%%distributed\n1", within=3).error[0] in ("UsageError", "ClusterError")
