"""``check_sync``: are the parameters equal on the ranks that must have equal ones?

Each rank adds up the bits of its tensors; one small all_gather compares the sums. Only where they differ is more sent.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.engine.saving.shards import local_part
from nbdist.engine.strategies import parallel, sending
from nbdist.engine.world.meeting import named

__all__ = ["SyncReport", "TensorDifference", "check_sync"]

SHOWN = 16  # differing tensors of which the size of the difference is worked out
WHOLE = ""  # the share of a tensor that a rank holds all of
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_first_seen: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor that is not the same on ranks that must have the same."""

    name: str
    kind: str  # parameter or buffer
    ranks: tuple[int, ...]  # those that differ from the reference
    reference: int  # the lowest rank that holds it
    max_difference: float | None  # largest absolute difference; None where it was not worked out
    first_step: int | None  # the first step that it was seen at, where check_sync was told steps

    def __str__(self) -> str:
        size = "" if self.max_difference is None else f" by up to {self.max_difference:.3g}"
        since = "" if self.first_step is None else f", first seen at step {self.first_step}"
        return f"{self.kind} {self.name} on {named(self.ranks)} differs from rank {self.reference}{size}{since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What ``check_sync`` found, equal on all ranks. True when no parameter differs; buffers are told apart."""

    tensors: int  # compared on this rank
    parameters: tuple[TensorDifference, ...] = ()
    buffers: tuple[TensorDifference, ...] = ()

    @property
    def max_difference(self) -> float:
        """The largest absolute difference of a parameter; 0.0 when all are equal."""
        return max((d.max_difference or 0.0 for d in self.parameters), default=0.0)

    def __bool__(self) -> bool:
        return not self.parameters

    def __repr__(self) -> str:
        found = (*self.parameters, *self.buffers)
        if not found:
            return f"<SyncReport in sync, {self.tensors} tensors>"
        rest = f", and {len(found) - 3} more" if len(found) > 3 else ""
        return f"<SyncReport {'; '.join(map(str, found[:3]))}{rest}>"


def check_sync(model: nn.Module, *, step: int | None = None) -> SyncReport:
    """Compare the model over the ranks that must have the same, and name the tensors that are not.

    A collective, cheap enough for every 100 steps. Sharded tensors are compared over the ranks that hold the same
    share. Buffers are listed apart and do not make the report false: DDP makes them equal when a forward pass begins,
    and those of BatchNorm differ again after it.

    Parameters
    ----------
    model : torch.nn.Module
        Wrapped or not.
    step : int, optional
        Given at each call, the report tells at which step a difference was seen first.

    Returns
    -------
    SyncReport
        Equal on all ranks; ``.parameters`` and ``.buffers`` list what differs, on which ranks and by how much.

    Examples
    --------
    >>> nbdist.check_sync(model)
    <SyncReport parameter fc.weight on rank 1 differs from rank 0 by up to 0.031>
    """
    inner = parallel.unwrap(model)
    held = list(_held(inner))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SyncReport(tensors=len(held))
    device = parallel.device()
    sums = _sums([tensor for *_, tensor in held], device)
    places: dict[tuple[str, bool], list[int]] = {}
    for i, (kind, _, share, _) in enumerate(held):
        places.setdefault((kind, share != WHOLE), []).append(i)
    mine = []
    for kind in ("parameter", "buffer"):
        for sharded in (False, True):
            chosen = places.get((kind, sharded), [])
            mine.append(_label([held[i] for i in chosen], device))
            mine.append(_folded(sums, chosen, device))
    row = torch.stack(mine)
    table = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(table, row)
    rows = torch.stack(table).reshape(len(table), -1, 2).tolist()
    differing = [
        i for i in range(4) if any(len({r[i][1] for r in rows if r[i][0] == label}) > 1 for label, _ in _at(rows, i))
    ]
    # a tensor that some ranks have and others lack is a difference too, but for shares of stages and layers
    if not differing:
        _first_seen.pop(inner, None)
        return SyncReport(tensors=len(held))
    return _details(inner, held, sums, step)


def _at(rows: Sequence[Any], index: int) -> list[tuple[int, int]]:
    return [tuple(row[index]) for row in rows]


