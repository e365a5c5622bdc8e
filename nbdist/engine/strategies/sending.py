"""Plain data from rank to rank: what another rank sends is a value, and runs no code here.

torch's ``*_object`` collectives unpickle whatever arrives, and the connections that gloo and NCCL keep between hosts
ask nobody for a key. These take tensors, numbers, text, dtypes, and lists, tuples and dicts of them, by torch's
weights-only format; anything else is refused by its name.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.strategies.dims import device

__all__ = ["all_gather", "broadcast", "receive", "send"]


def broadcast(value: Any, source: int, *, group: Any = None) -> Any:
    """Give the value of the rank ``source`` of the group on all of its ranks; its tensors come on the CPU."""
    is_mine = dist.get_rank(group) == source
    data = _packed(value) if is_mine else torch.empty(0)
    size = torch.tensor([data.numel()], device=device())
    dist.broadcast(size, group_src=source, group=group)
    if not is_mine:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device())
    dist.broadcast(data, group_src=source, group=group)
    return value if is_mine else _unpacked(data)


def all_gather(value: Any, *, kinds: Sequence[Any] = ()) -> list[Any]:
    """Give the values of all ranks, in their order.

    Parameters
    ----------
    kinds : sequence of classes and functions
        Of which else the values may be made.
    """
    data = _packed(value)
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device()) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device()))
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device())
    padded[: data.numel()] = data
    everyone = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(everyone, padded)
    return [_unpacked(theirs[:length], kinds) for theirs, length in zip(everyone, lengths, strict=True)]


def send(value: Any, to: int, *, group: Any) -> None:
    """Send a value to a rank of the group, which calls ``receive``."""
    data = _packed(value)
    dist.send(torch.tensor([data.numel()], device=device()), group_dst=to, group=group)
    dist.send(data, group_dst=to, group=group)


def receive(source: int, *, group: Any) -> Any:
    """Give what a rank of the group sends."""
    size = torch.zeros(1, dtype=torch.int64, device=device())
    dist.recv(size, group_src=source, group=group)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=device())
    dist.recv(data, group_src=source, group=group)
    return _unpacked(data)


def _packed(value: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8).to(device())


def _unpacked(data: torch.Tensor, kinds: Sequence[Any] = ()) -> Any:
    file = io.BytesIO(data.cpu().numpy().tobytes())
    with torch.serialization.safe_globals(list(kinds)) if kinds else contextlib.nullcontext():
        return torch.load(file, weights_only=True, map_location="cpu")
