"""ZeRO-1: the optimizer's state is shared out over the ranks, weights and gradients stay whole on each."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["zero1"]


def zero1(optimizer_class: type[torch.optim.Optimizer], parameters: Iterable[Any], **options: Any) -> Any:
    """Make torch's ``ZeroRedundancyOptimizer``, for a model that was parallelized as "zero1".

    Each rank holds the state (momentum, ...) of its share of the parameters, updates these and sends them to the
    others. To shard weights and gradients too, parallelize as "fsdp".

    Parameters
    ----------
    optimizer_class : type
        ``torch.optim.AdamW``, ...
    parameters : iterable
        ``model.parameters()``, or parameter groups.
    **options
        Of the optimizer: ``lr``, ``weight_decay``, ...

    Examples
    --------
    >>> model = nbdist.parallelize(Net(), "zero1")
    >>> optimizer = nbdist.zero1(torch.optim.AdamW, model.parameters(), lr=1e-3)
    >>> trainer = nbdist.Trainer(model, optimizer, loss_fn, loader)
    """
    with warnings.catch_warnings():
        # of torch's own: the package compiles functional optimizers, by torch.jit, that nobody here uses
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class, **options)
