"""``Trainer``: optimizer steps that are right on every rank, can be stopped and gone on with, and time themselves."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.cells.gate import StepStop, current_gate
from nbdist.engine.cells.interrupts import Interrupts
from nbdist.engine.loading.data import DistributedLoader, first_tensor_length
from nbdist.engine.steps import autosave, copying, rejoin
from nbdist.engine.steps.checks import (
    check_optimizer,
    check_shared_state,
    compile_parts,
    warn_if_alone,
)
from nbdist.engine.steps.evaluation import evaluate
from nbdist.engine.steps.gradients import Gradients
from nbdist.engine.steps.scaler import PiecewiseScaler, agree_on_overflow
from nbdist.engine.steps.uneven import Passes
from nbdist.engine.strategies import hooks, norms, parallel
from nbdist.engine.telemetry import meters
from nbdist.engine.telemetry.clocks import clock_for, exposed_communication
from nbdist.engine.telemetry.recorder import Reason, Run

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
        Compile the model by ``torch.compile``; a sharded one block by block.
    uneven : "error", "drop" or "join"
        What to do when the ranks' loaders differ in length: refuse; end each pass with the shortest; or go on to the
        end of the longest, where ranks without a batch take part with none of their own, and the mean is over the
        ranks that have one.

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
        uneven: str = "error",
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
        self._layout = parallel.layout_of(model)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        check_optimizer(optimizer, self._parameters, self._layout)
        if not compile:
            warn_if_alone(model)
        self._passes = Passes(uneven)
        self._speaks = self._layout is None or self._layout.counts_samples
        self._device = self._parameters[0].device
        self.scaler = PiecewiseScaler(self._device.type) if precision == "fp16" else None
        self._hook = hooks.hook_of(model)
        if compile:
            compile_parts(self._module)
        self._group = dist.group.WORLD if dist.is_initialized() else None
        self._batches: Iterator[Any] | None = None
        self._position = 0  # batches of the current pass that went into finished steps
        self._interrupts = Interrupts()
        self._torn = False  # the last call ended somewhere within a step
        self._clock = clock_for(self._device)
        self._run: Run | None = None
        self._sampled = -math.inf
        self._hook_sent = 0
        self._gradients = self._new_gradients()
        self._open_window()

    def train(
        self,
        steps: int | None = None,
        *,
        epochs: float | None = None,
        checkpoint_every: int | None = None,
        checkpoint_dir: str | None = None,
    ) -> None:
        """Take ``steps`` optimizer steps, or those of ``epochs`` passes, from where the last call ended.

        The notebook's Stop ends it at the same step on every rank; an interrupt or an error anywhere leaves the
        weights, the optimizer and the position in the data as after the last finished step. Either way another call
        goes on from there. With ``checkpoint_every`` a checkpoint goes to ``checkpoint_dir`` every so many steps and
        at Stop; the last three are kept.

        Raises
        ------
        ValueError
            When the loader gives no batch, or the ranks' loaders are uneven and nothing was said about it.
        WorldError
            For a sharded model whose process group was left.
        KeyboardInterrupt
            On Stop, after the agreed step.

        Examples
        --------
        >>> trainer.train(500)
        >>> trainer.train(epochs=2)
        >>> trainer.train(500, checkpoint_every=50, checkpoint_dir="checkpoints")
        """
        if (steps is None) == (epochs is None):
            raise ValueError("train() takes a number of steps or epochs=: one of the two.")
        saved = autosave.every(self, checkpoint_every, checkpoint_dir)
        self._rejoin()
        self._passes.agree(self.loader)
        target = self.global_step + (self._steps_of(epochs) if steps is None else steps)
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
            with self._interrupts.watched(), gate.run(self.global_step) if under_gate else _NOTHING, saved:
                while self.global_step < target:
                    if under_gate and not gate.enter():
                        raise StepStop(f"stopped after step {self.global_step}")
                    self._train_one_step(run)
                    saved()
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
            closes = last or self._gradients.batches == self.accumulate - 1
            with meters.Recording(self._record):
                loss = self._gradients.add(batch, self.loss_fn, self.scaler, closes=closes)
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

        In evaluation mode, and without DDP's wrapper: ranks may have different numbers of batches. Samples that a
        DistributedSampler repeats are left out. A collective: every rank calls it.

        Parameters
        ----------
        accuracy : callable, optional
            ``accuracy(outputs, targets)`` gives one value per sample.

        Returns
        -------
        dict
            ``{"loss": float, "samples": int}``, with ``"accuracy"`` when asked for; equal on all ranks.
        """
        parallel.check_group(self.model)
        return evaluate(
            self._module,
            self.loss_fn,
            loader,
            device=self._device,
            autocast=self._gradients.autocast,
            accuracy=accuracy,
            layout=self._layout,
        )

    def __repr__(self) -> str:
        return f"<Trainer step {self.global_step}, epoch {self.epoch}, {self.precision}, {self._arithmetic()}>"

    # One optimizer step

    def _train_one_step(self, run: Run) -> None:
        with meters.Recording(self._record):
            window = self._draw_window()
            self._clock.lap("data_wait")
            gradients = self._gradients
            gradients.expect(window)
            last = len(window) - 1
            for number, batch in enumerate(window):
                gradients.add(batch, self.loss_fn, self.scaler, closes=number == last)
            self._update(run, drawn=True)

    def _update(self, run: Run, *, drawn: bool) -> None:
        """Unscale, clip, step, in this order; then record the step."""
        epoch = self.epoch
        record, optimizer, scaler = self._record, self.optimizer, self.scaler
        lr = optimizer.param_groups[0]["lr"]
        skipped = False
        if scaler is not None:
            record["loss_scale"] = scaler.get_scale()
            scaler.unscale_(optimizer)
            skipped = agree_on_overflow(scaler, optimizer, averaged=self._all_averaged())
            if skipped:
                record["skipped"] = 1.0
        if self.clip_grad_norm is not None:
            norm = norms.clipped(self._parameters, self.clip_grad_norm, self._layout)
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
        gradients = self._gradients
        loss = gradients.loss
        if loss is not None:
            record["loss"] = loss
        record["lr"] = float(lr)
        record["epoch"] = epoch
        if gradients.samples:
            # ranks that share a batch must not count it again
            record["samples"] = gradients.samples if self._speaks else 0
        if self._hook is not None:
            record["comm_bytes"], self._hook_sent = self._hook.sent - self._hook_sent, self._hook.sent
        self._sample_dear_values(record)
        number = self.global_step
        self._clock.finish(record, lambda step, ended: run.record(step, ended, number))
        run.epoch = self.epoch
        self._open_window()

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
        exposed = exposed_communication(self.model)
        if exposed is not None:
            record["exposed_comm"] = exposed

    def _new_gradients(self) -> Gradients:
        return Gradients(
            self.model,
            self._parameters,
            accumulate=self.accumulate,
            device=self._device,
            dtype=PRECISIONS[self.precision],
            clock=self._clock,
            keep_spare=self._passes.joins,
        )

    def _open_window(self) -> None:
        self._record: dict[str, Any] = {}
        self._ends_pass = False
        self._gradients.open()

    def _abandon_window(self) -> None:
        """Forget the gradients of a step that will not be finished."""
        self._open_window()
        self.optimizer.zero_grad(set_to_none=True)
        self._gradients.drop()
        if self.scaler is not None:
            # it may have been left between unscale_ and step, and would refuse to unscale again
            state = self.scaler.state_dict()
            self.scaler = PiecewiseScaler(self._device.type)
            self.scaler.load_state_dict(state)

    # The data

    def _draw_window(self) -> list[Any]:
        """Give the batches of the next optimizer step: of the next pass when this one has ended."""
        batch = self._draw(0)
        if batch is None and self._position:
            self.epoch, self._position = self.epoch + 1, 0
            batch = self._draw(0)
        if batch is None:
            raise ValueError("The loader gives no batch.")
        if self._passes.joins and self._passes.ranks:
            self._gradients.joined = dist.get_world_size() / self._passes.ranks
        window = [batch]
        while len(window) < self.accumulate and not self._ends_pass:
            batch = self._draw(len(window))
            if batch is None:
                self._ends_pass = True
            else:
                window.append(batch)
        return window

    def _draw(self, number: int) -> Any:
        """Give the batch with this number in the window; None at the end of the pass."""
        if self._batches is None:
            self._batches = self._begin_pass()
        batch = self._passes.next(self._batches, self._position + number)
        if batch is None:
            self._batches = None
        return batch

    def _advance(self) -> None:
        """Count the batches of the window that has just been used, together with the weights that it gave."""
        self._position += self._gradients.batches
        length = self._passes.length(self.loader)
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
        parallel.check_group(self.model)
        check_shared_state(self.optimizer)
        parallel.follow(self.model)
        self._abandon_window()
        self._batches = None
        if group is not None and dist.get_world_size() > 1:
            parts = (self.optimizer, self.scheduler, self.scaler)
            place = (self.global_step, self.epoch, self._position)
            self.global_step, self.epoch, self._position = rejoin.catch_up(self._module, parts, place, self._device)
        # only now: an interrupt above leaves it to the next call
        self._group = group

    def _steps_of(self, epochs: float | None) -> int:
        length = self._passes.length(self.loader)
        if not length or epochs is None:
            raise ValueError("The loader does not tell its length, so epochs= has no number of steps. Give steps.")
        return round(epochs * math.ceil(length / self.accumulate))

    def _epochs_at(self, step: int) -> float | None:
        length = self._passes.length(self.loader)
        return step / math.ceil(length / self.accumulate) if length else None

    def _arithmetic(self) -> str:
        """Write the batch arithmetic: per rank x ranks x accumulated = samples per optimizer step."""
        size = getattr(self.loader, "batch_size", None)
        if size is None and isinstance(self.loader, (list, tuple)) and self.loader:
            size = first_tensor_length(self.loader[0])
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self._layout is not None:
            ranks = self._layout.dims.data_size
        whole = "" if size is None else f" = {size * ranks * self.accumulate}"
        return (
            f"{'?' if size is None else size} per rank × {ranks} ranks × {self.accumulate} accumulated{whole} samples"
        )

    # What is saved, and what is copied to a rank in a dead one's place

    def state_dict(self) -> dict[str, Any]:
        """Give what an exact resume needs beside the model and the optimizer: plain data and tensors."""
        return {
            "step": self.global_step,
            "epoch": self.epoch,
            "position": self._position,
            "samples": self._position * self._samples_a_batch(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken; with other batch sizes or ranks, after as many samples."""
        size = self._samples_a_batch()
        position = state["samples"] // size if size and state["samples"] else state["position"]
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.global_step, self.epoch, self._position = state["step"], state["epoch"], position
        self._batches = None
        self._torn = False
        self._abandon_window()

    def _samples_a_batch(self) -> int:
        """Number the samples that all ranks' loaders give in one batch each; 0 where it is not known."""
        size = getattr(self.loader, "batch_size", None)
        return size * parallel.data_rank()[1] if isinstance(size, int) else 0

    def __getstate__(self) -> dict[str, bytes]:
        packed = self.__dict__.get("_packed")
        return {"_packed": copying.pack(self) if packed is None else packed}

    def __getattr__(self, name: str) -> Any:
        # unpacked at first use: where it is only handed on, there need be no process group, nor this rank's device
        packed = self.__dict__.pop("_packed", None)
        if packed is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        copying.unpack(self, packed)
        return getattr(self, name)
