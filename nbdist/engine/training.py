"""``Trainer``: optimizer steps that are right on every rank, can be stopped and gone on with, and time themselves."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine import meters, parallel, rejoin
from nbdist.engine.clocks import clock_for
from nbdist.engine.data import DistributedLoader, first_tensor_length, length_of
from nbdist.engine.evaluation import evaluate, moved
from nbdist.engine.gate import StepStop, current_gate
from nbdist.engine.interrupts import Interrupts
from nbdist.engine.recorder import Reason, Run

__all__ = ["Trainer"]

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
SAMPLING_PERIOD = 0.25  # seconds between two reads of what is dear to read: DDP's timings, the GPU's memory


class Trainer:
    """Trains a model by optimizer steps that all ranks take together.

    Parameters
    ----------
    model : torch.nn.Module
        What ``nbdist.parallelize`` gave.
    optimizer : torch.optim.Optimizer
        Over the model's parameters.
    loss_fn : callable
        ``loss_fn(outputs, targets)`` gives the mean loss over the batch, one number.
    loader : iterable of (inputs, targets)
        Gone through again and again; ``nbdist.distributed_loader`` gives each rank its share.
    precision : "fp32", "bf16" or "fp16"
        The type that autocast computes in; "fp16" scales the loss, by the same factor on all ranks.
    accumulate : int
        Batches per optimizer step: gradients are reduced once for all of them. The last step of an epoch may have
        fewer, and is scaled to these.
    clip_grad_norm : float, optional
        Largest L2 norm of the gradient; the norm before clipping is recorded as grad_norm.
    scheduler : torch.optim.lr_scheduler.LRScheduler, optional
        Advanced after each optimizer step.
    compile : bool
        Compile the model by ``torch.compile``.

    Raises
    ------
    ValueError
        For an unknown precision, accumulate below one, or an optimizer that holds none of the model's parameters.

    Examples
    --------
    >>> trainer = nbdist.Trainer(model, optimizer, nn.functional.cross_entropy, loader, precision="bf16")
    >>> trainer.train(500)
    >>> trainer.evaluate(test_loader, accuracy=lambda outputs, targets: outputs.argmax(1) == targets)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        loader: Iterable[Any],
        *,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        compile: bool = False,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"Unknown precision {precision!r}. Known: {', '.join(map(repr, PRECISIONS))}.")
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate is the number of batches per optimizer step, at least 1, got {accumulate!r}.")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm is a norm above 0, got {clip_grad_norm!r}.")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric. Call its step() after trainer.evaluate() yourself.")
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.loader = loader
        self.precision = precision
        self.accumulate = accumulate
        self.clip_grad_norm = clip_grad_norm
        self.scheduler = scheduler
        self.global_step = 0
        self.epoch = 0
        self._module = parallel.unwrap(model)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        _check_optimizer(optimizer, self._parameters)
        if dist.is_initialized() and dist.get_world_size() > 1 and self._module is model and not compile:
            warnings.warn(
                "The model is not parallelized: each rank trains its own. "
                'Use nbdist.parallelize(model, "ddp") before the optimizer is made.',
                stacklevel=2,
            )
        self._device = self._parameters[0].device
        self._dtype = PRECISIONS[precision]
        self.scaler = torch.amp.GradScaler(self._device.type) if precision == "fp16" else None
        if compile:
            self._module.compile()
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self._batches: Iterator[Any] | None = None
        self._position = 0  # batches of the current pass that went into finished steps
        self._interrupts = Interrupts()
        self._torn = False  # the last call ended somewhere within a step
        self._clock = clock_for(self._device)
        self._run: Run | None = None
        self._sampled = -math.inf
        self._open_window()

    def train(self, steps: int) -> None:
        """Take ``steps`` optimizer steps from where the last call ended, across epochs.

        The notebook's Stop ends it at the same step on every rank; an interrupt or an error anywhere leaves the
        weights, the optimizer and the position in the data as after the last finished step. Either way another call
        goes on from there.

        Raises
        ------
        ValueError
            When the loader gives no batch.
        KeyboardInterrupt
            On Stop, after the agreed step.
        """
        self._rejoin()
        target = self.global_step + steps
        run = self._named_run()
        run.begin(total=target, epoch=self.epoch, epochs=self._epochs_at(target), note=self._arithmetic())
        gate = current_gate()
        under_gate = not gate.active
        reason: Reason = "failed"
        try:
            if self._torn:
                # an interrupted iterator may have lost a batch: read on in this pass from after the last finished step
                self._batches = None
            self._torn = True
            self._abandon_window()
            self._module.train()
            self._clock.begin()
            with self._interrupts.watched(), gate.run(self.global_step) if under_gate else _NOTHING:
                while self.global_step < target:
                    if under_gate and not gate.enter():
                        raise StepStop(f"stopped after step {self.global_step}")
                    self._train_one_step(run)
            reason, self._torn = "done", False
        except StepStop:
            reason, self._torn = "stopped", False
            raise
        except BaseException as error:
            reason = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            self._batches = None
            self._abandon_window()
            raise
        finally:
            self._clock.settle()
            run.end(reason)

    def step(self, batch: Any, *, last: bool = False) -> torch.Tensor:
        """Feed one batch ``(inputs, targets)``; every ``accumulate``-th call takes an optimizer step.

        Parameters
        ----------
        last : bool
            Take the optimizer step now: the window is shorter, as at the end of an epoch.

        Returns
        -------
        torch.Tensor
            This rank's loss on the batch, detached.

        Examples
        --------
        >>> for batch in loader:
        ...     trainer.step(batch)
        """
        self._rejoin()
        run = self._named_run()
        if not run.open:
            run.begin(epoch=self.epoch, note=self._arithmetic())
            self._clock.begin()
        self._clock.skip()
        try:
            closes = last or self._window == self.accumulate - 1
            with meters.Recording(self._record):
                loss = self._micro_step(batch, closes=closes)
                if closes:
                    self._update(run, drawn=False)
        except BaseException:
            self._abandon_window()
            raise
        return loss

    def evaluate(
        self, loader: Iterable[Any], accuracy: Callable[[Any, Any], torch.Tensor] | None = None
    ) -> dict[str, float | int]:
        """Give the mean loss over the samples of all ranks' loaders, each sample once.

        The model is used without its wrapper, in evaluation mode: ranks may have different numbers of batches. Samples
        that a DistributedSampler repeats are left out. A collective: every rank calls it.

        Parameters
        ----------
        accuracy : callable, optional
            ``accuracy(outputs, targets)`` gives one value per sample.

        Returns
        -------
        dict
            ``{"loss": float, "samples": int}``, with ``"accuracy"`` when asked for; equal on all ranks.
        """
        return evaluate(
            self._module, self.loss_fn, loader, device=self._device, autocast=self._autocast, accuracy=accuracy
        )

    def __repr__(self) -> str:
        return f"<Trainer step {self.global_step}, epoch {self.epoch}, {self.precision}, {self._arithmetic()}>"

    # One optimizer step

    def _train_one_step(self, run: Run) -> None:
        with meters.Recording(self._record):
            batch = self._draw()
            self._clock.lap("data_wait")
            while True:
                following = None
                closes = self._window == self.accumulate - 1
                if not closes:
                    # no_sync() needs to know before the forward pass whether this batch is the window's last
                    following = self._draw_in_pass()
                    closes = self._ends_pass = following is None
                    self._clock.lap("data_wait")
                self._micro_step(batch, closes=closes)
                if closes:
                    break
                batch = following
            self._update(run, drawn=True)

    def _micro_step(self, batch: Any, *, closes: bool) -> torch.Tensor:
        """Add the gradient of one batch; reduce over the ranks if it closes the window."""
        clock = self._clock
        try:
            inputs, targets = batch
        except (TypeError, ValueError):
            raise ValueError(f"The loader gives (inputs, targets), got {type(batch).__name__}.") from None
        samples = first_tensor_length(inputs)
        weight = 1 if samples is None else samples
        inputs, targets = moved(inputs, self._device), moved(targets, self._device)
        clock.lap("h2d")
        model = self.model
        # forward too: with only the backward pass inside, DDP reduces all the same
        with _NOTHING if closes or not isinstance(model, DDP) else model.no_sync():
            with self._autocast():
                loss = self.loss_fn(model(inputs), targets)
            if loss.ndim:
                raise ValueError(f"loss_fn gives one number, the mean over the batch; got shape {tuple(loss.shape)}.")
            clock.lap("forward")
            scaled = loss if self.accumulate == 1 else loss * self._share_of(weight, closes=closes)
            if self.scaler is not None:
                scaled = self.scaler.scale(scaled)
            scaled.backward()
        clock.lap("backward")
        self._window += 1
        self._weights += weight
        value = loss.detach()
        self._loss_sum += (value.item() if value.device.type == "cpu" else value) * weight
        if samples is not None:
            self._samples += samples
        return value

    def _share_of(self, weight: int, *, closes: bool) -> float:
        """Give the factor of this batch's mean loss in the window's mean over samples.

        The window's size is known only with its last batch. Until then each batch counts as one of ``accumulate``
        equal ones; with the last, what was added up is set right, before the ranks' gradients are averaged: a factor
        of one rank alone, applied afterwards, would let the ranks drift apart.
        """
        if self._window == 0:
            self._expected = weight * self.accumulate
        if not closes:
            return weight / self._expected
        whole = self._weights + weight
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if whole != self._expected and gradients:
            torch._foreach_mul_(gradients, self._expected / whole)
        return weight / whole

    def _update(self, run: Run, *, drawn: bool) -> None:
        """Unscale, clip, step, in this order; then record the step."""
        epoch = self.epoch
        record, optimizer, scaler = self._record, self.optimizer, self.scaler
        lr = optimizer.param_groups[0]["lr"]
        skipped = False
        if scaler is not None:
            record["loss_scale"] = scaler.get_scale()
            scaler.unscale_(optimizer)
            skipped = self._agree_on_overflow(scaler)
            if skipped:
                record["skipped"] = 1.0
        if self.clip_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self.clip_grad_norm)
            record["grad_norm"] = norm.item() if norm.device.type == "cpu" else norm.detach()
        with self._interrupts:
            # weights, optimizer, schedule and counters move together or not at all
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if self.scheduler is not None and not skipped:
                self.scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            self.global_step += 1
            if drawn:
                self._advance()
        self._clock.lap("optimizer")
        record["loss"] = self._loss_sum / self._weights
        record["lr"] = float(lr)
        record["epoch"] = epoch
        if self._samples:
            record["samples"] = self._samples
        self._sample_dear_values(record)
        number = self.global_step
        self._clock.finish(record, lambda step, ended: run.record(step, ended, number))
        run.epoch = self.epoch
        self._open_window()

    def _agree_on_overflow(self, scaler: torch.amp.GradScaler) -> bool:
        """Let all ranks skip the step if one of them found an infinite gradient."""
        found = list(scaler._found_inf_per_device(self.optimizer).values())
        # gradients that DDP has averaged are equal everywhere; those of other parameters may be infinite on one rank
        # alone, which would then halve its scale and skip a step that the others take
        if dist.is_initialized() and dist.get_world_size() > 1 and not self._all_averaged():
            for flag in found:
                dist.all_reduce(flag, dist.ReduceOp.MAX)
        return any(bool(flag.item()) for flag in found)

    def _all_averaged(self) -> bool:
        if not isinstance(self.model, DDP):
            return False
        averaged = set(map(id, self._parameters))
        return all(id(p) in averaged for group in self.optimizer.param_groups for p in group["params"])

    def _sample_dear_values(self, record: dict[str, Any]) -> None:
        now = time.perf_counter()
        if now - self._sampled < SAMPLING_PERIOD:
            return
        self._sampled = now
        if self._device.type == "cuda":
            record["memory_allocated"] = torch.cuda.memory_allocated(self._device)
            record["memory_peak"] = torch.cuda.max_memory_allocated(self._device)
        exposed = _exposed_communication(self.model)
        if exposed is not None:
            record["exposed_comm"] = exposed

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self._device.type, self._dtype)

    def _open_window(self) -> None:
        self._record: dict[str, Any] = {}
        self._window = 0  # batches in it
        self._ends_pass = False
        self._weights = 0
        self._samples = 0
        self._expected = 0
        self._loss_sum: Any = 0.0

    def _abandon_window(self) -> None:
        """Forget the gradients of a step that will not be finished."""
        self._open_window()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:
            # it may have been left between unscale_ and step, and would refuse to unscale again
            state = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self._device.type)
            self.scaler.load_state_dict(state)

    # The data

    def _draw(self) -> Any:
        """Give the next batch, of the next pass when this one has ended."""
        batch = self._draw_in_pass()
        if batch is None and self._position:
            self.epoch, self._position = self.epoch + 1, 0
            batch = self._draw_in_pass()
        if batch is None:
            raise ValueError("The loader gives no batch.")
        return batch

    def _draw_in_pass(self) -> Any:
        """Give the next batch of this pass; None at its end."""
        if self._batches is None:
            self._batches = self._begin_pass()
        batch = next(self._batches, None)
        if batch is None:
            self._batches = None
        return batch

    def _advance(self) -> None:
        """Count the batches of the window that has just been used, together with the weights that it gave."""
        self._position += self._window
        length = length_of(self.loader)
        if self._ends_pass or (length is not None and self._position >= length):
            self.epoch, self._position = self.epoch + 1, 0
            self._batches = None

    def _begin_pass(self) -> Iterator[Any]:
        loader, position = self.loader, self._position
        if isinstance(loader, DistributedLoader):
            loader.set_epoch(self.epoch)
            loader.skip(position)
            return iter(loader)
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        return islice(iter(loader), position, None)

    # The run, and the world it is in

    def _named_run(self) -> Run:
        if self._run is None:
            self._run = Run(f"train {rejoin.agreed_number()}")
        self._run.step = self.global_step
        return self._run

    def _rejoin(self) -> None:
        """Follow the process group when it was formed anew, and settle which step the ranks are at."""
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is self._group:
            return
        parallel.follow(self.model)
        self._abandon_window()
        self._batches = None
        if group is not None and dist.get_world_size() > 1:
            parts = (self.optimizer, self.scheduler, self.scaler)
            place = (self.global_step, self.epoch, self._position)
            self.global_step, self.epoch, self._position = rejoin.catch_up(self._module, parts, place, self._device)
        # only now: an interrupt above leaves it to the next call
        self._group = group

    def _epochs_at(self, step: int) -> float | None:
        length = length_of(self.loader)
        if not length:
            return None
        return step / math.ceil(length / self.accumulate)

    def _arithmetic(self) -> str:
        """Write the batch arithmetic: per rank x ranks x accumulated = samples per optimizer step."""
        size = getattr(self.loader, "batch_size", None)
        if size is None and isinstance(self.loader, (list, tuple)) and self.loader:
            size = first_tensor_length(self.loader[0])
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        whole = "" if size is None else f" = {size * ranks * self.accumulate}"
        return (
            f"{'?' if size is None else size} per rank × {ranks} ranks × {self.accumulate} accumulated{whole} samples"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("No parameter of the model requires a gradient: there is nothing to train.")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for p in parameters):
        raise ValueError(
            f"0 of {len(parameters)} parameters of the model are in the optimizer. "
            "Make the optimizer from model.parameters() after nbdist.parallelize()."
        )


def _exposed_communication(model: nn.Module) -> float | None:
    """Give the seconds of the last reduced backward pass that were communication alone, as DDP has measured them."""
    if not isinstance(model, DDP):
        return None
    if model.device.type == "cpu":
        # DDP times each 100th step of its own accord; on a CPU every step costs nothing, on a GPU it would wait
        model._set_ddp_runtime_logging_sample_rate(1)
    data = model._get_ddp_logging_data()
    communication: float | None = data.get("backward_comm_time")
    overlap: float | None = data.get("backward_compute_comm_overlap_time")
    if not communication or overlap is None:
        return None
    return max(0.0, (communication - overlap) / 1e9)
