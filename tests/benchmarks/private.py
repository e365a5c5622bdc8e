"""An environment in which a measured program leaves the user's own folders alone."""

from __future__ import annotations

from pathlib import Path


def private(home: Path) -> dict[str, str]:
    """Give variables that put everything that ipyparallel, torchrun and nbdist write under ``home``."""
    (home / "tmp").mkdir(exist_ok=True)
    return {"IPYTHONDIR": str(home / "ipython"), "NBDIST_HOME": str(home / "nbdist"), "TMPDIR": str(home / "tmp")}
