"""Fixtures: one shared cluster of 2 gloo ranks, fresh clusters, real kernels; and the check that nothing is left."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kernel import Kernel
from tests.leaks import Baseline

if TYPE_CHECKING:
    import nbdist

RUN_TAG = "NBDIST_TEST_RUN"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what only some of the folders use, since pytest asks for options before it looks into folders."""
    group = parser.getgroup("nbdist")
    group.addoption("--multinode", action="store_true", help="all tests of several hosts, not just a sample")
    group.addoption("--require-multinode", action="store_true", help="fail where a scheduler or tool is missing")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a private home: nothing that a test starts reads or writes the developer's own folders."""
    root = Path(tempfile.mkdtemp(prefix="nbd"))  # short: socket paths end at 108 bytes
    config.add_cleanup(lambda: shutil.rmtree(root, ignore_errors=True))  # also when another plugin's end fails
    os.environ[RUN_TAG] = secrets.token_hex(8)
    for variable, folder in {
        "IPYTHONDIR": "ipython",
        "JUPYTERLAB_SETTINGS_DIR": "lab/settings",
        "JUPYTERLAB_WORKSPACES_DIR": "lab/workspaces",
        "JUPYTER_CONFIG_DIR": "jupyter/config",
        "JUPYTER_DATA_DIR": "jupyter/data",
        "JUPYTER_RUNTIME_DIR": "jupyter/runtime",
        "MPLCONFIGDIR": "matplotlib",
        "NBDIST_HOME": "home",
        "TMPDIR": "tmp",
    }.items():
        path = root / folder
        path.mkdir(parents=True, mode=0o700)
        os.environ[variable] = str(path)
    tempfile.tempdir = None  # ask TMPDIR again
    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
    # The kernel and the ranks warn about frozen modules under a debugger that none of the tests uses.
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail the run if it leaves a process, a listening port, a temporary folder or shared memory.

    Set up before every other session fixture, so it looks after all of them have been torn down.
    """
    baseline = Baseline(RUN_TAG, os.environ[RUN_TAG], Path(tempfile.gettempdir()))
    yield
    left = baseline.leaks()
    baseline.end_processes()
    assert not left, "this test run left behind:\n  " + "\n  ".join(left)


class SharedCluster:
    """One cluster of 2 gloo ranks for all tests that leave it whole; made when first asked for, and again after."""

    def __init__(self) -> None:
        self._cluster: nbdist.Cluster | None = None

    def get(self) -> nbdist.Cluster:
        import nbdist

        if self._cluster is None or not self._cluster.running:
            self._cluster = nbdist.Cluster(2, backend="gloo").start()
        return self._cluster

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None


@pytest.fixture(scope="session")
def _shared_cluster(nothing_is_left: None) -> Iterator[SharedCluster]:
    shared = SharedCluster()
    yield shared
    shared.stop()


@pytest.fixture
def cluster(_shared_cluster: SharedCluster) -> nbdist.Cluster:
    """A running cluster of 2 gloo ranks that all tests share: leave its ranks alive and its group whole."""
    return _shared_cluster.get()


@pytest.fixture
def no_cluster(_shared_cluster: SharedCluster) -> None:
    """No cluster runs in this process (a process has one at a time): for tests that start their own."""
    _shared_cluster.stop()


@pytest.fixture
def fresh_cluster(no_cluster: None) -> Iterator[nbdist.Cluster]:
    """A cluster of 2 gloo ranks for one test, which may do to it what it likes."""
    import nbdist

    with nbdist.Cluster(2, backend="gloo").start() as cluster:
        yield cluster


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A real IPython kernel, started in an empty folder."""
    with Kernel(cwd=tmp_path) as kernel:
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A real kernel with the extension loaded and 2 gloo ranks up: the start of most notebooks."""
    kernel.check("%load_ext nbdist\n%cluster start -n 2 --backend gloo", timeout=90)
    return kernel


@pytest.fixture(scope="session")
def shared_notebook(nothing_is_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """As ``notebook``, but shared by all tests: leave its ranks alive and its group whole."""
    with Kernel(cwd=tmp_path_factory.mktemp("notebook")) as kernel:
        kernel.check("%load_ext nbdist\n%cluster start -n 2 --backend gloo", timeout=90)
        yield kernel
