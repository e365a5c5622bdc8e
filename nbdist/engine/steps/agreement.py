"""Decisions that all ranks must take alike: stop early, skip, go on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.strategies.dims import device

__all__ = ["all_ranks", "any_rank"]


def any_rank(flag: Any) -> bool:
    """Tell on every rank whether ``flag`` is true on at least one. A collective: every rank calls it.

    A loop that one rank leaves alone makes the others wait for ever in their next collective.

    Examples
    --------
    >>> if nbdist.any_rank(loss > 100):
    ...     break
    """
    return _reduced(flag, largest=True)


def all_ranks(flag: Any) -> bool:
    """Tell on every rank whether ``flag`` is true on all of them. A collective: every rank calls it.

    Examples
    --------
    >>> if nbdist.all_ranks(accuracy > 0.99):
    ...     break
    """
    return _reduced(flag, largest=False)


def _reduced(flag: Any, *, largest: bool) -> bool:
    mine = bool(flag)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return mine
    value = torch.tensor([int(mine)], device=device())
    dist.all_reduce(value, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
    return bool(value.item())
