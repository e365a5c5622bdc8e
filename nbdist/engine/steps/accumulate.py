"""Gradient accumulation: many batches, one reduction over the ranks, under each strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.loading.data import first_tensor_length
from nbdist.engine.strategies.dims import is_fsdp

__all__ = ["Window", "accumulate", "reducing"]

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def accumulate(model: nn.Module, loader: Iterable[Any], batches: int) -> Iterator[Window]:
    """Go through ``loader`` in windows of ``batches``, for one optimizer step each, in an own loop.

    Within a window gradients are added up on this rank, and reduced over the ranks with its last batch alone. The last
    window of a pass may be shorter, and its batches weigh accordingly.

    Examples
    --------
    >>> for window in nbdist.accumulate(model, loader, 4):
    ...     for inputs, targets in window:
    ...         window.scaled(loss_fn(model(inputs), targets)).backward()
    ...     nbdist.clip_grad_norm(model, 1.0)
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """
    if batches < 1:
        raise ValueError(f"accumulate() takes at least 1 batch per optimizer step, got {batches!r}.")
    source = iter(loader)
    while window := list(islice(source, batches)):
        yield Window(model, window)


class Window:
    """The batches of one optimizer step. Forward and backward pass belong inside the loop over it."""

    def __init__(self, model: nn.Module, batches: list[Any]) -> None:
        self._reducing = reducing(model)
        self._batches = batches
        self._sizes = [first_tensor_length(batch) or 1 for batch in batches]
        self._share = 1.0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        whole = sum(self._sizes)
        for number, (batch, size) in enumerate(zip(self._batches, self._sizes, strict=True), 1):
            self._share = size / whole
            with self._reducing(number == len(self._batches)):
                yield batch

    @property
    def samples(self) -> int:
        """Number of samples of all batches; ``nbdist.track`` counts them."""
        return sum(self._sizes)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Give the current batch's mean loss times its share of the window's samples."""
        return loss * self._share


def _held_back(model: DDP) -> contextlib.AbstractContextManager[Any]:
    if model.static_graph:  # torch would fail by an assertion of its own in the second backward pass
        raise ValueError("static_graph=True does not go with accumulation: leave it out, or take accumulate=1.")
    return model.no_sync()


def reducing(model: nn.Module) -> Callable[[bool], contextlib.AbstractContextManager[Any]]:
    """Give the switch of this model: ``with switch(False):`` gradients are only added up on this rank.

    With ``switch(True)`` the backward pass inside reduces them over the ranks. Forward too belongs inside: with only
    the backward pass inside, DDP reduces all the same.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    if isinstance(inner, DDP):
        return lambda wanted: _NOTHING if wanted else _held_back(inner)
    if is_fsdp(inner):
        switch = inner.set_requires_gradient_sync
    elif hasattr(inner, "hold_gradients"):
        switch = lambda wanted: inner.hold_gradients(not wanted)  # noqa: E731
    else:
        return lambda wanted: _NOTHING

    def switched(wanted: bool) -> contextlib.AbstractContextManager[Any]:
        switch(wanted)
        return _NOTHING

    return switched