def _held(model: nn.Module) -> Iterator[tuple[str, str, str, torch.Tensor]]:
    """Give kind, name, share and local part of each tensor of the model."""
    for kind, named_tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named_tensors:
            part = local_part(tensor)
            if part.numel():
                yield kind, name, _share(tensor), part


def _share(tensor: torch.Tensor) -> str:
    """Name the share of a sharded tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return WHOLE
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    names = tensor.device_mesh.mesh_dim_names or range(len(coordinate))
    return " ".join(
        f"{name}{place}"
        for name, place, placement in zip(names, coordinate, tensor.placements, strict=True)
        if not placement.is_replicate()
    )


def _sums(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Add up the bits of each tensor, on its device, without waiting for it."""
    sums = []
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        bits = tensor.contiguous().view(BITS[tensor.element_size()])
        sums.append(bits.sum(dtype=torch.int64).to(device))
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def _label(held: Sequence[tuple[str, str, str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Number a set of tensors by their names, shapes and shares: ranks with the same number must have the same sums."""
    text = "\n".join(f"{name} {share} {tuple(tensor.shape)}" for _, name, share, tensor in held)
    digest = hashlib.sha256(text.encode()).digest()
    return torch.tensor(int.from_bytes(digest[:8], "little", signed=True), device=device)


def _folded(sums: torch.Tensor, chosen: Sequence[int], device: torch.device) -> torch.Tensor:
    """Fold sums into one number, each with its own odd factor: two that were swapped must not cancel."""
    if not chosen:
        return torch.zeros((), dtype=torch.int64, device=device)
    index = torch.tensor(chosen, device=device)
    return (sums[index] * (2 * index + 0x9E3779B97F4A7C15 % (1 << 62)).bitwise_or(1)).sum()


def _details(
    model: nn.Module, held: Sequence[tuple[str, str, str, torch.Tensor]], sums: torch.Tensor, step: int | None
) -> SyncReport:
    """Find the tensors that differ, and by how much. All ranks come here together: they compared the same table."""
    mine = {
        (kind, name, share): (tuple(tensor.shape), str(tensor.dtype), value)
        for (kind, name, share, tensor), value in zip(held, sums.tolist(), strict=True)
    }
    everyone: list[Mapping[tuple[str, str, str], tuple[Any, str, int]]] = sending.all_gather(mine)
    holders: dict[tuple[str, str, str], list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for key in theirs:
            holders.setdefault(key, []).append(rank)
    parts = {(kind, name, share): tensor for kind, name, share, tensor in held}
    seen = _first_seen.setdefault(model, {})
    found: list[TensorDifference] = []
    for (kind, name, share), ranks in holders.items():
        key = (kind, name, share)
        reference = ranks[0]
        differing = tuple(r for r in ranks if everyone[r][key] != everyone[reference][key])
        if not differing:
            continue
        shapes = {everyone[r][key][:2] for r in ranks}
        size = None
        if len(found) < SHOWN and len(shapes) == 1:
            size = _largest_difference(parts.get(key), everyone[reference][key], reference)
        if step is not None:
            seen.setdefault(name, step)
        found.append(
            TensorDifference(
                name=name,
                kind=kind,
                ranks=differing,
                reference=reference,
                max_difference=size,
                first_step=seen.get(name),
            )
        )
    return SyncReport(
        tensors=len(held),
        parameters=tuple(d for d in found if d.kind == "parameter"),
        buffers=tuple(d for d in found if d.kind == "buffer"),
    )


def _largest_difference(part: torch.Tensor | None, described: tuple[Any, str, int], reference: int) -> float:
    """Compare this rank's part, if it has one, with the reference rank's, and give the largest over all ranks."""
    shape, dtype, _ = described
    device = parallel.device()
    theirs = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
    if dist.get_rank() == reference and part is not None:
        theirs.copy_(part)
    dist.broadcast(theirs, reference)
    size = torch.zeros((), dtype=torch.float64, device=device)
    if part is not None:
        size = (part.to(device).double() - theirs.double()).abs().max()
    dist.all_reduce(size, dist.ReduceOp.MAX)
    return float(size.item())
