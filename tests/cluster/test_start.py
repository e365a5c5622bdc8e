"""From nothing to a verified group, and back to nothing."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from pathlib import Path

import psutil
import pytest

import nbdist
from nbdist import Cluster
from tests.cluster.checks import ALL_REDUCE, fails, folders, group_is_whole, pids, value
from tests.kernel import Kernel
from tests.leaks import shared_memory, tagged

CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


# -- a good start ----------------------------------------------------------------------------------------------------


def test_stages_are_told_while_a_cluster_starts(no_cluster: None) -> None:
    stages: list[str] = []
    with Cluster(2, backend="gloo").start(stages.append) as cluster:
        assert stages[0] == "starting the controller"
        engines = [stage for stage in stages if stage.startswith("engines")]
        assert engines[-1] == "engines: 2 of 2"
        assert stages[-2:] == ["forming the group of 2 ranks", "ready"]
        assert repr(cluster) == (
            f"<Cluster 2 engines on 1 host · world of 2 ranks · gloo · ready in {cluster.seconds_to_ready:.1f} s>"
        )
    assert repr(cluster) == "<Cluster of 2 ranks · not running>"


def test_the_stages_of_a_start_are_one_line_of_the_notebook(kernel: Kernel) -> None:
    cell = kernel.check("%load_ext nbdist\n%cluster start -n 2 --backend gloo", timeout=60)
    states = [
        message["content"]["data"]["text/plain"]
        for _, message in cell.messages
        if message["msg_type"] in ("display_data", "update_display_data")
    ]
    assert states[0].endswith("starting the controller")
    assert any("engines: 2 of 2" in text for text in states)
    lines = cell.text.splitlines()
    assert len(lines) <= 2
    assert lines[-1].startswith("<Cluster 2 engines on 1 host · world of 2 ranks · gloo · ready in ")
    assert not any(o["output_type"] == "stream" for o in cell.outputs)


def test_a_cluster_of_one_rank_uses_all_cores(no_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Cluster(1, backend="gloo").start() as cluster:
        assert [row.threads for row in cluster.status()] == [CORES]
        assert cluster.pull("world_size") == [1]
        cluster.run("x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 1.0")


def test_ranks_share_the_cores_and_the_users_own_setting_wins(
    no_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with Cluster(2, backend="gloo").start() as cluster:
        assert [row.threads for row in cluster.status()] == [max(1, CORES // 2)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", str(CORES))
    with Cluster(2, backend="gloo").start() as cluster:
        assert [row.threads for row in cluster.status()] == [CORES] * 2


def test_the_connection_is_encrypted_and_its_keys_are_private(cluster: Cluster) -> None:
    assert cluster.run_dir is not None
    assert stat.S_IMODE(cluster.run_dir.stat().st_mode) == 0o700
    files = sorted(cluster.run_dir.glob("security/ipcontroller*-client.json"))
    assert len(files) == 1
    assert json.loads(files[0].read_text())["curve_serverkey"]
    for path in cluster.run_dir.rglob("*"):
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o022, f"{path} can be written by others"
    for path in cluster.run_dir.glob("security/*.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_nothing_listens_beyond_this_machine(cluster: Cluster) -> None:
    processes = tagged("NBDIST_RUN_DIR", str(cluster.run_dir))
    assert set(cluster.pids.values()) < {process.pid for process in processes}
    for process in processes:
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), (process.cmdline(), connection)


def test_engines_are_no_forks_of_the_notebook(cluster: Cluster) -> None:
    for pid in cluster.pids.values():
        parent = psutil.Process(pid).parent()
        assert parent is not None
        assert parent.pid != os.getpid()
        assert "nbdist.engine.agent" in parent.cmdline()


def test_torch_is_imported_once_a_host_and_shared_by_its_engines(cluster: Cluster) -> None:
    for pid in cluster.pids.values():
        engine = psutil.Process(pid)
        agent = engine.parent()
        assert agent is not None
        assert "libtorch" in Path(f"/proc/{agent.pid}/maps").read_text()
        assert engine.memory_full_info().uss < 0.5 * agent.memory_info().rss


def test_a_notebook_that_has_used_torch_and_loader_workers_can_start_a_cluster(kernel: Kernel) -> None:
    kernel.check(
        "import torch\n"
        "torch.set_num_threads(2)\n"
        "torch.randn(2000, 2000) @ torch.randn(2000, 2000)\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(8, 1))\n"
        "list(torch.utils.data.DataLoader(data, num_workers=2))",
        timeout=60,
    )
    cell = kernel.check("%load_ext nbdist\n%cluster start -n 2 --backend gloo", timeout=90)
    assert "warning" not in cell.text.lower()
    step = kernel.check(
        "%%distributed\n"
        "model = nbdist.parallelize(nn.Linear(2, 1), 'ddp')\n"
        "model(torch.ones(4, 2)).sum().backward()\n"
        "model.module.weight.grad.tolist()",
        timeout=60,
    )
    assert step.text == "[0-1] [[4.0, 4.0]]\n"
    assert "warning" not in step.text.lower()


def test_a_busy_port_29500_is_no_obstacle(kernel: Kernel) -> None:
    kernel.check(
        "import socket\n"
        "taken = socket.socket(); taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "try: taken.bind(('127.0.0.1', 29500)); taken.listen()\n"
        "except OSError: pass  # somebody else has it"
    )
    kernel.check("%load_ext nbdist\n%cluster start -n 2 --backend gloo", timeout=90)
    group_is_whole(kernel)


def test_stale_variables_of_another_launcher_do_not_win(no_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with Cluster(2, backend="gloo").start() as cluster:
        assert cluster.pull("rank") == [0, 1]
        assert cluster.evaluate("__import__('os').environ['WORLD_SIZE']") == ["2", "2"]
        cluster.run("x_ = torch.ones(1); dist.all_reduce(x_); assert x_.item() == 2.0")


def test_the_notebooks_folder_is_the_ranks_folder_and_local_modules_can_be_imported(shared_notebook: Kernel) -> None:
    folder = Path(value(shared_notebook, "__import__('os').getcwd()"))
    (folder / "mymodel.py").write_text("V = 1\n")
    cell = shared_notebook.check("%%distributed\nimport mymodel, os; print(mymodel.V, os.getcwd())")
    assert cell.text == f"[0-1] 1 {folder}\n"
    (folder / "mymodel.py").write_text("V = 2  # edited\n")
    cell = shared_notebook.check("%%distributed\nimport importlib; importlib.reload(mymodel).V")
    assert cell.text == "[0-1] 2\n"


# -- twice -----------------------------------------------------------------------------------------------------------


def test_a_second_start_gives_the_running_cluster_and_says_so(shared_notebook: Kernel) -> None:
    before = pids(shared_notebook)
    cell = shared_notebook.check("%cluster start -n 2 --backend gloo")
    assert cell.seconds < 1
    assert "already running" in cell.text
    assert "<Cluster 2 engines on 1 host" in cell.text
    assert shared_notebook.check("%cluster start").ok
    assert pids(shared_notebook) == before


@pytest.mark.parametrize("arguments", ["-n 1", "-n 3", "--backend nccl"])
def test_a_second_start_with_other_arguments_is_refused(shared_notebook: Kernel, arguments: str) -> None:
    before = pids(shared_notebook)
    cell = fails(shared_notebook, f"%cluster start {arguments}", within=1)
    assert cell.error[0] == "ClusterError"
    assert "A cluster of 2 ranks" in cell.error[1]
    assert "%cluster stop" in cell.error[1]
    assert pids(shared_notebook) == before


def test_a_second_start_from_python_makes_no_second_set(cluster: Cluster) -> None:
    before = cluster.pids
    assert cluster.start() is cluster
    with pytest.raises(nbdist.ClusterError, match="running already"):
        Cluster(2, backend="gloo").start()
    assert cluster.pids == before


def test_stop_twice_is_no_error_and_start_works_again(kernel: Kernel) -> None:
    kernel.check("%load_ext nbdist\n%cluster start -n 2 --backend gloo", timeout=60)
    kernel.check("%cluster stop")
    kernel.seconds_until_gone(3)
    assert "No cluster is running" in kernel.check("%cluster stop").text
    assert "No cluster" in fails(kernel, "%%distributed\n1", within=2).error[1]
    kernel.check("%cluster start -n 2 --backend gloo", timeout=60)
    group_is_whole(kernel)


def test_start_and_stop_leave_nothing_behind(tmp_path: Path) -> None:
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as kernel:
        kernel.check("%load_ext nbdist\nimport os, threading")
        memory = shared_memory()

        def cycle() -> None:
            kernel.check("%cluster start -n 2 --backend gloo", timeout=60)
            assert kernel.check(ALL_REDUCE).text.splitlines() == ["[0] 0 2.0", "[1] 1 2.0"]
            kernel.check("%cluster stop", timeout=30)
            kernel.seconds_until_gone(3)

        def held() -> tuple[int, int]:
            files, threads = value(kernel, "(len(os.listdir('/proc/self/fd')), threading.active_count())")
            return files, threads

        cycle()  # the first one makes what ZeroMQ keeps for the life of the process
        before = held()
        for _ in range(9):  # what leaks once a cycle must exceed the slack
            cycle()
        after = held()
        assert after[0] - before[0] < 5
        assert after[1] - before[1] <= 1
        assert folders(tmp_path) == []
        assert shared_memory() - memory == set()
        started = [path.name for path in tmp_path.iterdir() if not path.name.startswith("ipykernel")]
        assert started == []


# -- a start that cannot succeed -------------------------------------------------------------------------------------


def test_an_interrupted_start_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path)}) as kernel:
        kernel.check("%load_ext nbdist")
        for delay in (0.2, 0.8, 1.6):
            cell = kernel.run("%cluster start -n 2 --backend gloo", timeout=40, actions=[(delay, kernel.interrupt)])
            if cell.ok:  # it was ready before
                kernel.check("%cluster stop")
            else:
                assert cell.error[0] == "KeyboardInterrupt", cell
                assert cell.seconds < delay + 5
            kernel.seconds_until_gone(3)
            assert folders(tmp_path) == []
        kernel.check("%cluster start -n 2 --backend gloo", timeout=60)
        group_is_whole(kernel)


def test_missing_torch_is_told_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    with Kernel(cwd=tmp_path, env={"TMPDIR": str(tmp_path), "PYTHONPATH": str(tmp_path / "hidden")}) as kernel:
        kernel.check("%load_ext nbdist")
        cell = fails(kernel, "%cluster start -n 2 --backend gloo", within=10)
        assert cell.error[0] == "ClusterError"
        assert re.search(r"\btorch\b", cell.error[1].splitlines()[0].replace(str(tmp_path), ""))
        assert "pip install torch" in cell.error[1]
        kernel.seconds_until_gone(3)
        assert folders(tmp_path) == []


def end_rank_1_at_its_start(folder: Path) -> dict[str, str]:
    """Give the environment in which the second engine exits with code 7."""
    # a sitecustomize cannot tell the engines apart: they are forks. This ends one when it becomes an engine.
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        "import os\n"
        "def end(): \n"
        "    if os.environ.get('LOCAL_RANK') == '1': os.write(2, b'no room for rank 1\\n'); os._exit(7)\n"
        "from ipyparallel.engine import app\n"
        "start = app.IPEngine.initialize\n"
        "def initialize(self, *args, **kwargs): end(); return start(self, *args, **kwargs)\n"
        "app.IPEngine.initialize = initialize\n"
    )
    return {"TMPDIR": str(folder), "PYTHONPATH": str(folder / "site")}


def test_an_engine_that_ends_while_it_starts_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    with Kernel(cwd=tmp_path, env=end_rank_1_at_its_start(tmp_path)) as kernel:
        kernel.check("%load_ext nbdist")
        cell = fails(kernel, "%cluster start -n 2 --backend gloo", within=20)
        assert cell.error[0] == "ClusterError"
        assert "of 2 engines registered; engine 1" in cell.error[1]
        assert "exited with code 7" in cell.error[1]
        assert "Go on with 1: %cluster start … --min 1." in cell.error[1]
        assert "no room for rank 1" in cell.error[1]
        kernel.seconds_until_gone(3)
        assert folders(tmp_path) == []


def test_a_start_goes_on_with_fewer_ranks_where_that_was_allowed(tmp_path: Path) -> None:
    with Kernel(cwd=tmp_path, env=end_rank_1_at_its_start(tmp_path)) as kernel:
        kernel.check("%load_ext nbdist")
        started = kernel.check("%cluster start -n 3 --min 2 --backend gloo --oversubscribe", timeout=60)
        assert re.search(r"engine 1 .*exited with code 7.* Going on with 2 of 3 ranks", started.text), started
        assert "world of 2 ranks" in started.text
        assert "[0-1] 2.0" in kernel.check("%%distributed\nx = torch.ones(1); dist.all_reduce(x); x.item()").text
        kernel.check("%cluster stop")


def test_no_free_port_is_told(tmp_path: Path) -> None:
    import subprocess

    program = (
        "import nbdist, time, sys\n"
        "began = time.monotonic()\n"
        "try: nbdist.Cluster(2, backend='gloo', timeout=20).start()\n"
        "except nbdist.ClusterError as error: print(f'{time.monotonic() - began:.1f}', error)\n"
    )
    # the range of ports belongs to a network namespace: one with a single port, and nobody else notices
    script = "ip link set lo up && echo '40000 40000' > /proc/sys/net/ipv4/ip_local_port_range && exec \"$@\""
    command = ["unshare", "-rn", "sh", "-c", script, "sh", sys.executable, "-c", program]
    if subprocess.run([*command[:4], "ip link set lo up"], capture_output=True).returncode:
        pytest.skip("this machine makes no network namespace (unshare -rn)")
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    seconds, _, message = ran.stdout.partition(" ")
    assert ran.returncode == 0, ran.stderr
    assert float(seconds) < 15
    assert "port" in message.splitlines()[0], message
    assert folders(tmp_path) == []


def test_a_read_only_home_is_no_obstacle(tmp_path: Path) -> None:
    # root may write where a folder's mode forbids it, but nobody may make folders in /proc
    gone = {name: "/proc/nowhere" for name in ("HOME", "NBDIST_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    with Kernel(cwd=tmp_path, env={**gone, "TMPDIR": str(tmp_path)}) as kernel:
        kernel.check("%load_ext nbdist")
        kernel.check("%cluster start -n 2 --backend gloo", timeout=60)
        group_is_whole(kernel)
        flood = kernel.check("%%distributed\nfor i in range(3000): print(i)")
        assert "2999" in flood.text
        kernel.check("%cluster stop")
        assert folders(tmp_path) == []


def test_more_ranks_than_cores_are_told_and_started(kernel: Kernel) -> None:
    n = CORES + 1
    cell = kernel.check(f"%load_ext nbdist\n%cluster start -n {n} --backend gloo", timeout=90)
    assert f"{n} ranks" in cell.text and f"{CORES} core" in cell.text
    group_is_whole(kernel, n)
    kernel.check("%cluster stop")


def test_start_is_quick(cluster: Cluster) -> None:
    # torch is imported once, not once a rank; generous, as other tests run at the same time
    assert cluster.seconds_to_ready < 20


def test_a_python_process_ends_its_cluster_when_it_ends(tmp_path: Path) -> None:
    import subprocess

    program = "import nbdist; c = nbdist.Cluster(2, backend='gloo').start(); print(*c.pids.values())"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    deadline = time.monotonic() + 3
    while any(psutil.pid_exists(int(pid)) for pid in ran.stdout.split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert folders(tmp_path) == []
