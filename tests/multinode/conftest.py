"""Hosts and schedulers made on this machine, for root; what is missing is installed, or skips with its reason."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel import Kernel
from tests.multinode.lan import Lan
from tests.multinode.slurm import Slurm

PROFILES = Path(__file__).parents[2] / "profiles"
APT_S = 180
PACKAGES = {
    "sshd": "openssh-server",
    "ip": "iproute2",
    "slurmctld": "slurm-wlm",
    "munged": "munge",
    "mpiexec": "openmpi-bin",
    "setpriv": "util-linux",
}
# of the extra `test`; absent where one has installed less
MODULES = ("ray", "kubernetes", "kmock")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run only the sample unless everything was asked for."""
    if config.getoption("--multinode"):
        return
    here = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    extra = [item for item in here if item.get_closest_marker("sample") is None]
    config.hook.pytest_deselected(items=extra)
    items[:] = [item for item in items if item not in extra]


@functools.cache
def _missing(programs: tuple[str, ...]) -> str:
    """Install what is missing; say what cannot be had, or nothing."""
    modules = [name for name in programs if name in MODULES and importlib.util.find_spec(name) is None]
    if modules:
        return f"{', '.join(modules)} missing: pip install 'nbdist[test]'"
    programs = tuple(name for name in programs if name not in MODULES)
    if programs and os.geteuid() != 0:
        return "needs root: it makes network namespaces and daemons"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [program for program in programs if shutil.which(program, path=path) is None]
    if absent:
        packages = sorted({PACKAGES[program] for program in absent})
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "-qq", "--no-install-recommends"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            subprocess.run([*command, *packages], env=environment, capture_output=True, timeout=APT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return f"{', '.join(absent)} missing, and apt cannot install {', '.join(packages)}"
    return ""


@pytest.fixture(scope="session")
def need(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Skip a test whose programs or modules cannot be had; fail it with ``--require-multinode``."""

    def check(*programs: str) -> None:
        why = _missing(programs)
        if why and pytestconfig.getoption("--require-multinode"):
            pytest.fail(why)
        if why:
            pytest.skip(why)

    return check


@pytest.fixture(scope="session")
def lan(need: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    """A login host and three others that one can log in to."""
    need("ip", "sshd")
    with Lan(tmp_path_factory.mktemp("lan"), 3) as lan:
        yield lan


@pytest.fixture(scope="session")
def ssh_profile(lan: Lan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ssh profile, with the keys of the test's hosts in place of the user's own."""
    folder = tmp_path_factory.mktemp("profiles") / "ssh"
    shutil.copytree(PROFILES / "ssh", folder)
    with open(folder / "ipcluster_config.py", "a") as config:
        config.write(f'\nc.SSHAgents.ssh_args = ["-F", "{lan.folder}/ssh_config"]\n')
    return folder


@pytest.fixture
def login(lan: Lan, tmp_path: Path) -> Iterator[Kernel]:
    """A notebook's kernel on the login host."""
    with Kernel(within=lan.login, cwd=tmp_path) as kernel:
        kernel.check("%load_ext nbdist")
        yield kernel


@pytest.fixture(scope="session")
def slurm(need: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm of two nodes."""
    need("slurmctld", "munged")
    with Slurm(tmp_path_factory.mktemp("s"), 2) as slurm:
        yield slurm


@pytest.fixture
def slurm_login(slurm: Slurm, tmp_path: Path) -> Iterator[Kernel]:
    """A notebook's kernel where sbatch works."""
    with Kernel(env=slurm.env, cwd=tmp_path) as kernel:
        kernel.check("%load_ext nbdist")
        yield kernel
    slurm.wait_for_no_jobs()
