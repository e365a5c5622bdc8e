"""Several hosts, from nothing to a verified group: by ssh against ipyparallel's launcher, by Slurm against ``srun``.

The hosts are those of the tests: network namespaces with an sshd each, and a Slurm of two nodes on this machine. What
other machines would add, a file system that they share and a network, both sides would pay alike. Needs root.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.benchmarks.start import TORCHRUN, seconds_until_ready
from tests.benchmarks.table import Table, interleave, spread
from tests.multinode.lan import LOGIN, Lan
from tests.multinode.slurm import Slurm, free_ports

PROFILES = Path(__file__).parents[2] / "profiles"
HOSTS = 3
NODES, RANKS_PER_NODE = 2, 2

NBDIST = """
import json, sys, time, nbdist
cluster = nbdist.Cluster(profile=sys.argv[1], backend="gloo", timeout=120, options=json.loads(sys.argv[2])).start()
print("group verified", flush=True)
began = time.perf_counter()
cluster.stop()
print(time.perf_counter() - began, flush=True)
"""

# ipyparallel's ssh launcher, one engine a host, then what a user would do by hand
STOCK = """
import sys, tempfile, time
import ipyparallel as ipp
from traitlets.config import Config

def form(rank, n, address):
    import os
    os.environ["GLOO_SOCKET_IFNAME"] = "e0"
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29777", rank=rank, world_size=n)
    x = torch.full((1,), rank + 1.0)
    dist.all_reduce(x)
    return x.item()

login, ssh_config, remote, first, *hosts = sys.argv[1:]
config = Config()
config.SSHEngineSetLauncher.engines = dict.fromkeys(hosts, 1)
config.SSHEngineSetLauncher.delay = 0.0
config.SSHLauncher.ssh_args = config.SSHLauncher.scp_args = ["-F", ssh_config]
config.SSHLauncher.remote_python = sys.executable
config.SSHEngineLauncher.to_send = []  # the connection goes through ssh in the environment
config.SSHEngineLauncher.remote_profile_dir = tempfile.mkdtemp(dir=remote)  # nothing of an earlier launch
cluster = ipp.Cluster(
    n=len(hosts), engines="ssh", controller_ip=login, controller_location=login, config=config, log_level=40
)
cluster.send_engines_connection_env = True
client = cluster.start_and_connect_sync(activate=False)
futures = [client[e].apply_async(form, rank, len(hosts), first) for rank, e in enumerate(client.ids)]
assert {f.get(timeout=60) for f in futures} == {len(hosts) * (len(hosts) + 1) / 2}
print("group verified", flush=True)
began = time.perf_counter()
client.close()
cluster.stop_cluster_sync()
print(time.perf_counter() - began, flush=True)
"""


def run(repeats: int = 3) -> Table:
    table = Table(
        "hosts: nothing → verified group, and its end (median, range)",
        ["hosts", "nbdist", "against", "ratio", "nbdist's stop", "the other's stop"],
    )
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [program for program in ("ip", "sshd", "slurmctld", "munged") if shutil.which(program, path=path) is None]
    if os.geteuid() != 0 or absent:
        table.notes.append(f"not measured: needs {' and '.join(['root', *absent])}")
        return table
    with tempfile.TemporaryDirectory(prefix="b") as folder:  # short: Slurm's socket paths end at 108 bytes
        home = Path(folder)
        for name, source in (("nbdist", NBDIST), ("stock", STOCK), ("srun", TORCHRUN)):
            (home / f"{name}_hosts.py").write_text(source)
        _ssh(table, home, repeats)
        _slurm(table, home, repeats)
    table.notes.append(f"{repeats} launches of each, interleaved; interpreter start and imports included on all sides")
    return table


def _ssh(table: Table, home: Path, repeats: int) -> None:
    with Lan(home / "lan", HOSTS) as lan:
        config = lan.folder / "ssh_config"
        profile = home / "ssh"
        shutil.copytree(PROFILES / "ssh", profile)
        with open(profile / "ipcluster_config.py", "a") as file:
            file.write(f'\nc.SSHAgents.ssh_args = ["-F", "{config}"]\n')
        options = f'{{"hosts": "{",".join(lan.names)}"}}'
        (home / "remote").mkdir()
        ours = _Side([*lan.login, sys.executable, str(home / "nbdist_hosts.py"), str(profile), options], home)
        others = [LOGIN, str(config), str(home / "remote"), lan.address(lan.names[0]), *lan.names]
        stock = _Side([*lan.login, sys.executable, str(home / "stock_hosts.py"), *others], home)
        values = interleave({"nbdist": ours, "stock": stock}, repeats)
    ratio = median(values["nbdist"]) / median(values["stock"])
    table.add(
        f"{HOSTS} by ssh, a rank each",
        spread(values["nbdist"], "s"),
        f"ipyparallel's ssh launcher: {spread(values['stock'], 's')}",
        table.verdict(ratio, at_most=0.4),
        table.verdict(median(ours.stops), " s", at_most=3),
        spread(stock.stops, "s"),
    )


def _slurm(table: Table, home: Path, repeats: int) -> None:
    with Slurm(home / "s", NODES) as slurm:
        options = f'{{"nodes": {NODES}, "ranks_per_node": {RANKS_PER_NODE}}}'
        # two interpreters fork four ranks on one side, four are started on the other: the job's, not the measurement's
        ours = _Side([sys.executable, str(home / "nbdist_hosts.py"), "slurm", options], home, slurm.env)

        def srun() -> float:
            slurm.wait_for_no_jobs()
            (port,) = free_ports(1)
            where = f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port} WORLD_SIZE={NODES * RANKS_PER_NODE}"
            script = f"export {where} RANK=$SLURM_PROCID; exec {sys.executable} {home}/srun_hosts.py"
            step = ["srun", f"-N{NODES}", f"--ntasks-per-node={RANKS_PER_NODE}", "-t5", "--input=none"]
            return seconds_until_ready(["env", *_settings(slurm.env), *step, "bash", "-c", script], home)

        def nbdist() -> float:
            slurm.wait_for_no_jobs()
            return ours()

        values = interleave({"nbdist": nbdist, "srun": srun}, repeats)
        slurm.wait_for_no_jobs()
    table.add(
        f"{NODES} nodes of Slurm, {RANKS_PER_NODE} ranks each",
        spread(values["nbdist"], "s"),
        f"srun of a script that forms the group: {spread(values['srun'], 's')}",
        table.verdict(median(values["nbdist"]) / median(values["srun"]), at_most=1.3),
        table.verdict(median(ours.stops), " s", at_most=3),
        "—",
    )


class _Side:
    """A command to launch: seconds until its group is verified; how long its end took is kept in ``stops``."""

    def __init__(self, command: Sequence[str], home: Path, env: dict[str, str] | None = None) -> None:
        self.command, self.stops = list(command), list[float]()
        self.home, self.env = home, env or {}

    def __call__(self) -> float:
        command = ["env", *_settings(self.env), *self.command]
        return seconds_until_ready(command, self.home, self._ended)

    def _ended(self, rest: str) -> None:
        self.stops.append(float(rest.split()[-1]))


def _settings(env: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in env.items()]
