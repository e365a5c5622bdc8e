"""An ipyparallel cluster that its user has started himself: visited, worked with, and left as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ipyparallel as ipp
import psutil
import pytest

from tests.kernel import Kernel
from tests.leaks import alive

WHOLE = "%%distributed\nx = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)\nx.item()"


@pytest.fixture
def ipcluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ipp.Client]:
    """A client of two engines that ``ipcluster start`` has started, in an IPython folder of their own."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "ipyparallel.cluster", "start", "-n", "2"]
    with open(tmp_path / "ipcluster.log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        client = ipp.Client(connection_file_of(tmp_path, process), timeout=30)
        client.wait_for_engines(2, timeout=60)
        yield client
        client.close()
    finally:
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        process.wait(30)
        psutil.wait_procs(started, timeout=10)
        for left in filter(alive, started):
            left.kill()


def connection_file_of(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait for the controller's connection file."""
    deadline = time.monotonic() + 60
    while True:
        files = list((folder / "ipython" / "profile_default" / "security").glob("ipcontroller*-client.json"))
        if files and files[0].read_text().endswith("}"):
            return str(files[0])
        assert time.monotonic() < deadline and process.poll() is None, (folder / "ipcluster.log").read_text()
        time.sleep(0.1)


@pytest.mark.timeout(240)
def test_engines_of_ipcluster_become_ranks_and_stay_when_the_visit_ends(ipcluster: ipp.Client, kernel: Kernel) -> None:
    view = ipcluster[:]
    pids = view.apply_sync(os.getpid)
    view.execute("mine = 41; rank = 'not yours'", block=True)
    kernel.check("%load_ext nbdist")
    assert "world of 2 ranks" in kernel.check("%cluster attach --ipcluster", timeout=90).text
    assert "[0-1] 42" in kernel.check("%%distributed\nmine + 1").text
    kernel.check("%%distributed\nrank = dist.get_rank()")
    assert "[0-1] 3.0" in kernel.check(WHOLE).text
    assert "[0] row 0" in kernel.check("%%distributed\nprint('row', rank)").text
    failed = kernel.run("%%distributed\nif rank == 0: 1 / 0\ndist.barrier()")
    assert "rank 1: released from barrier" in failed.text and "ZeroDivisionError" in failed.text, failed
    assert "[0-1] 3.0" in kernel.check(WHOLE).text
    assert "--all would end them" in kernel.check("%cluster stop").text

    assert view.apply_sync(os.getpid) == pids
    view.execute("still = 'world_size' in globals()", block=True)
    assert view["mine"] == [41, 41] and view["still"] == [False, False]
    printed = view.execute("print('as before')")
    printed.get()
    assert printed.stdout == ["as before\n", "as before\n"]

    kernel.check("%cluster attach --ipcluster", timeout=90)
    assert "[0-1] 41" in kernel.check("%%distributed\nmine").text
    os.kill(pids[1], signal.SIGKILL)
    died = kernel.run(WHOLE)
    assert f"rank 1 (pid {pids[1]}) has ended" in died.text, died
    refused = kernel.run("%cluster repair")
    assert refused.error is not None and "%cluster repair --shrink" in refused.error[1], refused
    kernel.check("%cluster repair --shrink")
    assert "1.0" in kernel.check(WHOLE).text
    kernel.check("%cluster stop --all", timeout=30)
    assert not psutil.pid_exists(pids[0])


def test_what_is_not_there_is_told_with_how_to_start_it(idle_kernel: Kernel, tmp_path: Path) -> None:
    failed = idle_kernel.run("%cluster attach --ipcluster nowhere")
    assert failed.error == ("ClusterError", "No ipyparallel profile or connection file 'nowhere'. See: ipcluster list.")
