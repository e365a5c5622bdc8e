"""Is the model the same on all ranks? Compare it before it is spread, and give all the weights of rank 0."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.strategies.dims import device

__all__ = ["give_weights_of_rank_0", "same_on_all_ranks"]

CHUNK = 1 << 24  # elements sent at once


def same_on_all_ranks(model: nn.Module) -> None:
    """Compare names, shapes and dtypes over the ranks, and name the first that differs on all of them.

    Tensors whose size every rank knows, no objects: whatever the models look like, each rank takes part in the same
    collectives and none is left waiting.
    """
    lines = list(_described(model))
    text = "\n".join(lines).encode()
    digest = hashlib.sha256(text).digest()
    halves = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]
    mine = torch.tensor([*halves, len(text)], dtype=torch.int64, device=device())
    world = dist.get_world_size()
    table = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(table, mine)
    rows = torch.stack(table).tolist()
    if all(row == rows[0] for row in rows):
        return
    longest = max(length for *_, length in rows)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device())
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(padded.device)
    texts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(texts, padded)
    models = [bytes(t[:n].cpu().tolist()).decode().split("\n") for t, (*_, n) in zip(texts, rows, strict=True)]
    raise ValueError(_first_difference(models))


def give_weights_of_rank_0(model: nn.Module) -> None:
    """Copy parameters and buffers of rank 0 to all ranks, in place. A collective."""
    if dist.get_world_size() == 1:
        return
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        by_type.setdefault(tensor.dtype, []).append(tensor.detach())
    for tensors in by_type.values():
        waiting: list[torch.Tensor] = []
        size = 0
        for tensor in tensors:
            waiting.append(tensor)
            size += tensor.numel()
            if size >= CHUNK:
                _broadcast(waiting)
                waiting, size = [], 0
        if waiting:
            _broadcast(waiting)


def _broadcast(tensors: list[torch.Tensor]) -> None:
    # flat: gloo sends memory as it lies, and the strides of one tensor may differ between ranks
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, 0)
    for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def _described(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else " frozen"
        yield f"parameter {name}\t{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}{frozen}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name}\t{tuple(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"


def _first_difference(models: list[list[str]]) -> str:
    """Say in one line where the model of some rank differs first from rank 0's."""
    first: tuple[int, int] | None = None  # (line, rank)
    for rank, lines in enumerate(models[1:], 1):
        for i in range(max(len(lines), len(models[0]))):
            if lines[i : i + 1] != models[0][i : i + 1]:
                if first is None or i < first[0]:
                    first = (i, rank)
                break
    assert first is not None, "the hashes differ, so some line does"
    line, other = first
    groups: dict[str, list[int]] = {}
    for rank, lines in enumerate(models):
        groups.setdefault(lines[line] if line < len(lines) else "", []).append(rank)
    zero = models[0][line] if line < len(models[0]) else ""
    theirs = models[other][line] if line < len(models[other]) else ""
    return (
        f"The model is not the same on all ranks: {_shown(zero, groups[zero])}, {_shown(theirs, groups[theirs])}. "
        "Build it from the same values everywhere."
    )


def _shown(line: str, ranks: list[int]) -> str:
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if not line:
        return f"nothing there on {where}"
    name, what = line.split("\t")
    return f"{name} is {what} on {where}"
