"""One rank's part of writing a checkpoint, by a thread beside training, and the handle that tells how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from nbdist.engine.saving import folders, shards
from nbdist.engine.world.meeting import Meeting

__all__ = ["SavedCheckpoint", "line_of", "wait_for", "write"]

log = logging.getLogger(__name__)

WRITE_LIMIT = 1800.0  # seconds that a rank may write


class SavedCheckpoint:
    """A checkpoint that is being written, or was: what ``save_checkpoint`` gives."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.future: Future[Path] = Future()
        self._asked = False

    def result(self, timeout: float | None = None) -> Path:
        """Wait until every rank has written and the folder has its name; give the folder.

        Raises
        ------
        TimeoutError
            After ``timeout`` seconds; writing goes on.
        OSError
            On all ranks, when one of them could not write; the checkpoint before is still whole.
        """
        from concurrent.futures import TimeoutError as FutureTimeout

        try:
            path = self.future.result(timeout)
        except FutureTimeout:
            if self.future.done():
                self._asked = True
                raise
            raise TimeoutError(f"{self.path.name} is still being written after {timeout:g} s.") from None
        except BaseException:
            self._asked = True
            raise
        return path

    def done(self) -> bool:
        """Tell whether writing has ended, one way or the other."""
        return self.future.done()

    def __repr__(self) -> str:
        state = "being written"
        if self.future.done():
            state = "failed" if self.future.exception() else "written"
        return f"<SavedCheckpoint {self.path.name}, {state}>"


def wait_for(saved: SavedCheckpoint) -> None:
    """Wait for the save before; a failure that nobody has asked for is told now."""
    if saved.future.done() and saved._asked:
        return
    failure = saved.future.exception()
    if failure is not None and not saved._asked:
        saved._asked = True
        warnings.warn(str(failure), stacklevel=3)


# A loader's workers are forked. A lock that this thread holds within torch at that moment would stay locked in them.
_not_while_forking = threading.Lock()
os.register_at_fork(
    before=_not_while_forking.acquire,
    after_in_parent=_not_while_forking.release,
    after_in_child=_not_while_forking.release,
)


def write(
    saved: SavedCheckpoint,
    meeting: Meeting,
    parts: Mapping[str, torch.Tensor],
    plan: shards.Plan,
    own: dict[str, Any],
    meta: dict[str, Any],
    keep: int | None,
) -> None:
    """Write this rank's files and see all the others' through; in a thread, without a collective."""
    temporary = saved.path.with_name(f"{saved.path.name}.tmp")
    try:
        failure: BaseException | None = None
        try:
            with _not_while_forking:
                _write_own(temporary, meeting.rank, parts, plan, own)
        except BaseException as error:
            failure = error
        meeting.tell(f"wrote-{meeting.rank}", failure=line_of(failure))
        if meeting.rank == 0:
            _complete(saved.path, temporary, meeting, failure, plan, meta, keep)
        else:
            end = meeting.hear("finished", 0, limit=2 * WRITE_LIMIT)
            if end["failure"]:
                raise OSError(end["failure"])
        saved.future.set_result(saved.path)
    except BaseException as error:
        log.error("%s was not written: %s", saved.path, error)
        saved.future.set_exception(error)


def _write_own(
    temporary: Path, rank: int, parts: Mapping[str, torch.Tensor], plan: shards.Plan, own: dict[str, Any]
) -> None:
    if not temporary.is_dir():
        raise OSError(f"{temporary.parent} is not the same folder on all ranks: give one on a shared file system")
    results = shards.write(temporary, parts, plan, rank)
    folders.write_file(temporary / f"rank-{rank}.json", shards.dumps(own))
    folders.write_file(temporary / f"results-{rank}", shards.dumps(results))


def _complete(
    folder: Path,
    temporary: Path,
    meeting: Meeting,
    failure: BaseException | None,
    plan: shards.Plan,
    meta: dict[str, Any],
    keep: int | None,
) -> None:
    """Wait for all ranks' files, describe them and publish the folder; rank 0."""
    try:
        failures = [] if failure is None else [f"rank 0: {line_of(failure)}"]
        for rank in range(1, meeting.world_size):
            end = meeting.hear(f"wrote-{rank}", rank, limit=WRITE_LIMIT)
            if end["failure"]:
                failures.append(f"rank {rank}: {end['failure']}")
        if failures:
            raise OSError("; ".join(failures))
        results = []
        for rank in range(meeting.world_size):
            path = temporary / f"results-{rank}"
            results.append(json.loads(path.read_bytes()))
            path.unlink()
        shards.finish(temporary, plan, results)
        files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        folders.write_file(temporary / folders.META, shards.dumps({**meta, "files": files}))
        folders.publish(temporary, folder, keep)
    except BaseException as error:
        text = f"{folder.name} was not written ({error}). The checkpoint before it is still whole."
        meeting.tell("finished", failure=text)
        _discard(temporary)
        raise OSError(text) from error
    meeting.tell("finished", failure="")


def line_of(error: BaseException | None) -> str:
    """Give an error in one line, "" for none."""
    return "" if error is None else f"{type(error).__name__}: {error}"


def _discard(temporary: Path) -> None:
    import shutil

    with contextlib.suppress(OSError):
        shutil.rmtree(temporary)
