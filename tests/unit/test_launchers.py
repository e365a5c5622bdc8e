"""Which hosts take how many ranks, what is said of hosts that differ, and what a check makes of what it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbdist import __version__, check, profiles
from nbdist.errors import ClusterError
from nbdist.launchers import MPIAgents, SlurmAgents, SSHAgents
from nbdist.launchers.remote import different_versions, parse_hosts
from nbdist.launchers.slurm import describe
from nbdist.launchers.ssh import explain

NONE = {"nodes": 0, "ranks_per_node": 0, "gpus_per_node": 0}


def test_hosts_are_read_with_their_ranks() -> None:
    assert parse_hosts("gpu1:8, gpu2") == [("gpu1", 8), ("gpu2", 1)]


@pytest.mark.parametrize("text", ["", "gpu1:", "gpu1:0:1", "gpu1:x", "-oProxyCommand=x", "gpu1,gpu1:2", "gpu1:0"])
def test_hosts_that_cannot_be_read_are_refused(text: str) -> None:
    if text == "gpu1:":
        assert parse_hosts(text) == [("gpu1", 1)]
        return
    with pytest.raises(ValueError, match="--hosts"):
        parse_hosts(text)


def test_hosts_are_filled_in_order() -> None:
    plan = SSHAgents.make_plan(3, {"hosts": "a:2,b:2,c:2"})
    assert plan.counts == {0: 2, 1: 1}
    assert plan.first_ids() == {0: 0, 1: 2}
    with pytest.raises(ValueError, match="-n 7"):
        SSHAgents.make_plan(7, {"hosts": "a:2,b:2,c:2"})
    with pytest.raises(ClusterError, match="--hosts gpu1:8"):
        SSHAgents.make_plan(None, {"hosts": ""})


@pytest.mark.parametrize(
    ("n", "setting", "nodes", "ranks"),
    [
        (None, {"nodes": 2, "gpus_per_node": 8}, 2, 16),
        (16, {"gpus_per_node": 8}, 2, 16),
        (4, {"nodes": 2}, 2, 4),
        (None, {"nodes": 2, "ranks_per_node": 3}, 2, 6),
        (None, {}, 1, 1),
    ],
)
def test_a_job_has_as_many_nodes_as_its_ranks_need(
    n: int | None, setting: dict[str, int], nodes: int, ranks: int
) -> None:
    plan = SlurmAgents.make_plan(n, {**NONE, **setting})
    assert (len(plan.slots), plan.n) == (nodes, ranks)


def test_a_size_that_the_nodes_do_not_give_is_refused() -> None:
    with pytest.raises(ValueError, match=r"-n 5, but 2 nodes × 4 ranks are 8\."):
        SlurmAgents.make_plan(5, {**NONE, "nodes": 2, "gpus_per_node": 4})


def test_mpi_without_hosts_is_this_host() -> None:
    assert MPIAgents.make_plan(3, {"hosts": ""}).counts == {0: 3}


def hello(host: str, **other: str) -> dict[str, Any]:
    import platform

    return {"host": host, "python": platform.python_version(), "torch": "2.13", "nbdist": __version__, **other}


def test_equal_hosts_are_nothing_to_speak_of() -> None:
    assert different_versions([hello("a"), hello("b")]) == ""


@pytest.mark.parametrize("package", ["python", "torch", "nbdist"])
def test_a_host_with_another_version_is_named(package: str) -> None:
    text = different_versions([hello("a"), hello("b", **{package: "1.2.3"})])
    assert f"{package} differs: " in text and "1.2.3 on b" in text


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (
            "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.",
            "is not the one in known_hosts",
        ),
        ("Host key verification failed.", "its host key is unknown"),
        ("root@h: Permission denied (publickey,password).", "cannot type a password"),
        ("ssh: Could not resolve hostname h: Name or service not known", "no such host name"),
        ("/usr/bin/python3: No module named nbdist", "not installed"),
        ("", "ssh ended with code 255"),
    ],
)
def test_what_ssh_said_is_put_into_words(said: str, meaning: str, tmp_path: Path) -> None:
    log = tmp_path / "ssh.err"
    log.write_text(said)
    assert meaning in explain(log, 255, "h", "/usr/bin/python3")


def test_a_waiting_job_says_what_for() -> None:
    assert describe("12", ["PENDING", "Priority", "2030-01-02T14:05:00", "N/A"]) == (
        "job 12 PENDING (Priority), starts 2030-01-02 14:05:00"
    )
    assert describe("12", ["RUNNING", "None", "N/A", "N/A"]) == "job 12 RUNNING"


def facts(host: str, **other: Any) -> dict[str, Any]:
    well = {
        "host": host,
        "address": "10.0.0.1",
        "interface": "e0",
        "resolved": "10.0.0.1",
        "python": "3.11.7",
        "torch": "2.13",
        "nbdist": "0.1",
        "nccl": "",
        "device": "cpu",
        "shm": 2**33,
        "tmp": 2**33,
        "files": 65536,
    }
    return {**well, **other}


def test_well_configured_hosts_need_no_fix() -> None:
    assert all(finding.ok for finding in check.judge([facts("a"), facts("b")], [0.0, 0.0], "gloo"))


@pytest.mark.parametrize(
    ("other", "skew", "text"),
    [
        ({"torch": "2.12"}, 0.0, "torch differs: 2.13 on rank 0; 2.12 on rank 1"),
        ({"shm": 2**20}, 0.0, "host b: 1 MiB free in /dev/shm"),
        ({"files": 256}, 0.0, "host b: at most 256 open files"),
        ({"interface": "lo"}, 0.0, "host b: 10.0.0.1 on lo"),
        ({"interface": "", "resolved": "127.0.1.1"}, 0.0, "host b: its own name resolves to 127.0.1.1"),
        ({}, 3.0, "host b: its clock differs by at least 3.0 s"),
        ({"device": "H200"}, 0.0, "device differs: cpu on rank 0; H200 on rank 1"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_fix(other: dict[str, Any], skew: float, text: str) -> None:
    wrong = [f for f in check.judge([facts("a"), facts("b", **other)], [0.0, skew], "gloo") if not f.ok]
    assert [finding.text for finding in wrong] == [text]
    assert wrong[0].fix


def test_a_profile_is_installed_with_ones_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_HOME", str(tmp_path))
    folder = profiles.install("big", {"nodes": 4, "partition": "gpu"}, source="slurm")
    assert profiles.locate("big") == folder and "big" in profiles.known()
    text = (folder / "ipcluster_config.py").read_text()
    assert "c.SlurmAgents.nodes = 4\n" in text and "c.SlurmAgents.partition = 'gpu'\n" in text
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "c.SlurmAgents.nodes = 4" in profiles.describe("big")
    profiles.install("big", {"nodes": 2}, source="slurm")  # again: it is replaced
    assert "\nc.SlurmAgents.nodes = 4" not in (folder / "ipcluster_config.py").read_text()
    with pytest.raises(ClusterError, match="letters, digits"):
        profiles.install("../x", {})
