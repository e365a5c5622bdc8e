"""What the Trainer looks at before it begins: do model, optimizer and strategy belong together?"""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.strategies import parallel
from nbdist.engine.strategies.dims import Layout, is_fsdp
from nbdist.errors import WorldError

__all__ = [
    "check_optimizer",
    "check_shared_state",
    "compile_parts",
    "forget_unreduced",
    "loss_context",
    "warn_if_alone",
]


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], layout: Layout | None) -> None:
    """Refuse an optimizer that would train nothing, or not as the strategy says."""
    if not parameters:
        raise ValueError("No parameter of the model requires a gradient: there is nothing to train.")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in parameters):
        why = "it was made before sharding" if layout is not None and layout.stays_put else "it holds others"
        raise ValueError(
            f"0 of {len(parameters)} parameters of the model are in the optimizer: {why}. "
            "Make it from model.parameters() after nbdist.parallelize()."
        )
    if layout is not None and layout.strategy == "zero1" and not _shares_state(optimizer):
        name = type(optimizer).__name__
        raise ValueError(
            f'"zero1" shares the optimizer\'s state out over the ranks, and this {name} keeps all of it. '
            f"Make it by nbdist.zero1(torch.optim.{name}, model.parameters(), lr=...)."
        )


def check_shared_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state is shared out over a process group that was left."""
    if _shares_state(optimizer):
        raise WorldError(
            "The optimizer's state is shared out over a process group that was left. Make it anew by nbdist.zero1(), "
            "then a new Trainer, and nbdist.load_checkpoint() into them."
        )


def warn_if_alone(model: nn.Module) -> None:
    """Warn when there are other ranks, and nothing would keep this rank's model equal to theirs."""
    if dist.is_initialized() and dist.get_world_size() > 1 and not parallel.is_parallel(model):
        warnings.warn(
            "The model is not parallelized: each rank trains its own. "
            'Use nbdist.parallelize(model, "ddp") before the optimizer is made.',
            stacklevel=3,
        )


def compile_parts(module: nn.Module, backend: str) -> None:
    """Compile in place: a sharded model by its blocks, a pipeline by its stages; the hooks between stay as they are."""
    if hasattr(module, "forward_backward"):
        parts = [part for stage in module.children() for part in _blocks(stage)]
    else:
        parts = _blocks(module)
    for part in parts:
        part.compile(backend=backend)


def _blocks(module: nn.Module) -> list[nn.Module]:
    if not is_fsdp(module):
        return [module]
    return [part for part in module.modules() if part is not module and is_fsdp(part)] or list(module.children())


def loss_context(outputs: Any) -> contextlib.AbstractContextManager[Any]:
    """Give the context to compute the loss of these outputs in."""
    if not hasattr(outputs, "placements"):
        return contextlib.nullcontext()
    from nbdist.engine.strategies import tensor

    return tensor.loss_context(outputs)


def forget_unreduced(model: nn.Module) -> None:
    """Drop the gradients that a sharded model has added up without reduction."""
    from nbdist.engine.strategies import sharding

    sharding.forget_unreduced(model)


def _shares_state(optimizer: torch.optim.Optimizer) -> bool:
    module = sys.modules.get("torch.distributed.optim")  # dear to import, and nobody has if there is no such optimizer
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
