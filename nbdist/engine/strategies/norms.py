"""Gradients as one vector over all ranks: its norm, clipping, and the pieces that lie on this rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.strategies.dims import Layout, layout_of

__all__ = ["clip_grad_norm", "clipped", "local"]


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients of ``model`` so that their norm is at most ``max_norm``; give the norm before.

    The L2 norm of the whole model's gradient, as one process would compute it, however the model is sharded, split
    or cut into stages. A collective for models that are.

    Returns
    -------
    float
        Equal on all ranks.

    Examples
    --------
    >>> loss.backward()
    >>> nbdist.clip_grad_norm(model, 1.0)
    >>> optimizer.step()
    """
    return float(clipped(list(model.parameters()), max_norm, layout_of(model)))


def clipped(parameters: list[nn.Parameter], max_norm: float, layout: Layout | None) -> torch.Tensor:
    """Clip the gradients of these parameters; give the norm before, a plain tensor of one number."""
    if layout is None or not layout.stays_put:
        # a user's own sharded model has one mesh, which torch handles
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        full: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return full
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(gradients, layout)
    pieces = [local(gradient) for gradient in gradients]
    if pieces:
        torch._foreach_mul_(pieces, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # torch's formula
    return norm


def total_norm(gradients: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    """Give the L2 norm over all pieces of all ranks, each counted once.

    torch refuses to mix plain tensors and DTensors, and DTensors of different meshes, in one norm; of those on two
    axes it warns.
    """
    device = gradients[0].device if gradients else torch.device(layout.mesh.device_type)
    pieces: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        axes, piece = _piece(gradient)
        pieces.setdefault(axes, []).append(piece)
    squares = torch.zeros((), device=device)
    for axes in sorted(pieces):  # the same order on all ranks
        part = torch.stack(torch._foreach_norm(pieces[axes])).float().square().sum()
        for axis in axes:
            dist.all_reduce(part, group=layout.mesh.get_group(axis))
        squares += part
    stages = layout.group_of("pp")
    if stages is not None:
        dist.all_reduce(squares, group=stages)
    return squares.sqrt()


def _piece(gradient: Any) -> tuple[tuple[str, ...], torch.Tensor]:
    """Give the axes along which the ranks hold other pieces of this gradient, and this rank's piece."""
    if not hasattr(gradient, "placements"):
        return (), gradient
    if any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate

        summed = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=summed)
    names = gradient.device_mesh.mesh_dim_names
    pairs = zip(names, gradient.placements, strict=True)
    return tuple(name for name, placement in pairs if not placement.is_replicate()), gradient.to_local()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Give the piece of a DTensor that lies on this rank, sharing its memory; a plain tensor as it is."""
    piece: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return piece


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Give this rank's pieces of the gradients that there are."""
    return [local(p.grad) for p in parameters if p.grad is not None]
