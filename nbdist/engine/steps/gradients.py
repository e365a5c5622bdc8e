"""The gradient of one optimizer step, added up from the batches of its window."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nbdist.engine.loading.data import first_tensor_length
from nbdist.engine.steps.accumulate import reducing
from nbdist.engine.steps.checks import forget_unreduced, loss_context
from nbdist.engine.steps.evaluation import moved
from nbdist.engine.steps.uneven import MISSING
from nbdist.engine.strategies import norms
from nbdist.engine.strategies.dims import is_fsdp, layout_of
from nbdist.engine.telemetry.clocks import Clock

__all__ = ["Gradients"]

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
LossFunction = Callable[[Any, Any], torch.Tensor]


class Gradients:
    """Runs forward and backward passes, and keeps count of what went into the window.

    Attributes
    ----------
    batches : int
        Batches that were added.
    weights : int
        Their samples; a batch whose samples cannot be counted is one.
    samples : int
        Their samples, where they can be counted.
    joined : float
        Ranks, per rank that has a batch of its own in this window.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: list[nn.Parameter],
        *,
        accumulate: int,
        device: torch.device,
        dtype: torch.dtype | None,
        clock: Clock,
        keep_spare: bool,
    ) -> None:
        self._model = model
        self._parameters = parameters
        layout = layout_of(model)
        self._in_pieces = layout is not None and layout.stays_put
        self._reducing = reducing(model)
        self._reduces_unasked = not self._in_pieces and not is_fsdp(getattr(model, "_orig_mod", model))
        self._pipeline: Any = model if hasattr(model, "forward_backward") else None
        self._accumulate = accumulate
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._dtype = dtype
        self._clock = clock
        self._keep_spare = keep_spare
        self._spare: Any = None  # a batch to take part with when this rank has none of its own
        self.open()

    def open(self) -> None:
        """Begin a window."""
        self.batches = 0
        self.weights = 0
        self.samples = 0
        self.joined = 1.0
        self._expected = 0
        self._losses: Any = 0.0

    def drop(self) -> None:
        """Forget a window that will not be finished; the optimizer's ``zero_grad`` is the caller's."""
        self.open()
        if self._in_pieces:
            forget_unreduced(self._model)

    def expect(self, window: Sequence[Any]) -> None:
        """Learn the samples of the whole window before its first batch is added."""
        if self._accumulate == 1:
            return
        self._expected = sum(0 if batch is MISSING else first_tensor_length(batch) or 1 for batch in window)

    @property
    def loss(self) -> Any:
        """This rank's mean loss over the window's samples; None without any."""
        return self._losses / self.weights if self.weights else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Give the context that computes in the precision asked for."""
        return _NOTHING if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def add(
        self, batch: Any, loss_fn: LossFunction, scaler: torch.amp.GradScaler | None, *, closes: bool
    ) -> torch.Tensor:
        """Add the gradient of one batch; reduce over the ranks if it closes the window. Give the loss."""
        missing = batch is MISSING
        try:
            inputs, targets = self._spare if missing else batch
        except (TypeError, ValueError):
            raise ValueError(f"The loader gives (inputs, targets), got {type(batch).__name__}.") from None
        if self._keep_spare:
            self._spare = inputs, targets
        samples = first_tensor_length(inputs)
        weight = 0 if missing else 1 if samples is None else samples
        if not self._on_cpu:
            inputs, targets = moved(inputs, self._device), moved(targets, self._device)
        self._clock.lap("h2d")
        whole = self._accumulate == 1 and not missing
        factor = self.joined if whole else self.joined * self._share_of(weight, closes=closes)
        run = self._run_model if self._pipeline is None else self._run_pipeline
        if closes and self._reduces_unasked:
            value = run(inputs, targets, loss_fn, factor, scaler)
        else:
            # forward too: with only the backward pass inside, DDP reduces all the same
            with self._reducing(closes):
                value = run(inputs, targets, loss_fn, factor, scaler)
        self._clock.lap("backward")
        self.batches += 1
        if weight:
            self.weights += weight
            self._losses += (value.item() if self._on_cpu else value.detach()) * weight
            self.samples += samples or 0
        return value

    def _run_model(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, factor: float, scaler: torch.amp.GradScaler | None
    ) -> torch.Tensor:
        if self._dtype is None:
            outputs = self._model(inputs)
            if type(outputs) is torch.Tensor:
                return self._backward(loss_fn(outputs, targets), factor, scaler)
        else:
            with self.autocast():
                outputs = self._model(inputs)
                is_plain = type(outputs) is torch.Tensor
                if is_plain:
                    loss = loss_fn(outputs, targets)
            if is_plain:
                return self._backward(loss, factor, scaler)
        with loss_context(outputs):
            with self.autocast():
                loss = loss_fn(outputs, targets)
            return self._backward(loss, factor, scaler)

    def _backward(self, loss: torch.Tensor, factor: float, scaler: torch.amp.GradScaler | None) -> torch.Tensor:
        if loss.ndim:
            raise ValueError(f"loss_fn gives one number, the mean over the batch; got shape {tuple(loss.shape)}.")
        if type(loss) is not torch.Tensor:
            loss = norms.local(loss)
        self._clock.lap("forward")
        scaled = loss if factor == 1.0 else loss * factor
        if scaler is not None:
            scaled = scaler.scale(scaled)
        scaled.backward()
        return loss

    def _run_pipeline(
        self, inputs: Any, targets: Any, loss_fn: LossFunction, factor: float, scaler: torch.amp.GradScaler | None
    ) -> torch.Tensor:
        scaled: Any = factor
        if scaler is not None:
            # here, not in the last stage: the scaler of every rank has to learn its first scale
            scaled = scaler.scale(torch.tensor(factor, device=self._device))
        value: torch.Tensor = self._pipeline.forward_backward(
            inputs, targets, loss_fn, factor=scaled, autocast=self.autocast
        )
        return value

    def _share_of(self, weight: int, *, closes: bool) -> float:
        """Give the factor of this batch's mean loss in the window's mean over samples.

        Where nobody said what to expect, only the last batch tells. Until then each counts as one of ``accumulate``
        equal ones; with the last, what was added up is set right, before the ranks' gradients are averaged: a factor
        of one rank alone, applied afterwards, would let the ranks drift apart.
        """
        if not self._expected:
            self._expected = weight * self._accumulate
        if not closes:
            return weight / self._expected if weight else 0.0
        whole = self.weights + weight
        if not whole:
            return 0.0
        if whole != self._expected and self.batches:
            self._refit(self._expected / whole)
        return weight / whole

    def _refit(self, factor: float) -> None:
        if self._in_pieces:
            # what was added up without reduction lies where only torch reaches
            raise ValueError(
                f"A window of {self._accumulate} batches has to have equal ones when a sharded model is fed by step(). "
                "Use train(), which knows its window beforehand."
            )
        gradients = norms.local_gradients(self._parameters)
        if gradients:
            torch._foreach_mul_(gradients, factor)
