"""Kernels for tests of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel import Kernel


@pytest.fixture(scope="session")
def idle_kernel(nothing_is_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A real kernel with the extension loaded and no cluster, shared by all tests that start none."""
    with Kernel(cwd=tmp_path_factory.mktemp("idle")) as kernel:
        kernel.check("%load_ext nbdist")
        yield kernel
