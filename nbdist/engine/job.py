"""A cluster made of a job: ``torchrun … -m nbdist.engine``, or ``srun … python -m nbdist.engine --join``.

Each process of the job becomes one rank. Rank 0 starts the controller beside itself and writes the cluster's address
into the user's state folder, which all hosts of the job share; the others, and ``%cluster attach``, find it there. The
keys do not go through the job's own rendezvous: anybody on the network can read that.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from nbdist import host, profiles
from nbdist.channel import FILE, ExchangeAddress, local_address, reachable

__all__ = ["is_rank_of_torchrun", "join"]

WAIT_S = 120.0
POLL_S = 0.2

# rank, size and local rank, as each launcher names them
VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def is_rank_of_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(name: str, address: str) -> int:
    """Be one rank of the cluster that this job becomes; give the exit status."""
    from nbdist.engine import link

    found = next((names for names in VARIABLES if names[0] in os.environ), None)
    if found is None:
        print("No rank here. Run this under torchrun, srun or mpiexec.", file=sys.stderr)
        return 2
    rank, size, local_rank = (int(os.environ[variable]) for variable in found)
    name = name or job_name()
    entry = profiles.state_home() / "jobs" / f"{name}.json"
    first = {"prepare": 1, "folder": os.getcwd(), "environment": {}}
    os.environ["LOCAL_RANK"] = str(local_rank)
    me = link.Link(first, lifeline=False)
    controller = None
    if rank == 0:
        folder = make_folder()
        controller = start_controller(folder, address or own_address(), entry, name, size)
    order = await_entry(entry)
    if not order:
        print(f"The controller of rank 0 was not found in {entry} within {WAIT_S:g} s.", file=sys.stderr)
        me.end()
        return 1
    if controller is not None:
        me.at_end = functools.partial(dismiss_controller, controller, entry, name)
    try:
        label = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return link.serve(me, {**order, "node": rank, "label": label, "starts": {"id": rank, "local_rank": local_rank}})
    finally:
        if controller is not None:
            await_controller(controller, folder)


def job_name() -> str:
    """Name the job so that no other of this user has the same name at the same time."""
    parts = [os.environ.get(v, "") for v in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    if not any(parts):
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        parts = ["" if run_id == "none" else run_id, os.environ.get("MASTER_PORT", "")]
    return "job-" + "-".join(part for part in parts if part)


def own_address() -> str:
    """Give the address of this host that the job's other hosts know: what MASTER_ADDR stands for, if that is ours."""
    master = os.environ.get("MASTER_ADDR", "")
    try:
        mine = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
        return (
            socket.gethostbyname(master) if master and socket.gethostbyname(master) in mine else local_address(master)
        )
    except OSError:
        return "127.0.0.1"


def make_folder() -> Path:
    """Make the private folder of a controller."""
    folder = Path(tempfile.mkdtemp(prefix="nbdist-"))
    for part in ("log", "security"):
        (folder / part).mkdir(mode=0o700)
    return folder


def start_controller(folder: Path, address: str, entry: Path, name: str, size: int) -> subprocess.Popen[bytes]:
    """Start the controller on this host; write down for the others, and for a notebook, how to reach it."""
    source = profiles.locate("ssh")
    (folder / "ipcontroller_config.py").write_text((source / "ipcontroller_config.py").read_text())
    environment = {"NBDIST_RUN_DIR": str(folder), "NBDIST_EXCHANGE": address, "IPYTHONDIR": str(folder / "ipython")}
    command = [sys.executable, "-m", "nbdist.controller", f"--profile-dir={folder}", "--cluster-id=job"]
    command += [f"--ip={address}", f"--location={address}", "--log-to-file"]
    controller = host.spawn(command, environment, log=folder / "log" / "controller.out")
    connection = {part: folder / "security" / f"ipcontroller-job-{part}.json" for part in ("client", "engine")}
    wanted = [folder / FILE, *connection.values()]
    deadline = time.monotonic() + WAIT_S
    while not all(path.exists() for path in wanted) and controller.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    order: dict[str, Any] = {
        "exchange": ExchangeAddress.read(folder / FILE).as_dict(),
        "connection": _read(connection["engine"]),
        "world_size": size,
    }
    _write(entry, order)
    process = psutil.Process(controller.pid)
    kept = {
        "run_dir": str(folder),
        "controller": controller.pid,
        "controller_born": process.create_time(),
        "hostname": socket.gethostname(),
        "n": size,
        "backend": "auto",
        "collective_timeout": 1800.0,
        "logs": str(folder),
        "job": True,
        "profile": "ssh",
        "exchange": order["exchange"],
        "client": _read(connection["client"]),
    }
    _write(profiles.state_home() / "kept" / f"{name}.json", kept)
    return controller


def dismiss_controller(controller: subprocess.Popen[bytes], entry: Path, name: str) -> None:
    """Forget the cluster, and let its controller end with the job."""
    entry.unlink(missing_ok=True)
    (profiles.state_home() / "kept" / f"{name}.json").unlink(missing_ok=True)
    assert controller.stdin is not None
    controller.stdin.close()


def await_controller(controller: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for the controller's end, or bring it about; remove its folder."""
    try:
        controller.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(controller.pid, signal.SIGKILL)
        controller.wait()
    shutil.rmtree(folder, ignore_errors=True)


def await_entry(entry: Path) -> dict[str, Any]:
    """Wait until rank 0 has written down the cluster's address and somebody answers there; empty when that never comes.

    What an earlier job of the same name has left may still lie there: its controller does not answer.
    """
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            order: dict[str, Any] = json.loads(entry.read_text())
            exchange = order["exchange"]
        except (OSError, ValueError):
            time.sleep(POLL_S)
            continue
        if not reachable(exchange["host"], exchange["port"], POLL_S):
            return order
    return {}


def _read(path: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 5
    while True:
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            return content
        except ValueError:  # it is being written
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
    fresh.replace(path)
