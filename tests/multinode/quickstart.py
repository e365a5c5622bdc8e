"""The quickstart notebook as it is, but for where it starts its cluster."""

from __future__ import annotations

from pathlib import Path

import nbformat

from tests.kernel import Kernel

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "00_quickstart.ipynb"
START = "%cluster start -n 2"
CELL_S = 100


def run_quickstart(kernel: Kernel, options: str) -> None:
    """Run every cell; one that fails without being meant to fails the test."""
    sources = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert sum(START in cell.source for cell in sources) == 1 and len(sources) > 5
    for cell in sources:
        done = kernel.run(cell.source.replace(START, f"%cluster start {options}"), timeout=CELL_S)
        assert done.ok or "raises-exception" in cell.metadata.get("tags", ()), done
