"""What several tests ask of a notebook."""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path
from typing import Any

from tests.kernel import Cell, Kernel

ALL_REDUCE = "%%distributed\nx_ = torch.ones(1); dist.all_reduce(x_); print(rank, x_.item())"


def group_is_whole(notebook: Kernel, size: int = 2, within: float = 10) -> None:
    """An all_reduce comes back right on every rank, soon and without another start of the kernel."""
    cell = notebook.run(ALL_REDUCE, timeout=within + 5)
    assert cell.ok, cell
    assert cell.text.splitlines() == [f"[{rank}] {rank} {float(size)}" for rank in range(size)]
    assert cell.seconds < within


def value(notebook: Kernel, expression: str) -> Any:
    """The value of an expression in the notebook's kernel; ``cluster`` in it is the active cluster."""
    code = f"print((lambda cluster: repr({expression}))(__import__('nbdist.cluster').cluster.active()))"
    return ast.literal_eval(notebook.check(code).text)


def pids(notebook: Kernel) -> dict[int, int]:
    pids: dict[int, int] = value(notebook, "cluster.pids")
    return pids


def fails(notebook: Kernel, code: str, *, within: float = 5) -> Cell:
    """Run a cell that has to fail soon."""
    cell = notebook.run(code, timeout=within + 25)
    assert cell.status == "error", cell
    assert cell.seconds < within, cell
    return cell


def folders(temporary: str | Path | None = None) -> list[Path]:
    """Private folders of clusters under a folder for temporary files."""
    return sorted(Path(temporary or tempfile.gettempdir()).glob("nbdist-*"))
