"""Two notebooks of one user on one machine."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.checks import group_is_whole, pids
from tests.kernel import Kernel
from tests.leaks import listening


def test_two_notebooks_have_clusters_of_their_own(tmp_path: Path) -> None:
    start = "%load_ext nbdist\n%cluster start -n 2 --backend gloo"
    with Kernel(cwd=tmp_path) as first, Kernel(cwd=tmp_path) as second:
        cells = [first.send(start), second.send(start)]
        for kernel, cell in zip((first, second), cells, strict=True):
            assert kernel.wait(cell, timeout=90).ok, cell
        assert not set(pids(first).values()) & set(pids(second).values())
        ports = [{port for process in kernel.processes() for port in listening(process)} for kernel in (first, second)]
        assert ports[0] and ports[1] and not ports[0] & ports[1]
        for tag, kernel in enumerate((first, second), 1):
            kernel.check(f"%%distributed\ntag = {tag}")
        for tag, kernel in enumerate((first, second), 1):
            assert kernel.check("%%distributed\ntag").text == f"[0-1] {tag}\n"
        first.check("%cluster stop", timeout=30)
        first.seconds_until_gone(3)
        group_is_whole(second)
        assert second.check("%%distributed\ntag").text == "[0-1] 2\n"
