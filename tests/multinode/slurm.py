"""A real Slurm on this machine: munged, slurmctld and a slurmd per node, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.multinode.lan import CLEAN, sh

SECONDS = 20

CONFIG = """\
ClusterName=nbdist
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0,bf_continue
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
KillWait=5
MinJobAge=60
"""


class Slurm:
    """A partition ``cpu`` of ``n`` nodes with 8 cores each; a context manager that leaves nothing.

    ``env`` is what a user of it needs in his environment.
    """

    def __init__(self, folder: Path, n: int) -> None:
        self.folder = folder
        self.names = [f"n{i}" for i in range(1, n + 1)]
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._down()

    def jobs(self) -> list[str]:
        """The jobs in the queue, with their state."""
        listed = sh("squeue", "-h", "-o", "%i %T", env={**os.environ, **self.env})
        return [line for line in listed.splitlines() if "COMPLETING" not in line]

    def wait_for_no_jobs(self) -> None:
        deadline = time.monotonic() + SECONDS
        while self.jobs():
            assert time.monotonic() < deadline, self.jobs()
            time.sleep(0.1)

    def _up(self) -> None:
        folder = self.folder
        for name in ("state", "log", "munge", *(f"spool/{n}" for n in self.names)):
            (folder / name).mkdir(parents=True)
        key = folder / "munge/munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = free_ports(1 + len(self.names))
        host = socket.gethostname().split(".")[0]
        lines = [CONFIG.format(folder=folder, host=f"{host}(127.0.0.1)", port=ports[0])]
        for name, port in zip(self.names, ports[1:], strict=True):
            lines.append(
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Boards=1 SocketsPerBoard=1 "
                "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN\n"
            )
        lines.append("PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        (folder / "slurm.conf").write_text("".join(lines))
        munge = [
            f"--{name}={folder}/munge/{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *munge)
        deadline = time.monotonic() + SECONDS
        while not (folder / "munge/socket").exists():
            assert time.monotonic() < deadline, "munged does not come up"
            time.sleep(0.02)
        self._start("slurmctld", "-D", "-i", "-f", f"{folder}/slurm.conf")
        for name in self.names:
            self._start("slurmd", "-D", "-f", f"{folder}/slurm.conf", "-N", name)
        while sh("sinfo", "-h", "-t", "idle", "-o", "%D", env={**os.environ, **self.env}, check=False).strip() != str(
            len(self.names)
        ):
            assert time.monotonic() < deadline, (folder / "log/slurmctld.log").read_text()[-2000:]
            time.sleep(0.1)

    def _start(self, *command: str) -> None:
        log = open(self.folder / "log" / f"{command[0]}-{len(self._daemons)}.out", "wb")  # noqa: SIM115  # the daemon's
        with log:
            self._daemons.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**CLEAN, **self.env})
            )

    def _down(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            sh("scancel", "-u", "root", env={**os.environ, **self.env}, check=False)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def free_ports(n: int) -> list[int]:
    probes = [socket.socket() for _ in range(n)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
