"""Another user of the notebook's host, and of a rank's, tries every port and every file that a cluster has there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.kernel import Kernel
from tests.multinode.lan import Lan, sh

pytestmark = [pytest.mark.multinode, pytest.mark.timeout(240)]

STRANGER = "12002"
HERE = Path(__file__).parent
TRY_S = 150


def interpreter(lan: Lan, pytestconfig: pytest.Config, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Give a command that runs Python as the stranger, and its environment; skip where no Python is his to read."""
    script = folder / "stranger.py"
    shutil.copy(HERE / "stranger.py", script)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": sysconfig.get_path("platlib"), "HOME": "/nonexistent"}
    user = ["setpriv", "--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"]
    for python in ("/usr/bin/python3", shutil.which("python3") or ""):
        command = [*user, python, "-c", "import zmq, sys; print(open(sys.argv[1]).read(1))", str(script)]
        ran = subprocess.run(command, env=environment, capture_output=True, cwd="/", timeout=30, check=False)
        if ran.returncode == 0:
            return [*user, python, str(script)], environment
    why = "no Python here that another user may read, with a pyzmq for it"
    if pytestconfig.getoption("--require-multinode"):
        pytest.fail(why)
    pytest.skip(why)


def listening(lan: Lan, name: str) -> list[str]:
    """The addresses on which processes of a host listen, without its sshd's."""
    found = []
    for line in sh(*lan.on(name), "ss", "-ltnpH").splitlines():
        address, pid = line.split()[3], re.search(r"pid=(\d+)", line)
        if pid is not None and "sshd" not in psutil.Process(int(pid[1])).name():
            found.append(address)
    return sorted(set(found))


def test_a_stranger_gets_neither_output_nor_store_nor_code(
    lan: Lan,
    need: Callable[..., None],
    ssh_profile: Path,
    login: Kernel,
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need("setpriv")
    open_folder = Path("/tmp") / f"stranger-{os.getpid()}"
    open_folder.mkdir(mode=0o755)
    try:
        command, environment = interpreter(lan, pytestconfig, open_folder)
        login.check(f"%cluster start --timeout 90 --profile {ssh_profile} --hosts n1,n2", timeout=100)
        run_dirs = login.check("%%distributed\nimport os; print('AT', os.environ['NBDIST_RUN_DIR'])").text
        login.check("from nbdist.cluster import active; print('AT', active().run_dir)")
        folders = re.findall(r"AT (\S+)", run_dirs)
        folders += re.findall(r"AT (\S+)", login.check("print('AT', active().run_dir)").text)
        login.check("%%distributed --detach\nimport time\nfor i in range(10**6): print('SECRET', i); time.sleep(0.02)")
        rows = []
        for name in ("login", "n1"):
            ports = listening(lan, name)
            assert ports
            targets = {
                "ports": ports,
                "files": [
                    *folders,
                    *(f"{folder}/security" for folder in folders),
                    *(f"{folder}/log" for folder in folders),
                ],
                "pids": lan.ranks(name)[:2],
            }
            ran = subprocess.run(
                [*lan.on(name), *command, json.dumps(targets)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=TRY_S,
                cwd="/",
                check=True,
            )
            rows += [(name, *json.loads(line).values()) for line in ran.stdout.splitlines()]
        login.run("%cluster interrupt", timeout=30)
        assert (
            "[0-1] 3.0"
            in login.check("%%distributed\nx = torch.full((1,), rank + 1.0); dist.all_reduce(x)\nx.item()").text
        )
        login.check("%cluster stop")
    finally:
        shutil.rmtree(open_folder)
    table = "\n".join(f"{host:6} {target:40} {tried:50} {got}" for host, target, tried, got in rows)
    with capsys.disabled():
        print(f"\n{table}")
    assert not Path("/tmp/pwned").exists()
    for row in rows:
        harmless = ("nothing", "refused", "closed", "ZeroMQ's greeting", "0 bytes")
        assert row[-1].startswith(harmless), f"{row}\n{table}"
