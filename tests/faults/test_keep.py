"""A kept cluster: let go of, found again with all that it has, and refused where it is not ours or has ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist import Cluster, ClusterError
from nbdist.profiles import state_home
from tests.faults.faults import group_is_whole, nothing_was_lost
from tests.leaks import alive, tagged

START = "cluster = Cluster(2, backend='gloo', keep=True, name='lasting').start(); cluster.run('kept = 100 + rank')"


def notebook(code: str) -> list[str]:
    """Run code in a process of its own, as a notebook that is closed at its end; give the lines that it printed."""
    code = f"import time\nfrom nbdist import Cluster\n{code}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.fixture
def kept(no_cluster: None) -> Iterator[dict[int, int]]:
    """The pids of the two ranks of a cluster that a notebook has started with ``keep``, and which was closed then."""
    told = notebook(f"{START}\nprint(*cluster.pids.values())\nprint(cluster.run_dir)")
    run_dir = Path(told[1])
    yield dict(enumerate(map(int, told[0].split())))
    left = [process for process in tagged("NBDIST_RUN_DIR", str(run_dir)) if alive(process)]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=5)
    shutil.rmtree(run_dir, ignore_errors=True)


def test_a_kept_cluster_is_found_with_state_processes_and_running_cell(kept: dict[int, int]) -> None:
    notebook(
        "cluster = Cluster.attach()\nassert cluster.pull('kept') == [100, 101]\n"
        "cluster.run('import time\\nfor i in range(60): nbdist.log(loss=1 / (i + 1)); time.sleep(0.1)', detach=True)\n"
        "time.sleep(0.5)"
    )
    cluster = Cluster.attach("lasting")
    assert cluster.pids == kept
    assert "running In[" in cluster.status()[0].state
    with pytest.raises(ClusterError, match="still runs on the ranks"):
        cluster.run("1")
    assert cluster.cell is not None
    cluster.cell.wait(20)
    assert cluster.telemetry.to_frame().step.max() == 60
    nothing_was_lost(cluster)
    with pytest.raises(ClusterError, match="active here already"):
        Cluster.attach("lasting")
    cluster.stop()
    with pytest.raises(ClusterError, match="No kept cluster"):
        Cluster.attach("lasting")
    assert not (state_home() / "kept" / "lasting.json").exists()


def test_the_curve_has_each_step_once_also_those_that_no_notebook_has_heard(kept: dict[int, int]) -> None:
    notebook(
        "cluster = Cluster.attach()\n"
        "cluster.run('import time\\nfor i in range(60): nbdist.log(loss=1 / (i + 1)); time.sleep(0.1)', detach=True)\n"
        "time.sleep(1)"
    )
    time.sleep(2)
    cluster = Cluster.attach("lasting")
    assert cluster.cell is not None
    cluster.cell.wait(20)
    frame = cluster.telemetry.to_frame()
    for rank in (0, 1):
        assert frame[frame["rank"] == rank]["step"].tolist() == list(range(1, 61))
    (run,) = cluster.telemetry.runs
    assert (run.steps, run.reason) == (60, "done")
    began = time.monotonic()
    cluster.run("nbdist.log(loss=1)")
    assert time.monotonic() - began < 1.5  # nobody waits for records of which an earlier notebook had some
    cluster.stop()


def test_to_let_go_of_a_cluster_leaves_nothing_open(no_cluster: None) -> None:
    told = notebook(
        "import gc, threading, warnings\nwarnings.simplefilter('error', ResourceWarning)\n"
        "open_at_exit = []\nimport sys\nsys.unraisablehook = lambda unraisable: open_at_exit.append(unraisable)\n"
        f"{START}\ncluster.detach()\n"
        "cluster = Cluster.attach()\ncluster.detach()\n"
        "cluster = Cluster.attach()\ncluster.stop()\n"
        "del cluster\ngc.collect()\nprint(len(open_at_exit), *open_at_exit)"
    )
    assert told == ["0"]


def test_stop_ends_a_cell_of_the_notebook_before(kept: dict[int, int]) -> None:
    notebook("cluster = Cluster.attach()\ncluster.run('import time; time.sleep(60)', detach=True)\ntime.sleep(0.5)")
    cluster = Cluster.attach()
    with pytest.raises(KeyboardInterrupt):
        cluster.interrupt()
    nothing_was_lost(cluster)
    cluster.stop()


def test_a_death_while_nobody_looked_is_seen_and_repaired(kept: dict[int, int]) -> None:
    os.kill(kept[1], signal.SIGKILL)
    time.sleep(1)
    cluster = Cluster.attach()
    assert cluster.status()[1].state == "dead: died while no notebook was attached"
    cluster.repair()
    assert cluster.evaluate("globals().get('kept')") == [100, None]
    group_is_whole(cluster)
    cluster.stop()


def test_what_cannot_be_attached_to_is_refused_with_its_reason(kept: dict[int, int]) -> None:
    with pytest.raises(ClusterError, match=r"No kept cluster 'other'\. Kept: lasting\."):
        Cluster.attach("other")
    path = state_home() / "kept" / "lasting.json"
    entry = path.read_text()
    if os.getuid() == 0:  # only root can give a folder away
        os.chown(json.loads(entry)["run_dir"], 12345, -1)
        with pytest.raises(ClusterError, match="somebody else"):
            Cluster.attach("lasting")
        os.chown(json.loads(entry)["run_dir"], 0, -1)
    path.write_text(entry)
    os.kill(json.loads(entry)["controller"], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(json.loads(entry)["controller"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ClusterError, match="has ended"):
        Cluster.attach("lasting")
    assert not path.exists()
    assert not Path(json.loads(entry)["run_dir"]).exists()  # the ranks are ended, too: nobody could reach them


def test_a_note_that_cannot_be_read_is_said_and_left_alone(kept: dict[int, int]) -> None:
    path = state_home() / "kept" / "torn.json"
    path.write_text("{")
    with pytest.raises(ClusterError, match=r"'torn' cannot be told from its note"):
        Cluster.attach("torn")
    path.unlink()
    Cluster.attach().stop()


@pytest.mark.parametrize("sig", [signal.SIGHUP, signal.SIGTERM], ids=["closed terminal", "terminated"])
def test_a_script_whose_terminal_is_closed_leaves_nothing(no_cluster: None, tmp_path: Path, sig: int) -> None:
    code = (
        "import nbdist, time\n"
        "cluster = nbdist.Cluster(2, backend='gloo').start()\n"
        "cluster.run('dist.all_reduce(torch.ones(1)) if rank == 0 else __import__(\"time\").sleep(90)', detach=True)\n"
        "print(*cluster.pids.values(), cluster.run_dir, flush=True)\n"
        "time.sleep(90)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as script:
        assert script.stdout is not None
        told = script.stdout.readline().split()
        processes = psutil.Process(script.pid).children(recursive=True)
        assert {int(pid) for pid in told[:2]} <= {process.pid for process in processes}
        script.send_signal(sig)
        script.wait(10)
    _, left = psutil.wait_procs(processes, timeout=15)
    assert [process for process in left if alive(process)] == []
    deadline = time.monotonic() + 2
    while Path(told[2]).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("nbdist-*")) == []
