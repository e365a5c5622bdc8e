"""``local_cache``: data that lies on a slow shared disk, copied to this node's own disk by one of its ranks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["local_cache"]

SLICE = 0.05  # seconds between two looks at the lock


def local_cache(
    path: str | os.PathLike[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    fetch: Callable[[Path], object] | None = None,
    timeout: float = 3600.0,
) -> Path:
    """Give a copy of a file or folder on this node's own disk, made when it is not there or is out of date.

    One rank of each node copies, the others wait for it; no collective: ranks of other nodes and the process group are
    not touched. A copy appears under its name only when it is whole.

    Parameters
    ----------
    path : path
        File or folder. With ``fetch``, any text that names the data.
    folder : path, optional
        Where copies are kept; by default ``nbdist-cache-<user>`` in ``$NBDIST_CACHE``, ``$TMPDIR`` or ``/tmp``.
    fetch : callable, optional
        ``fetch(target)`` makes the file or folder ``target``, from a download for example.
    timeout : float
        Seconds to wait for the rank that copies.

    Returns
    -------
    pathlib.Path
        The local copy. To be read only: other runs of yours use it too.

    Raises
    ------
    FileNotFoundError
        There is no such path.
    OSError
        The local disk has too little space: the message has both numbers.
    TimeoutError
        The other rank was not done in time.

    Examples
    --------
    >>> data = nbdist.local_cache("/shared/imagenet")
    >>> dataset = ImageFolder(data / "train")
    """
    source = None if fetch is not None else Path(path).expanduser().absolute()
    if source is not None and not source.exists():
        raise FileNotFoundError(f"No {source} on this node to copy from.")
    state = str(path) if source is None else f"{source}\n{_state(source)}"
    kept = _kept(folder)
    name = Path(path).name or "data"
    target = kept / f"{hashlib.sha256(state.encode()).hexdigest()[:16]}-{name}"
    if target.exists():
        return target
    with _locked(target.with_name(f"{target.name}.lock"), timeout):
        # another rank may have made it while this one waited
        if not target.exists():
            partial = target.with_name(f"{target.name}.{os.getpid()}.part")
            _remove_left_over(target)
            try:
                if fetch is not None:
                    fetch(partial)
                else:
                    assert source is not None
                    _copy(source, partial)
                os.rename(partial, target)
            except BaseException:
                _remove(partial)
                raise
    return target


def _kept(folder: str | os.PathLike[str] | None) -> Path:
    if folder is None:
        base = os.environ.get("NBDIST_CACHE") or tempfile.gettempdir()
        folder = Path(base) / f"nbdist-cache-{os.getuid()}"
    kept = Path(folder).expanduser().absolute()
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    if kept.stat().st_uid != os.getuid():
        # in /tmp anyone can have made a folder of this name, and put his own data into it
        raise PermissionError(f"{kept} belongs to another user. Give local_cache() a folder of yours.")
    return kept


def _state(source: Path) -> str:
    """Describe what is to be copied, so that another version of it is another copy."""
    if source.is_file():
        stat = source.stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"
    digest = hashlib.sha256()
    for file in sorted(source.rglob("*")):
        stat = file.stat()
        digest.update(f"{file.relative_to(source)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    needed = source.stat().st_size if source.is_file() else sum(f.stat().st_size for f in source.rglob("*"))
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise OSError(
            f"{source} needs {needed / 1e9:.3g} GB, {target.parent} has {free / 1e9:.3g} GB free. "
            "Give local_cache() another folder=, or set NBDIST_CACHE."
        )
    if source.is_file():
        shutil.copy2(source, target)
    else:
        shutil.copytree(source, target)


@contextlib.contextmanager
def _locked(path: Path, timeout: float) -> Iterator[None]:
    """Hold the lock of a file: the system lets go of it when its holder ends, however that happens."""
    began = time.monotonic()
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - began > timeout:
                    raise TimeoutError(f"Another rank has been copying to {path.parent} for {timeout:g} s.") from None
                time.sleep(SLICE)
        yield


def _remove_left_over(target: Path) -> None:
    """Remove what copies that were cut off have left; whoever holds the lock is alone."""
    for partial in target.parent.glob(f"{target.name}.*.part"):
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
