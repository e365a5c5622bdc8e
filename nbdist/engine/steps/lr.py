"""Learning rates for larger batches: scaled when asked, and warmed up."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LambdaLR

from nbdist.engine.strategies.dims import data_rank

__all__ = ["scale_lr", "warmup"]

RULES = ("linear", "sqrt", "none")


def scale_lr(
    base_lr: float, rule: str = "linear", *, base_batch_size: int, batch_size: int, accumulate: int = 1
) -> float:
    """Scale a learning rate that was found for one batch size to the batch of all ranks.

    nbdist scales nothing of its own accord.

    Parameters
    ----------
    base_lr : float
        What worked with ``base_batch_size``.
    rule : "linear", "sqrt" or "none"
        Multiply by the ratio of the batch sizes, by its square root, or not.
    base_batch_size : int
        Samples per optimizer step of that run.
    batch_size : int
        Samples per rank and batch of this run; the ranks that see different data multiply it.
    accumulate : int
        Batches per optimizer step.

    Returns
    -------
    float
        The learning rate to make the optimizer with.

    Examples
    --------
    >>> lr = nbdist.scale_lr(0.1, "linear", base_batch_size=256, batch_size=64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    >>> scheduler = nbdist.warmup(optimizer, 500)
    """
    if rule not in RULES:
        raise ValueError(f"Unknown rule {rule!r}. Known: {', '.join(map(repr, RULES))}.")
    for name, value in {"base_batch_size": base_batch_size, "batch_size": batch_size, "accumulate": accumulate}.items():
        if value < 1:
            raise ValueError(f"{name} is at least 1, got {value!r}.")
    factor: float = batch_size * data_rank()[1] * accumulate / base_batch_size
    return base_lr * {"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}[rule]


def warmup(
    optimizer: torch.optim.Optimizer, steps: int, then: Callable[[int], float] | None = None
) -> torch.optim.lr_scheduler.LRScheduler:
    """Raise the learning rate evenly over the first ``steps`` optimizer steps, from 1/steps of it to all of it.

    Parameters
    ----------
    then : callable, optional
        ``then(k)`` gives the factor k steps after the warm-up; 1 by default.

    Examples
    --------
    >>> scheduler = nbdist.warmup(optimizer, 500, then=lambda k: 0.999**k)
    >>> trainer = nbdist.Trainer(model, optimizer, loss_fn, loader, scheduler=scheduler)
    """
    if steps < 1:
        raise ValueError(f"steps is at least 1, got {steps!r}.")

    def factor(step: int) -> float:
        if step < steps:
            return (step + 1) / steps
        return 1.0 if then is None else then(step - steps)

    return LambdaLR(optimizer, factor)
