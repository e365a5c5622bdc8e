"""Evaluate over the world: every sample once, sums added over the ranks, however uneven their shares are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.loading.data import first_tensor_length, own_samples
from nbdist.engine.strategies import sending
from nbdist.engine.strategies.dims import Layout, is_fsdp

__all__ = ["evaluate", "moved"]


def evaluate(
    module: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    loader: Iterable[Any],
    *,
    device: torch.device,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    accuracy: Callable[[Any, Any], torch.Tensor] | None,
    layout: Layout | None = None,
) -> dict[str, float | int]:
    """Give the mean loss and accuracy of ``module`` over all ranks' samples.

    One collective, at the end; with a model in pieces, whose forward pass needs all ranks, one before each batch too.
    """
    together = is_fsdp(module) or (layout is not None and layout.stays_put)
    speaks = layout is None or layout.place("tp") == 0  # of those that see the same batch
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    samples = 0
    with _in_eval_mode(module), torch.no_grad():
        batches: Iterator[Any] = ((batch, True) for batch in _own_batches(loader))
        for batch, is_own in _in_step(batches, device) if together else batches:
            inputs, targets = moved(batch, device)
            count = first_tensor_length(inputs)
            if count is None:
                raise ValueError("evaluate() counts samples by the first tensor of the inputs, and found none.")
            with autocast():
                outputs = module(inputs)
                if hasattr(outputs, "full_tensor"):
                    outputs = outputs.full_tensor()  # all ranks that hold a part take part
                if outputs is None or not is_own or not speaks:
                    continue  # another stage has the outputs, or another rank counts them
                loss = loss_fn(outputs, targets)
            totals[0] += loss.detach().double() * count
            if accuracy is not None:
                totals[1] += _summed(accuracy(outputs, targets), count)
            samples += count
    if is_fsdp(module):
        module.reshard()  # type: ignore[operator]  # else its root stays whole until the next backward pass
    totals[2] = samples
    if dist.is_initialized():
        dist.all_reduce(totals)
    loss_sum, accuracy_sum, all_samples = totals.tolist()
    count = int(all_samples)
    result: dict[str, float | int] = {"loss": loss_sum / count if count else float("nan"), "samples": count}
    if accuracy is not None:
        result["accuracy"] = accuracy_sum / count if count else float("nan")
    return result


def _in_step(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Give batches until no rank has one of its own; a rank without repeats one, marked as not its own."""
    world = dist.get_world_size()
    spare: Any = None
    while True:
        batch, _ = next(batches, (None, False))
        spare = spare if batch is None else batch
        mine = torch.tensor([batch is not None, spare is not None], device=device)
        table = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(table, mine)
        with_batch, with_spare = torch.stack(table).T.tolist()
        if not any(with_batch):
            return
        if not all(with_spare):
            # its share of the data is empty: it takes part with another rank's batch
            lent = sending.broadcast(moved(spare, torch.device("cpu")), with_spare.index(True))
            spare = lent if spare is None else spare
        yield spare, batch is not None


def moved(value: Any, device: torch.device) -> Any:
    """Give a batch with its tensors on ``device``; lists, tuples and dicts keep their form."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(part, device) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(part, device) for part in value)
    if isinstance(value, dict):
        return {name: moved(part, device) for name, part in value.items()}
    return value


@contextlib.contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off, and give each part its own mode back: a frozen part may be in eval mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _own_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Give the batches without the samples that a DistributedSampler repeats at the end of some ranks' shares."""
    left = own_samples(loader)
    if left is None:
        yield from loader
        return
    for batch in loader:
        count = first_tensor_length(batch)
        if count is None or count <= left:
            yield batch
            left -= count or 0
        elif left > 0:
            yield _cut(batch, count, left)
            left = 0


def _cut(value: Any, count: int, keep: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:keep] if value.ndim and value.shape[0] == count else value
    if isinstance(value, (list, tuple)):
        # a column of strings is a plain sequence of one entry per sample
        if len(value) == count and not any(isinstance(part, torch.Tensor) for part in value):
            return value[:keep]
        return type(value)(_cut(part, count, keep) for part in value)
    if isinstance(value, dict):
        return {name: _cut(part, count, keep) for name, part in value.items()}
    return value


def _summed(values: Any, count: int) -> torch.Tensor:
    """Sum what the user's accuracy function gave: one value per sample, or their mean."""
    given: torch.Tensor = torch.as_tensor(values).detach().double()
    if given.numel() == count:
        return given.sum()
    if given.ndim == 0:
        return given * count
    raise ValueError(
        f"accuracy(outputs, targets) gives one value per sample, got {given.numel()} values for {count} samples."
    )
