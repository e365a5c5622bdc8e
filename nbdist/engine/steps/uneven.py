"""Passes over loaders that do not have the same number of batches on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.loading.data import length_of
from nbdist.engine.strategies.dims import device

__all__ = ["MISSING", "RULES", "Passes"]

RULES = ("error", "drop", "join")
MISSING: Any = object()


class Passes:
    """How many batches each rank has in a pass, as the ranks have told each other.

    With lengths that are known one collective per ``train`` call is enough. Where a loader cannot tell its length,
    "drop" and "join" ask before each batch who has one.
    """

    def __init__(self, rule: str) -> None:
        if rule not in RULES:
            raise ValueError(f"Unknown uneven={rule!r}. Known: {', '.join(map(repr, RULES))}.")
        self.rule = rule
        self.lengths: list[int] | None = None
        self.together = False  # there are other ranks
        self.alone = True  # each rank draws its batches without a look at the others
        self.ranks = 0  # those that had the last batch; 0 where nobody was asked

    def agree(self, loader: Any) -> None:
        """Learn all ranks' lengths. A collective.

        Raises
        ------
        ValueError
            They differ, and the rule is "error".
        """
        self.lengths = None
        self.together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.alone = self.rule == "error" or not self.together
        if not self.together:
            return
        length = length_of(loader)
        mine = torch.tensor([-1 if length is None else length], device=device())
        table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(table, mine)
        lengths = [int(n) for n in torch.cat(table).tolist()]
        if min(lengths) < 0:
            return
        self.lengths = lengths
        if min(lengths) == 0 < max(lengths):
            raise ValueError(f"The loader gives no batch on rank {lengths.index(0)}. Start fewer ranks.")
        if self.rule == "error" and min(lengths) != max(lengths):
            most, least = lengths.index(max(lengths)), lengths.index(min(lengths))
            raise ValueError(
                f"The loaders are uneven: {max(lengths)} batches on rank {most}, {min(lengths)} on rank {least}. "
                'Use nbdist.distributed_loader(), or Trainer(..., uneven="drop") or "join".'
            )

    def length(self, loader: Any) -> int | None:
        """Give the number of batches of a pass, over which all ranks go together."""
        if self.lengths is None or self.rule == "error":
            return length_of(loader)
        return max(self.lengths) if self.rule == "join" else min(self.lengths)

    @property
    def joins(self) -> bool:
        """True when ranks may take part without a batch."""
        return self.rule == "join"

    def next(self, batches: Iterator[Any], number: int) -> Any:
        """Give this rank's batch with this number in the pass.

        ``MISSING`` on a rank that has none while others have ("join"); None when the pass has ended for all.
        """
        if self.lengths is not None:
            if number >= (max if self.rule == "join" else min)(self.lengths):
                return None
            self.ranks = sum(length > number for length in self.lengths)
            batch = next(batches, None)
        else:
            batch = next(batches, None)
            self.ranks = _number_with(batch is not None)
            if self.ranks < (1 if self.rule == "join" else dist.get_world_size()):
                return None
        return MISSING if batch is None else batch


def _number_with(has: bool) -> int:
    flag = torch.tensor([int(has)], device=device())
    dist.all_reduce(flag)
    return int(flag.item())
