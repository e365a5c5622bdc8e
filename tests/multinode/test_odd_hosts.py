"""Hosts that are not as one would wish: clocks, folders, disks, names and address families; ranks that come early."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.multinode.lan import Lan, sh

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(240)]

WHOLE = "%%distributed\nx = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)\nx.item()"
CLUSTER = "__import__('nbdist.cluster').cluster.active()"
SLOW_CLOCK = """import time
real = time.time
time.time = lambda: real() - 5
"""
ALONE = """import sys, time, nbdist
began = time.time()
try:
    with nbdist.Cluster(2, backend="gloo").start() as cluster:
        cluster.run("x = torch.ones(1); dist.all_reduce(x); x.item()")
except nbdist.NbdistError as error:
    print(f"{type(error).__name__} after {time.time() - began:.1f} s: {error}")
"""


def python_of_n2(folder: Path, does: str) -> Path:
    """Give an interpreter that on host n2 first runs a line of shell."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ $(hostname) = n2 ] && {does}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_the_times_of_a_host_with_a_wrong_clock_are_put_right(
    lan: Lan, ssh_profile: Path, login: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLOW_CLOCK)
    python = python_of_n2(tmp_path, f"export PYTHONPATH={tmp_path}/site")
    login.check(f"%cluster start --profile {ssh_profile} --hosts n1,n2 --python {python} --timeout 90", timeout=100)
    time.sleep(1.5)  # a round trip a second
    assert "host n2: its clock differs by at least 5.0 s" in login.check("%cluster check", timeout=60).text
    told = login.check(
        "%%distributed\nimport time\nfor step in range(5):\n    dist.barrier(); nbdist.log(loss=1.0); time.sleep(0.1)"
    )
    assert told.ok
    frame = f"frame = {CLUSTER}.telemetry.to_frame()\nby = frame.groupby('rank')['time'].max()\n"
    apart = login.check(f"import time; time.sleep(0.5)\n{frame}print(f'APART {{abs(by[0] - by[1]):.3f}}')").text
    assert float(re.findall(r"APART (\S+)", apart)[0]) < 0.2, apart
    login.check("%cluster stop")


