"""After the group was formed anew: the ranks settle which step they are at, and which number a trainer has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.cells.interrupts import Interrupts
from nbdist.engine.steps.evaluation import moved
from nbdist.engine.strategies import parallel, sending

__all__ = ["Place", "agreed_number", "catch_up"]

Place = tuple[int, int, int]  # step, epoch, batches of it

_trainers = 0


def agreed_number() -> int:
    """Number the trainers from 1, alike on all ranks: a rank that was replaced has made fewer."""
    global _trainers
    _trainers += 1
    if dist.is_initialized() and dist.get_world_size() > 1:
        number = torch.tensor([_trainers], device=parallel.device())
        dist.all_reduce(number, dist.ReduceOp.MAX)
        _trainers = int(number.item())
    return _trainers


def catch_up(module: nn.Module, parts: Sequence[Any], place: Place, device: torch.device) -> Place:
    """Bring ranks that were cut off before an update to those that had made it already; give the place of all.

    An interrupt may end one rank after an optimizer step and another before it: the gradient of that step had been
    reduced, so the others' data is in it and only their update is missing. They get weights and states from a rank
    that made it.

    Parameters
    ----------
    parts : sequence of objects with ``state_dict`` and ``load_state_dict``, or None
        Optimizer, schedule and scaler.
    place : tuple of int
        Where this rank is.
    """
    mine = torch.tensor(place, device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    places: list[Place] = [tuple(row) for row in torch.stack(table).tolist()]
    if all(other == places[0] for other in places):
        return place
    source = max(range(len(places)), key=lambda rank: places[rank][0])
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, source)
    # on the CPU: a GPU's tensors would be unpickled on the sender's device number
    states = [None if part is None else moved(part.state_dict(), torch.device("cpu")) for part in parts]
    states = sending.broadcast(states, source)
    with Interrupts():
        for part, state in zip(parts, states, strict=True):
            if part is not None and state is not None:
                part.load_state_dict(state)
        return places[source]
