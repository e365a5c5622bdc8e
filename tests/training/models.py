"""Small nets and data, made from a seed, and what plain torch in one process makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
loss_fn = nn.functional.cross_entropy


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def samples(count: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def share(batch: Batch, rank: int, world: int) -> Batch:
    inputs, targets = batch
    return inputs[rank::world], targets[rank::world]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained_alone(
    batches: Sequence[Batch], optimizer_of: Callable[[Any], torch.optim.Optimizer] = sgd, clip: float | None = None
) -> list[torch.Tensor]:
    """Give the weights after one step of one process on each of these global batches."""
    model = net()
    optimizer = optimizer_of(model.parameters())
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def apart(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))
