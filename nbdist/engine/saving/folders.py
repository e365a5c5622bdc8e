"""Folders of checkpoints: written under another name, made valid by one rename, found again newest first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "FORMAT",
    "META",
    "Damaged",
    "TooNew",
    "chosen",
    "clear_leftovers",
    "meta_of",
    "next_serial",
    "next_step",
    "publish",
    "write_file",
]

FORMAT = 1
META = "meta.json"
LATEST = "latest"
FINISHED = re.compile(r"step-(\d+)(\.old)?")


class Damaged(ValueError):
    """A checkpoint that is not whole."""


class TooNew(Damaged):
    """A checkpoint that a newer version has written."""


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that it is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, folder: Path, keep: int | None) -> None:
    """Make a finished folder valid under its name, then point ``latest`` to it and drop the oldest beyond ``keep``."""
    _sync(temporary)
    replaced = folder.with_name(f"{folder.name}.old")
    if folder.exists():
        # a folder cannot be replaced in one move; in between the old one counts under this name
        _remove(replaced)
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    _sync(folder.parent)
    pointer = folder.with_name(f"{LATEST}.tmp")
    write_file(pointer, f"{folder.name}\n".encode())
    os.replace(pointer, folder.with_name(LATEST))
    _remove(replaced)
    if keep is not None:
        for old in [path for path, _ in _finished(folder.parent)][keep:]:
            _remove(old)


def clear_leftovers(parent: Path) -> None:
    """Remove what saves that were cut off have left. One writer a folder: nobody else is saving there now."""
    for path in parent.glob("step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def next_serial(parent: Path) -> int:
    """Number the checkpoints of a folder in the order they were made; steps may begin anew."""
    return 1 + max((meta.get("serial", 0) for _, meta in _finished(parent)), default=0)


def next_step(parent: Path) -> int:
    """Give a step number that is not taken, for state that has none."""
    taken = [int(match[1]) for path in _paths(parent) if (match := FINISHED.fullmatch(path.name))]
    return 1 + max(taken, default=-1)


def chosen(path: Path) -> tuple[Path, list[str]]:
    """Find the checkpoint that is meant by a path: itself, or the newest whole one in it.

    Returns
    -------
    tuple
        The folder, and one line for each newer one that is not whole.

    Raises
    ------
    FileNotFoundError
        There is none.
    Damaged
        The one that is meant is not whole.
    """
    if (path / META).exists():
        check_whole(path, meta_of(path))
        return path, []
    skipped: list[str] = []
    for folder in _newest_first(path):
        try:
            check_whole(folder, meta_of(folder))
        except TooNew:
            raise
        except Damaged as error:
            skipped.append(str(error))
            continue
        return folder, skipped
    why = f" {' '.join(skipped)}" if skipped else ""
    raise FileNotFoundError(f"No complete checkpoint in {path}.{why}")


def meta_of(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's description.

    Raises
    ------
    Damaged
        When it is missing or cut off.
    TooNew
        When a newer version has written it.
    """
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_bytes())
        version = meta["format"]
    except FileNotFoundError:
        raise Damaged(f"{folder} is not whole: {META} is missing.") from None
    except (ValueError, KeyError, TypeError):
        raise Damaged(f"{folder} is not whole: {META} cannot be read.") from None
    if version > FORMAT:
        raise TooNew(
            f"{folder} was written by nbdist {meta.get('nbdist')} in format {version}, this version reads format "
            f"{FORMAT}. Upgrade nbdist."
        )
    return meta


def check_whole(folder: Path, meta: Mapping[str, Any]) -> None:
    """Compare the files with what was written.

    Raises
    ------
    Damaged
        With the first file that is missing or has another size.
    """
    for name, size in meta["files"].items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{folder} is not whole: {name} is missing.") from None
        if found != size:
            raise Damaged(f"{folder} is not whole: {name} has {found} bytes instead of {size}.")


def _newest_first(parent: Path) -> Iterator[Path]:
    known = [path for path, _ in _finished(parent)]
    # those that cannot be read have no place in the order; first, so that they are told
    yield from sorted(p for p in _paths(parent) if p not in known and FINISHED.fullmatch(p.name))
    yield from known


def _finished(parent: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Give the checkpoints of a folder, the newest first."""
    found = []
    for path in _paths(parent):
        if FINISHED.fullmatch(path.name):
            with contextlib.suppress(Damaged):
                found.append((path, meta_of(path)))
    return sorted(found, key=lambda entry: entry[1].get("serial", 0), reverse=True)


def _paths(parent: Path) -> list[Path]:
    try:
        return list(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove(folder: Path) -> None:
    """Remove a checkpoint; in one move it is none any more, however far the removal of its files comes."""
    gone = folder.with_name(f"{folder.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
