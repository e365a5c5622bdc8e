"""``rank0_first``: what is slow once, and quick for those who come after."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from math import inf

from nbdist.engine.world.meeting import meet
from nbdist.errors import WorldError

__all__ = ["rank0_first"]


@contextlib.contextmanager
def rank0_first() -> Iterator[None]:
    """Let rank 0 run a block while the other ranks wait for it, then let them run it too.

    For a download, a tokenized data set, an extension that is compiled: rank 0 makes it, the others find it made. They
    wait outside of the process group, for as long as it takes: a barrier would end at the group's timeout. Each rank
    calls it. Where hosts share no disk, ``local_cache`` lets one rank of each host go first.

    Raises
    ------
    WorldError
        On the other ranks, when the block failed on rank 0, or its process ended.

    Examples
    --------
    >>> with nbdist.rank0_first():
    ...     data = load_dataset("wikitext", "wikitext-2-raw-v1").map(tokenize)
    """
    meeting = meet("rank0_first()", {}, lambda brought: {})
    if meeting.rank != 0:
        end = meeting.hear("first", 0, limit=inf, waiting=_tell)
        if end["failed"]:
            raise WorldError(f"rank 0 failed in rank0_first(): {end['failed']}")
        yield
        return
    try:
        yield
    except BaseException as error:
        meeting.tell("first", failed=f"{type(error).__name__}: {error}")
        raise
    meeting.tell("first", failed="")


def _tell(seconds: float) -> None:
    sys.stderr.write(f"waits for rank 0 in rank0_first() ({seconds:.0f} s)\n")
