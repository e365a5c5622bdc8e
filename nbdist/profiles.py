"""Where profiles and logs are on disk."""

from __future__ import annotations

import functools
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from nbdist.errors import ClusterError

__all__ = ["describe", "install", "installed", "known", "locate", "state_dir", "state_home"]


CONFIG = "ipcluster_config.py"


def locate(profile: str | os.PathLike[str] | None) -> Path:
    """Give the folder of a profile: a path, or the name of one that comes with nbdist.

    Raises
    ------
    ClusterError
        Naming the profiles that there are.
    """
    if profile is not None and os.path.isdir(profile):
        return Path(profile)
    name = str(profile or "local")
    for folder in (installed(), _packaged()):
        if name and "/" not in name and (folder / name / CONFIG).is_file():
            return folder / name
    raise ClusterError(f"No profile {name!r}. There are: {', '.join(sorted(known()))}; or give a folder.")


def known() -> dict[str, Path]:
    """Give the profiles that there are: the user's own, and those that come with nbdist."""
    found = {}
    for folder in (_packaged(), installed()):
        if folder.is_dir():
            found.update({path.name: path for path in folder.iterdir() if (path / CONFIG).is_file()})
    return found


def installed() -> Path:
    """Give the folder of the user's own profiles."""
    return state_home() / "profiles"


def install(name: str, settings: Mapping[str, Any], source: str = "") -> Path:
    """Copy a profile to the user's own, with settings of his; a later install replaces it.

    Parameters
    ----------
    name : str
        What it is called from then on.
    settings : dict
        Names and values as the launcher of the profile has them: ``{"nodes": 4, "partition": "gpu"}``.
    source : str
        The profile that is copied; the one called ``name`` by default.
    """
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ClusterError(f"A profile's name is letters, digits, - and _: not {name!r}.")
    origin = _packaged() / (source or name)
    if not (origin / CONFIG).is_file():
        origin = locate(source or name)
    target = installed() / name
    if target.resolve() != origin.resolve():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(origin, target)
    target.chmod(0o700)
    config = target / CONFIG
    text = config.read_text()
    launcher = re.search(r"engine_launcher_class = \"(?:nbdist\.launchers\.)?(\w+)\"", text)
    lines = [f"c.{launcher[1]}.{key} = {value!r}\n" for key, value in settings.items()] if launcher else []
    config.chmod(0o600)
    config.write_text(text + ("\n" + "".join(lines) if lines else ""))
    return target


def describe(name: str) -> str:
    """Give a profile's folder, its README and its configuration, without what is commented out."""
    folder = locate(name)
    readme = folder / "README.md"
    lines = [line for line in (folder / CONFIG).read_text().splitlines() if line.startswith("c.")]
    return "\n".join([str(folder), "", readme.read_text().strip() if readme.is_file() else "", "", *lines])


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
