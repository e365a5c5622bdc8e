"""The exceptions of nbdist.

::

    NbdistError
    ├── ClusterError            engines: start, stop, a host, a dead rank
    ├── WorldError              the process group: forming, verifying
    │   ├── CollectiveTimeout   a collective that some ranks never joined
    │   └── CollectiveMismatch  ranks called different collectives, shapes or dtypes
    └── DistributedError        a cell failed on one or more ranks
"""

from __future__ import annotations

from collections.abc import Sequence

from nbdist.records import RankError

__all__ = [
    "ClusterError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "DistributedError",
    "NbdistError",
    "WorldError",
]


class NbdistError(Exception):
    """Any error that nbdist raises of its own."""

    def _render_traceback_(self) -> list[str]:
        """One line in the notebook: what happened and the next call, without frames of nbdist."""
        return [f"\x1b[31m{type(self).__name__}\x1b[0m: {self}"]


class ClusterError(NbdistError):
    """The engines could not be started, reached or stopped."""


class WorldError(NbdistError):
    """The ranks could not form or keep a process group."""


class CollectiveTimeout(WorldError):
    """Some ranks waited in a collective for ranks that did not come."""


class CollectiveMismatch(WorldError):
    """Ranks called different collectives, or the same one with different shapes or dtypes."""


class DistributedError(NbdistError):
    """A cell failed on one or more ranks; the root cause comes first.

    Attributes
    ----------
    rank : int
        The rank that failed first.
    errors : tuple of RankError
        One per rank that did not end well, the root cause first.
    """

    def __init__(self, errors: Sequence[RankError]) -> None:
        self.errors = tuple(sorted(errors, key=lambda e: (e.released is not None, e.time)))
        root = self.errors[0]
        self.rank = root.rank
        text = f"{root.ename}: {root.evalue}" if root.evalue else root.ename
        super().__init__(f"rank {root.rank}: {text}")

    def _render_traceback_(self) -> list[str]:
        from nbdist.report import render_errors

        return render_errors(self.errors)