def test_a_host_without_the_notebooks_folder_is_named_and_works_elsewhere(
    lan: Lan, ssh_profile: Path, login: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    here = tmp_path / "project"
    here.mkdir()
    login.check(f"import os; os.chdir({str(here)!r})")
    hide = f"[ -z $HIDDEN ] && exec env HIDDEN=1 unshare -m sh -c 'mount -t tmpfs none {here}/..; exec $0 \"$@\"' "
    python = python_of_n2(tmp_path / "bin", f'{hide} {sys.executable} "$@"')
    started = login.check(
        f"%cluster start --profile {ssh_profile} --hosts n1,n2 --python {python} --timeout 90", timeout=100
    ).text
    assert "host n2 does not have this notebook's folder: its ranks work elsewhere" in started
    assert "[0-1] 3.0" in login.check(WHOLE).text
    login.check("%cluster stop")


def test_a_full_disk_is_told_by_every_host_that_has_one(
    lan: Lan, ssh_profile: Path, login: Kernel, tmp_path: Path
) -> None:
    # Python takes another folder where TMPDIR is full; here there is no other
    full = tmp_path / "full"
    full.mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"import tempfile\ntempfile._candidate_tempdir_list = lambda: [{str(full)!r}]\n"
    )
    mount = (
        f"mount -t tmpfs -o size=4k none {full}; head -c 4096 /dev/zero >{full}/x; export PYTHONPATH={tmp_path}/site"
    )
    python = python_of_n2(tmp_path, f'exec unshare -m sh -c \'{mount}; exec $0 "$@"\' {sys.executable} "$@"')
    failed = login.run(f"%cluster start --profile {ssh_profile} --hosts n1,n2 --python {python}", timeout=60)
    assert failed.error is not None and "1 of 2 engines can start" in failed.text, failed
    assert "n2: no room for temporary files there" in failed.text, failed

    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    command = ["unshare", "-m", "sh", "-c", f"{mount}; exec {sys.executable} {script}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert re.search(r"ClusterError after 0\.\d s: No room for temporary files", ran.stdout), ran


def test_an_address_of_the_controller_that_has_no_meaning_is_one_line(
    lan: Lan, ssh_profile: Path, login: Kernel
) -> None:
    failed = login.run(f"%cluster start --profile {ssh_profile} --hosts n1 --address no-such-host.invalid", timeout=60)
    assert failed.error is not None and failed.error[0] == "ClusterError" and failed.seconds < 10, failed
    assert "no-such-host.invalid" in failed.text and len(failed.text.splitlines()) < 10, failed


def test_a_name_that_appears_later_is_waited_for(need: Callable[..., None], tmp_path: Path) -> None:
    need("ip")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    program = (
        "import socket, threading, time\nfrom nbdist.channel import reachable\n"
        "server = socket.create_server(('127.0.0.1', 0))\nport = server.getsockname()[1]\n"
        f"late = lambda: open({str(hosts)!r}, 'a').write('127.0.0.1 late.invalid\\n')\n"
        "threading.Timer(2, late).start()\nbegan = time.monotonic()\n"
        "print(repr(reachable('late.invalid', port, 10)), time.monotonic() - began)\n"
        "print(repr(reachable('never.invalid', port, 1)))\n"
    )
    (tmp_path / "program.py").write_text(program)
    bind = f"mount --bind {hosts} /etc/hosts; exec {sys.executable} {tmp_path}/program.py"
    text = sh("unshare", "-m", "sh", "-c", bind)
    assert re.match(r"'' [23]\.", text), text
    assert "not known" in text or "Temporary failure" in text


@pytest.fixture
def namespace(need: Callable[..., None]) -> Iterator[str]:
    """A network of its own with a loopback interface and nothing else."""
    need("ip")
    name = f"nbd{os.getpid()}-alone"
    sh("ip", "netns", "add", name)
    sh("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
    yield name
    sh("ip", "netns", "del", name)


def run_alone(namespace: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Start a cluster of two ranks by a script, on a host that has nothing but this namespace."""
    (folder / "alone.py").write_text(ALONE)
    command = ["ip", "netns", "exec", namespace, sys.executable, str(folder / "alone.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=90)


def test_a_host_without_ipv6_starts_without_many_words(namespace: str, tmp_path: Path) -> None:
    sh("ip", "netns", "exec", namespace, "sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1")
    ran = run_alone(namespace, tmp_path)
    assert ran.returncode == 0 and "[0-1] 2.0" in ran.stdout, ran
    assert len(ran.stderr.splitlines()) <= 1, ran.stderr


def test_a_host_with_ipv6_alone_is_refused_before_anything_starts(namespace: str, tmp_path: Path) -> None:
    sh("ip", "netns", "exec", namespace, "ip", "addr", "del", "127.0.0.1/8", "dev", "lo")
    ran = run_alone(namespace, tmp_path)
    assert re.search(r"ClusterError after [0-4]\.\d s: .*127\.0\.0\.1", ran.stdout), ran


def test_a_rank_of_a_job_that_comes_first_waits_for_the_controller(tmp_path: Path) -> None:
    # A14: the batch system starts rank 1 well before rank 0
    from tests.multinode.slurm import free_ports

    (port,) = free_ports(1)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks: list[subprocess.Popen[bytes]] = []
    entry = Path(os.environ["NBDIST_HOME"]) / "kept" / "late.json"
    command = [sys.executable, "-m", "nbdist.engine", "--join", "--name", "late", "--address", "127.0.0.1"]
    try:
        for rank in (1, 0):
            env = {**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(tmp_path / f"rank-{rank}.log", "wb") as log:
                ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
            time.sleep(5 if rank else 0)
        deadline = time.monotonic() + 60
        while not entry.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with Kernel(cwd=tmp_path) as kernel:
            kernel.check("%load_ext nbdist")
            assert "world of 2 ranks" in kernel.check("%cluster attach late", timeout=60).text
            assert "[0-1] 3.0" in kernel.check(WHOLE).text
            kernel.check("%cluster stop")
        assert all(process.poll() is None for process in ranks)
    finally:
        for process in reversed(ranks):
            process.terminate()
        for process in ranks:
            process.wait(30)


def test_a_rank_whose_controller_never_comes_says_what_it_waited_for(tmp_path: Path) -> None:
    program = "import sys\nfrom nbdist.engine import job\njob.WAIT_S = 2.0\nsys.exit(job.join('never', ''))"
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert re.search(r"The controller of rank 0 was not found in .*never\.json within 2 s\.", ran.stderr), ran
