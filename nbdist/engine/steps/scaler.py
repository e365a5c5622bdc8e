"""A gradient scaler for models in pieces."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nbdist.engine.strategies.norms import local

__all__ = ["PiecewiseScaler", "agree_on_overflow"]


class PiecewiseScaler(torch.amp.GradScaler):
    """torch's GradScaler over this rank's pieces of the gradients.

    torch's own puts all gradients into one operation, which refuses to mix plain tensors and DTensors, as the
    layers that tensor parallelism splits and those that it does not. Each rank sees its pieces alone: the ranks must
    agree on skipping a step (``Trainer`` does).
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = {}
        pieces: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    piece = local(parameter.grad)
                    pieces.setdefault((piece.device, piece.dtype), []).append(piece)
        for (device, _), alike in pieces.items():
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(alike, flag, inv_scale.to(device))
        if not found:
            # a rank may hold nothing of what got gradients, and has to agree with the others all the same
            found[found_inf.device] = found_inf.clone()
        return found


def agree_on_overflow(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *, averaged: bool) -> bool:
    """Let all ranks skip the step if one of them found an infinite gradient; tell whether they do.

    Parameters
    ----------
    averaged : bool
        All gradients were averaged by DDP and are equal everywhere. Others may be infinite on one rank alone, which
        would then halve its scale and skip a step that the others take.
    """
    flags = list(scaler._found_inf_per_device(optimizer).values())
    found = torch.stack([flag.detach().float().reshape(()).to(flags[0].device) for flag in flags]).max()
    if not averaged and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
        for flag in flags:
            flag.fill_(found.item())
    return bool(found.item())
