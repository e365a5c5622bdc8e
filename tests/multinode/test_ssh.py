"""Hosts reached by ssh: three network namespaces, each with a misleading hosts file and a second interface."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.multinode.lan import LOGIN, Lan
from tests.multinode.quickstart import run_quickstart

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(240)]

WHOLE = "%%distributed\nx = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)\nx.item()"
START_S = 100


def start(kernel: Kernel, profile: Path, hosts: str, *more: str) -> str:
    line = " ".join(["%cluster start --timeout 90 --profile", str(profile), "--hosts", hosts, *more])
    return kernel.check(line, timeout=START_S).text


def wait_for_nobody(lan: Lan, timeout: float) -> float:
    began = time.monotonic()
    while any(lan.ranks(name) for name in lan.names):
        assert time.monotonic() - began < timeout, {name: lan.ranks(name) for name in lan.names}
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.mark.sample
def test_three_hosts_are_one_world_and_a_lost_one_does_not_take_the_others_with_it(
    lan: Lan, ssh_profile: Path, login: Kernel
) -> None:
    # A12, B06: nothing was said about addresses or interfaces
    assert "4 engines on 3 hosts · world of 4 ranks" in start(login, ssh_profile, "n1:1,n2:2,n3:1")
    assert "[0-3] 10.0" in login.check(WHOLE).text
    where = login.check(
        "%%distributed\nimport os, socket\nmine = rank * 10\n"
        "print(rank, socket.gethostname(), local_rank, node_rank, os.environ['GLOO_SOCKET_IFNAME'], "
        "os.environ['MASTER_ADDR'])"
    ).text
    for line in ("0 n1 0 0", "1 n2 0 1", "2 n2 1 1", "3 n3 0 2"):
        assert f"{line} e0 {lan.address('n1')}" in where, where
    checked = login.check("%cluster check", timeout=60).text
    assert f"host n2: {lan.address('n2')} on e0" in checked and "FIX" not in checked.replace("clock", ""), checked

    failed = login.run("%%distributed\nif rank == 1: 1 / 0\nx = torch.ones(1); dist.all_reduce(x)")
    assert "ranks 0, 2-3: released from all_reduce" in failed.text and failed.seconds < 5, failed
    assert "[0-3] 10.0" in login.check(WHOLE).text

    # no key is to be seen in an environment, on a command line, or by another user
    secrets = keys_of(login)
    for name in lan.names:
        for pid in lan.pids(name):
            for what in ("environ", "cmdline"):
                text = Path(f"/proc/{pid}/{what}").read_bytes() if Path(f"/proc/{pid}").exists() else b""
                assert not any(secret in text for secret in secrets), (name, pid, what)

    lan.cut("n3")
    try:
        cell = login.run(
            "%%distributed\nx = torch.ones(1000)\nfor _ in range(10**7): dist.all_reduce(x); x.div_(world_size)",
            timeout=40,
        )
    finally:
        lan.mend("n3")
    assert not cell.ok and "rank 3 host n3 was lost" in cell.text and cell.seconds < 15, cell
    assert "shrank from 4 to 3 ranks without rank 3" in login.check("%cluster repair --shrink").text
    assert "[0-2] 6.0" in login.check(WHOLE).text
    assert "[1] 10" in login.check("%%distributed\nmine").text  # whoever stayed has kept what he had

    began = time.monotonic()
    login.check("%cluster stop")
    assert time.monotonic() - began < 3
    wait_for_nobody(lan, 5)


def keys_of(kernel: Kernel) -> list[bytes]:
    text = kernel.check(
        "from nbdist.cluster import active\nimport json, glob\n"
        "for path in glob.glob(str(active().run_dir) + '/security/*.json'):\n"
        "    for name, value in json.load(open(path)).items():\n"
        "        if 'key' in name and value: print('KEY', value)"
    ).text
    keys = [line.removeprefix("KEY ").encode() for line in text.splitlines() if line.startswith("KEY ")]
    assert len(keys) >= 4
    return keys


def test_a_rank_and_a_host_are_replaced_where_they_were(lan: Lan, ssh_profile: Path, login: Kernel) -> None:
    start(login, ssh_profile, "n1:1,n2:2")
    login.check("%%distributed\nmine = rank")
    died = login.run(
        "%%distributed\nimport os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    assert "host n2) was killed by signal 9" in died.text, died
    login.check("%cluster repair", timeout=60)
    assert "[0-2] 6.0" in login.check(WHOLE).text
    assert "n2" in login.check("%%distributed --ranks 1\nimport socket; socket.gethostname()").text

    lan.cut("n2")
    try:
        lost = login.run("%%distributed\nwhile True: dist.barrier()", timeout=40)
        early = login.run("%cluster repair", timeout=60)
    finally:
        lan.mend("n2")
    assert "host n2 was lost" in lost.text, lost
    assert early.error is not None and early.error[1].startswith("A lost host is not back: n2: "), early
    assert early.error[1].endswith(". Go on without it: %cluster repair --shrink."), early
    assert "ranks 1-2 replaced" in login.check("%cluster repair", timeout=90).text
    assert "[0-2] 6.0" in login.check(WHOLE).text
    assert "0" in login.check("%%distributed --ranks 0\nmine").text

    shrunk = login.check("%cluster resize -n 2", timeout=60).text
    assert "from 3 to 2" in shrunk
    assert "[0-1] 3.0" in login.check(WHOLE).text
    login.check("%cluster resize -n 3", timeout=60)
    assert "[0-2] 6.0" in login.check(WHOLE).text
    full = login.run("%cluster resize -n 4", timeout=60)
    assert "n1:1, n2:2 are full" in full.text


def test_every_host_that_cannot_be_used_is_named_with_its_reason(lan: Lan, ssh_profile: Path, login: Kernel) -> None:
    config = lan.folder / "ssh_config"
    before = config.read_text()
    other_key = (lan.folder / "id.pub").read_text().split()[:2]
    known = lan.folder / "known_hosts"
    hosts = known.read_text()
    known.write_text(hosts + f"changed {' '.join(other_key)}\n")
    config.write_text(
        f"Host changed\n  HostName {lan.address('n1')}\n  HostKeyAlias changed\n"
        f"Host unknown\n  HostName {lan.address('n1')}\n  HostKeyAlias unknown\n"
        f"Host locked\n  HostName {lan.address('n2')}\n  HostKeyAlias n2\n  IdentityFile /dev/null\n  User nobody\n"
        f"Host closed\n  HostName {lan.address('n2')}\n  Port 2222\n" + before
    )
    try:
        hosts_line = "n3,changed,unknown,locked,closed,no-such-host.invalid"
        failed = login.run(f"%cluster start --profile {ssh_profile} --hosts {hosts_line}", timeout=60)
        python = login.run(
            f"%cluster start --profile {ssh_profile} --hosts n1,n2 --python /opt/none/python", timeout=60
        )
    finally:
        config.write_text(before)
        known.write_text(hosts)
    assert failed.error is not None and failed.error[0] == "ClusterError", failed
    assert "1 of 6 engines can start" in failed.text
    for pattern in (
        r"changed: its host key is not the one in known_hosts",
        r"unknown: its host key is unknown. Log in once",
        r"locked: login refused \(.*\). A notebook cannot type a password",
        r"closed: nothing listens for ssh there",
        r"no-such-host.invalid: no such host name",
    ):
        assert re.search(pattern, failed.text), failed
    assert failed.seconds < 20
    assert python.text.count("there is no /opt/none/python. Name that host's interpreter with --python") == 2, python
    wait_for_nobody(lan, 10)


def test_a_start_goes_on_without_a_host_where_that_was_allowed(lan: Lan, ssh_profile: Path, login: Kernel) -> None:
    hosts = "n1,no-such-host.invalid,n3"
    failed = login.run(f"%cluster start --profile {ssh_profile} --hosts {hosts}", timeout=60)
    assert failed.error is not None and "2 of 3 engines can start" in failed.text, failed
    assert "no-such-host.invalid: no such host name" in failed.text
    assert "Go on with 2: %cluster start … --min 2" in failed.text
    wait_for_nobody(lan, 10)
    few = login.run(f"%cluster start --profile {ssh_profile} --hosts {hosts} --min 3", timeout=60)
    assert few.error is not None and "2 of 3 engines can start" in few.text, few
    wait_for_nobody(lan, 10)
    started = start(login, ssh_profile, hosts, "--min 2")
    assert "Going on with 2 of 3 ranks" in started and "no-such-host.invalid: no such host name" in started
    assert "2 engines on 2 hosts · world of 2 ranks" in started
    assert "[0-1] 3.0" in login.check(WHOLE).text
    login.check("%cluster stop")
    wait_for_nobody(lan, 5)


def test_an_address_that_the_hosts_cannot_reach_is_named(lan: Lan, ssh_profile: Path, login: Kernel) -> None:
    failed = login.run(f"%cluster start --profile {ssh_profile} --hosts n1,n2 --address 127.0.0.1", timeout=60)
    assert re.search(r"n1: cannot reach the controller at 127\.0\.0\.1:\d+: Connection refused", failed.text), failed
    assert re.search(r"n2: cannot reach the controller at 127\.0\.0\.1:\d+", failed.text)
    wait_for_nobody(lan, 10)


def test_a_killed_notebook_leaves_nothing_on_any_host(lan: Lan, ssh_profile: Path, login: Kernel) -> None:
    start(login, ssh_profile, "n1,n2,n3")
    login.send("%%distributed\nwhile True: dist.barrier()")
    time.sleep(1)
    login.kill()
    wait_for_nobody(lan, 3)
    login.seconds_until_gone(5)


def test_a_kept_cluster_goes_on_without_its_notebook_and_is_found_again(
    lan: Lan, ssh_profile: Path, login: Kernel, tmp_path: Path
) -> None:
    start(login, ssh_profile, "n1,n2", "--keep --name far")
    login.check("%%distributed\nmine = rank * 10")
    login.restart()
    assert lan.ranks("n1") and lan.ranks("n2")
    login.check("%load_ext nbdist")
    assert "2 engines on 2 hosts" in login.check("%cluster attach far").text
    assert "[1] 10" in login.check("%%distributed\nmine").text
    failed = login.run("%%distributed\nif rank == 0: 1 / 0\ndist.barrier()")
    assert "rank 1: released from barrier" in failed.text
    assert "[0-1] 3.0" in login.check(WHOLE).text
    login.check("%cluster stop")
    wait_for_nobody(lan, 5)


def test_different_versions_are_named_before_anything_runs(
    lan: Lan, ssh_profile: Path, login: Kernel, tmp_path: Path
) -> None:
    # the n2 of this test says that it has another torch
    other = tmp_path / "python"
    other.write_text(
        f'#!/bin/sh\n[ $(hostname) = n2 ] && export PYTHONPATH={tmp_path}\nexec {subprocess.sys.executable} "$@"\n'  # type: ignore[attr-defined]
    )
    other.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nreal = m.version\n"
        "m.version = lambda name: '2.9.9' if name == 'torch' else real(name)\n"
    )
    failed = login.run(f"%cluster start --profile {ssh_profile} --hosts n1,n2 --python {other}", timeout=60)
    assert re.search(r"torch differs: .* on n1; 2\.9\.9 on n2|torch differs: 2\.9\.9 on n2; .* on n1", failed.text), (
        failed
    )
    wait_for_nobody(lan, 10)


def test_the_quickstart_runs_unchanged_over_ssh(lan: Lan, ssh_profile: Path, login: Kernel) -> None:
    run_quickstart(login, f"--profile {ssh_profile} --hosts n1,n2")
    wait_for_nobody(lan, 10)


def test_ssh_starts_are_written_out_without_running_them(login: Kernel, ssh_profile: Path, lan: Lan) -> None:
    text = login.check(f"%cluster start --profile {ssh_profile} --hosts n1:2,n2 --dry-run").text
    assert text.count("BatchMode=yes") == 2 and "-m nbdist.engine" in text
    assert LOGIN not in text and not lan.ranks("n1")


def test_terminating_the_link_of_a_host_is_a_lost_host(lan: Lan, ssh_profile: Path, login: Kernel) -> None:
    import os

    import psutil

    start(login, ssh_profile, "n1,n2")
    links = [p for p in lan.ranks("n2") if psutil.Process(p).cmdline()[-2:] == ["nbdist.engine", "--lifeline"]]
    for pid in links:
        os.kill(pid, signal.SIGTERM)
    cell = login.run("%%distributed\nwhile True: dist.barrier()", timeout=30)
    assert "host n2 was lost: its node agent ended" in cell.text, cell
    login.check("%cluster stop")


def test_the_end_of_the_controller_is_the_end_of_every_rank(lan: Lan, ssh_profile: Path, login: Kernel) -> None:
    start(login, ssh_profile, "n1,n2")
    login.check(
        "import os, signal\nfrom nbdist.cluster import active\n"
        "os.kill(active()._processes.controller.pid, signal.SIGKILL)"
    )
    wait_for_nobody(lan, 5)
    assert "%cluster start begins anew" in login.run(WHOLE).text
    login.check("%cluster stop")
