"""MPI, torchrun, and what Kubernetes would be given."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.launchers.kubernetes_manifest import manifest
from tests.kernel import Kernel
from tests.multinode.lan import LOGIN, Lan
from tests.multinode.slurm import free_ports

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(240)]

WHOLE = "%%distributed\nx = torch.full((1,), rank + 1.0)\ndist.all_reduce(x)\nx.item()"


def test_mpiexec_starts_one_agent_per_host(need: Callable[..., None], lan: Lan, tmp_path: Path) -> None:
    need("mpiexec")
    env = {
        "OMPI_MCA_plm_rsh_args": f"-F {lan.folder}/ssh_config",
        "OMPI_MCA_oob_tcp_if_include": f"{LOGIN}/24",
    }
    with Kernel(within=lan.login, env=env, cwd=tmp_path) as kernel:
        kernel.check("%load_ext nbdist")
        line = f"%cluster start --profile mpi --hosts n1:1,n2:2 --address {LOGIN} --timeout 90"
        assert "3 engines on 2 hosts" in kernel.check(line, timeout=100).text
        assert "[0-2] 6.0" in kernel.check(WHOLE).text
        died = kernel.run(
            "%%distributed\nimport os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
        )
        assert "was killed by signal 9" in died.text
        kernel.check("%cluster repair", timeout=60)
        assert "[0-2] 6.0" in kernel.check(WHOLE).text
        kernel.check("%cluster stop")
    assert not any(lan.ranks(name) for name in lan.names)


def test_mpiexec_starts_ranks_on_this_host_too(need: Callable[..., None], kernel: Kernel) -> None:
    need("mpiexec")
    kernel.check("%load_ext nbdist")
    kernel.check("%cluster start --profile mpi -n 2 --timeout 90", timeout=100)
    assert "[0-1] 3.0" in kernel.check(WHOLE).text
    kernel.check("%cluster stop")


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A job of two ranks that torchrun has started, and its name."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    with open(tmp_path / "torchrun.log", "wb") as log:
        process = subprocess.Popen([*command, "-m", "nbdist.engine"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process, f"job-{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(40)


def test_a_notebook_visits_a_job_of_torchrun(torchrun: tuple[subprocess.Popen[bytes], str], kernel: Kernel) -> None:
    process, name = torchrun
    entry = Path(os.environ["NBDIST_HOME"]) / "kept" / f"{name}.json"
    deadline = time.monotonic() + 60
    while not entry.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    assert entry.stat().st_mode & 0o777 == 0o600
    kernel.check("%load_ext nbdist")
    assert "world of 2 ranks" in kernel.check(f"%cluster attach {name}", timeout=60).text
    assert "[0-1] 3.0" in kernel.check(WHOLE).text
    kernel.check("%%distributed\nmine = 7")
    kernel.check("%cluster stop")  # a job that somebody else has started is left alone
    assert process.poll() is None
    kernel.check(f"%cluster attach {name}", timeout=60)
    assert "[0-1] 7" in kernel.check("%%distributed\nmine").text
    failed = kernel.run("%%distributed\nif rank == 0: 1 / 0\ndist.barrier()")
    assert "rank 1: released from barrier" in failed.text
    assert "[0-1] 3.0" in kernel.check(WHOLE).text
    kernel.check("%cluster stop --all")
    process.wait(20)


SETTING: dict[str, Any] = {
    "image": "registry.example/nbdist:1",
    "nodes": 2,
    "gpus_per_node": 8,
    "cpus_per_rank": 4,
    "memory_per_rank": "32Gi",
    "shared_memory": "16Gi",
    "namespace": "research",
    "python": "python",
    "notebook_labels": {"app": "jupyter"},
}


def test_what_kubernetes_is_given_follows_its_schema() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    items = manifest("nbdist-x", SETTING, ranks=8, orders="{}\n{}\n")["items"]
    assert [item["kind"] for item in items] == ["Secret", "NetworkPolicy", "Job"]
    for item in items:
        validator.validate(item, "1.30", strict=True)
    broken = json.loads(json.dumps(items[-1]))
    broken["spec"]["completionsMode"] = broken["spec"].pop("completionMode")
    with pytest.raises(Exception, match="completionsMode"):
        validator.validate(broken, "1.30", strict=True)


def test_keys_are_in_the_secret_of_a_pod_and_nowhere_else() -> None:
    secret, *others = manifest("nbdist-x", SETTING, ranks=8, orders="THE KEY")["items"]
    assert secret["stringData"]["orders"] == "THE KEY"
    assert "THE KEY" not in json.dumps(others)
    limits = others[-1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8"}
