"""Where profiles and logs are on disk."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import platformdirs

from nbdist.errors import ClusterError

__all__ = ["locate", "state_dir", "state_home"]


def locate(profile: str | os.PathLike[str] | None) -> Path:
    """Give the folder of a profile: a path, or the name of one that comes with nbdist.

    Raises
    ------
    ClusterError
        Naming the profiles that there are.
    """
    if profile is not None and os.path.isdir(profile):
        return Path(profile)
    folder = _packaged()
    chosen = folder / (profile or "local")
    if not (chosen / "ipcluster_config.py").is_file():
        known = ", ".join(sorted(p.name for p in folder.iterdir() if (p / "ipcluster_config.py").is_file()))
        raise ClusterError(f"No profile {str(profile)!r}. There are: {known}; or give a folder.")
    return chosen


@functools.cache
def _packaged() -> Path:
    here = Path(__file__).parent
    # in a wheel the profiles lie inside the package, in a checkout beside it
    return here / "profiles" if (here / "profiles").is_dir() else here.parent / "profiles"


def state_home() -> Path:
    """Give the folder for what outlives a session: ``$NBDIST_HOME``, or the user's state folder."""
    return Path(os.environ.get("NBDIST_HOME") or platformdirs.user_state_dir("nbdist", appauthor=False))


@functools.cache
def state_dir(fallback: Path) -> Path:
    """Make and give this session's folder for logs, under the state home.

    Where neither can be written the logs go to ``fallback`` and end with the cluster.
    """
    session = state_home() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{fallback.name.removeprefix('nbdist-')}"
    try:
        session.mkdir(parents=True, mode=0o700)
    except OSError:
        return fallback
    return session
