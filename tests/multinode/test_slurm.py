"""A batch job, on a real Slurm of two nodes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.multinode.lan import sh
from tests.multinode.quickstart import run_quickstart
from tests.multinode.slurm import Slurm

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(240)]

START = "%cluster start --profile slurm --timeout 90"
WHOLE = "%%distributed\nx = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)\nx.item()"
CLUSTER = "__import__('nbdist.cluster').cluster.active()"
PENDING = "--nodes 1 --ranks-per-node 2 --extra=--begin=now+120"


def test_a_job_of_two_nodes_is_a_world_and_its_end_is_the_jobs_end(slurm: Slurm, slurm_login: Kernel) -> None:
    started = slurm_login.check(f"{START} --nodes 2 --ranks-per-node 2 --time 5 --partition cpu", timeout=100)
    assert "4 engines on 2 hosts · world of 4 ranks" in started.text
    where = slurm_login.check(
        "%%distributed\nimport os\nprint(rank, nbdist.rank_info().host, os.environ['SLURM_NODEID'], local_rank, "
        "os.environ['RANK'], os.environ['WORLD_SIZE'])"
    ).text
    for line in ("0 n1 0 0 0 4", "1 n1 0 1 1 4", "2 n2 1 0 2 4", "3 n2 1 1 3 4"):
        assert line in where, where
    assert "[0-3] 10.0" in slurm_login.check(WHOLE).text
    assert len(slurm.jobs()) == 1
    began = time.monotonic()
    slurm_login.check("%cluster stop")
    assert time.monotonic() - began < 5
    slurm.wait_for_no_jobs()


def test_a_job_that_waits_says_why_and_stop_or_timeout_cancel_it(slurm: Slurm, slurm_login: Kernel) -> None:
    late = slurm_login.run(f"%cluster start --profile slurm {PENDING} --timeout 6", timeout=40)
    assert re.search(r"0 of 2 engines registered in 6 s \(job \d+ PENDING \(BeginTime\), starts ", late.text), late
    slurm.wait_for_no_jobs()
    stopped = slurm_login.run(f"{START} {PENDING}", timeout=40, actions=[(5, slurm_login.interrupt)])
    assert stopped.error is not None and stopped.error[0] == "KeyboardInterrupt", stopped
    slurm.wait_for_no_jobs()


def test_a_stop_before_slurm_has_answered_cancels_the_job_all_the_same(
    slurm: Slurm, slurm_login: Kernel, tmp_path: Path
) -> None:
    real = slurm_login.check("import os, shutil\nprint(shutil.which('sbatch'))").text.strip()
    slow = tmp_path / "sbatch"
    slow.write_text(f'#!/bin/sh\n{real} "$@"\nsleep 6\n')
    slow.chmod(0o755)
    slurm_login.check(f"os.environ['PATH'] = '{tmp_path}:' + os.environ['PATH']")
    stopped = slurm_login.run(f"{START} {PENDING}", timeout=40, actions=[(4, slurm_login.interrupt)])
    assert stopped.error is not None and stopped.error[0] == "KeyboardInterrupt", stopped
    slurm.wait_for_no_jobs()


def test_a_killed_notebook_cancels_its_job(slurm: Slurm, slurm_login: Kernel) -> None:
    slurm_login.send(f"{START} {PENDING}")
    deadline = time.monotonic() + 30
    while not slurm.jobs():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    slurm_login.kill()
    slurm.wait_for_no_jobs()
    slurm_login.seconds_until_gone(10)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--nodes 1 --partition none", r"sbatch: .*[Ii]nvalid partition"),
        ("--nodes 2 -n 3 --ranks-per-node 2", r"-n 3, but 2 nodes × 2 ranks are 4\."),
        ("--nodes 1 --time soon", r"sbatch: .*[Ii]nvalid (--)?time"),
    ],
)
def test_what_slurm_or_arithmetic_refuses_is_an_error_in_one_line(
    slurm: Slurm, slurm_login: Kernel, line: str, error: str
) -> None:
    failed = slurm_login.run(f"{START} {line}", timeout=40)
    assert failed.error is not None and failed.error[0] == "ClusterError", failed
    assert re.search(error, failed.error[1]), failed
    assert not slurm.jobs()


def test_an_account_that_slurm_does_not_know_is_one_line(slurm: Slurm, tmp_path: Path) -> None:
    # this Slurm keeps no accounts: what one says that does
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        "#!/bin/sh\necho 'sbatch: error: Batch job submission failed: Invalid account or account/partition "
        "combination specified' >&2\nexit 1\n"
    )
    sbatch.chmod(0o755)
    with Kernel(env={**slurm.env, "PATH": f"{sbatch.parent}:{os.environ['PATH']}"}, cwd=tmp_path) as kernel:
        kernel.check("%load_ext nbdist")
        failed = kernel.run(f"{START} --nodes 1 --account nobody", timeout=40)
    assert failed.error is not None and failed.error[0] == "ClusterError", failed
    assert re.fullmatch(r"sbatch: .*Invalid account.*", failed.error[1]), failed


def test_a_cancelled_job_is_a_lost_cluster_and_says_so(slurm: Slurm, slurm_login: Kernel) -> None:
    slurm_login.check(f"{START} --nodes 1 --ranks-per-node 2", timeout=100)
    slurm_login.check("!scancel -u root")
    cell = slurm_login.run("%%distributed\nwhile True: dist.barrier()", timeout=40)
    assert "ended" in cell.text or "lost" in cell.text or "ranks 0-1 dead" in cell.text, cell
    deadline = time.monotonic() + 10
    while "%cluster start begins anew" not in (again := slurm_login.run(WHOLE)).text:
        assert time.monotonic() < deadline, again
        time.sleep(0.2)


def test_a_requeued_job_comes_back_and_repair_puts_empty_ranks_in_their_places(
    slurm: Slurm, slurm_login: Kernel
) -> None:
    slurm_login.check(f"{START} --nodes 2 --ranks-per-node 1 --time 30", timeout=100)
    slurm_login.check("%%distributed\nmine = rank")
    (job,) = (line.split()[0] for line in slurm.jobs())
    lost = slurm_login.run(
        "%%distributed\nwhile True: dist.barrier()",
        timeout=60,
        actions=[(1, lambda: sh("scontrol", "requeue", job, env={**os.environ, **slurm.env}))],
    )
    assert re.search(r"rank 0.*host n1 was lost", lost.text), lost
    waiting = slurm_login.run("import time; time.sleep(4)\n%cluster repair", timeout=60)
    assert re.search(rf"job {job} PENDING \(.*\)", waiting.text) and "Wait until it runs" in waiting.text, waiting
    # Slurm lets a requeued job wait for two minutes
    sh("scontrol", "update", f"JobId={job}", "StartTime=now", env={**os.environ, **slurm.env})
    deadline = time.monotonic() + 60
    while not (mended := slurm_login.run("%cluster repair", timeout=60)).ok:
        assert time.monotonic() < deadline, mended
        time.sleep(1)
    assert "ranks 0-1 replaced by empty ones" in mended.text, mended
    assert "[0-1] 3.0" in slurm_login.check(WHOLE).text
    assert "[0-1] None" in slurm_login.check("%%distributed\nprint(globals().get('mine'))").text
    slurm_login.check("%cluster stop")
    slurm.wait_for_no_jobs()


def test_the_time_limit_is_counted_down_in_status_and_panel(slurm: Slurm, slurm_login: Kernel) -> None:
    slurm_login.check(f"{START} --nodes 1 --ranks-per-node 1 --time 30", timeout=100)
    deadline = time.monotonic() + 20
    while "ends in" not in (said := slurm_login.check("print(active.status())".replace("active", CLUSTER)).text):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    assert re.search(r"The job's time limit ends in (29|30) min\.", said), said
    head = f"from nbdist.dashboard.frames import head\nhead(None, [], {CLUSTER}.telemetry.ends)['facts']"
    assert re.search(r"job ends in: (29|30) min", slurm_login.check(head).text)
    slurm_login.check("%cluster stop")


def test_the_quickstart_runs_unchanged_over_slurm(slurm: Slurm, slurm_login: Kernel) -> None:
    run_quickstart(slurm_login, "--profile slurm --nodes 2 --ranks-per-node 1")
    slurm.wait_for_no_jobs()


def test_the_script_is_shown_without_keys_and_nothing_is_submitted(slurm: Slurm, slurm_login: Kernel) -> None:
    text = slurm_login.check(
        "%cluster start --profile slurm --nodes 4 --gpus-per-node 8 --cpus-per-rank 12 --partition gpu --account lab "
        "--time 4:00:00 --extra=--constraint=a100 --dry-run"
    ).text
    for line in ("nodes=4", "gpus-per-node=8", "cpus-per-task=96", "partition=gpu", "account=lab", "time=4:00:00"):
        assert f"#SBATCH --{line}\n" in text
    assert "#SBATCH --constraint=a100\n" in text and "secret" not in text
    assert not slurm.jobs()


def test_variables_of_another_job_do_not_reach_the_ranks(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A23: the notebook itself runs in an allocation of another shape
    stale = {
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "0",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "1",
    }
    with Kernel(env={**slurm.env, **stale}, cwd=tmp_path) as kernel:
        kernel.check("%load_ext nbdist")
        started = kernel.check(f"{START} --nodes 2 --ranks-per-node 1", timeout=100)
        assert "RANK, WORLD_SIZE, MASTER_PORT of the notebook's environment ignored" in started.text
        text = kernel.check("%%distributed\nimport os\nprint(rank, os.environ['RANK'], os.environ['WORLD_SIZE'])").text
        assert "0 0 2" in text and "1 1 2" in text
        kernel.check("%cluster stop")
    slurm.wait_for_no_jobs()


def test_a_notebook_visits_an_allocation_that_somebody_holds(slurm: Slurm, slurm_login: Kernel, tmp_path: Path) -> None:
    env = {**os.environ, **slurm.env}
    step = ["srun", "-J", "held", "-N2", "--ntasks-per-node=1", "-t5", "--kill-on-bad-exit=0", "--input=none"]
    command = [*step, sys.executable, "-m", "nbdist.engine", "--join", "--name", "held", "--address", "127.0.0.1"]
    with open(tmp_path / "srun.log", "wb") as log:
        job = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=tmp_path)
    try:
        entry = Path(os.environ["NBDIST_HOME"]) / "kept" / "held.json"
        deadline = time.monotonic() + 60
        while not entry.exists():
            assert time.monotonic() < deadline and job.poll() is None, (tmp_path / "srun.log").read_text()
            time.sleep(0.1)
        assert "2 engines on 2 hosts" in slurm_login.check("%cluster attach held", timeout=60).text
        assert "[0-1] 3.0" in slurm_login.check(WHOLE).text
        slurm_login.check("%cluster stop")
        assert job.poll() is None
    finally:
        # a plain scancel kills a step of srun at once; what it leaves is a private folder in /tmp
        sh("scancel", "--signal=TERM", "-n", "held", env=env)
        job.wait(30)
    assert not entry.exists()
