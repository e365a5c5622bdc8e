"""``Trainer``: optimizer steps that are right on every rank, can be stopped and gone on with, and time themselves."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.cells.gate import StepStop, current_gate
from nbdist.engine.cells.interrupts import Interrupts
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
from nbdist.engine.steps.windows import Windows
from nbdist.engine.strategies import hooks, norms, parallel
from nbdist.engine.telemetry.clocks import clock_for, exposed_communication
from nbdist.engine.telemetry.recorder import Reason, Run, recorder

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
    compile : bool or str
        Compile the model by ``torch.compile``, or by another backend of it ("aot_eager", …); a sharded one block by
        block.
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
        compile: bool | str = False,
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
        self.precision = precision
        self.accumulate = accumulate
        self.clip_grad_norm = clip_grad_norm
        self.scheduler = scheduler
        self.global_step = 0
        self._module = parallel.unwrap(model)
        self._layout = parallel.layout_of(model)
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        check_optimizer(optimizer, self._parameters, self._layout)
        if not compile:
            warn_if_alone(model)
        self._windows = Windows(loader, accumulate, uneven)
        self._speaks = self._layout is None or self._layout.counts_samples
        self._device = self._parameters[0].device
        self.scaler = PiecewiseScaler(self._device.type) if precision == "fp16" else None
        self._hook = hooks.hook_of(model)
        if compile:
            compile_parts(self._module, "inductor" if compile is True else compile)
        self._group = dist.GroupMember.WORLD
        self._interrupts = Interrupts()
        self._torn = False  # the last call ended somewhere within a step
        self._clock = clock_for(self._device)
        self._run: Run | None = None
        self._sampled = -math.inf
        self._sampled_at = 0
        self._hook_sent = 0
        self._told = ""  # the batch arithmetic, as it was printed last
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
        windows = self._windows
        windows.agree()
        if epochs is not None:
            steps = windows.steps_of(epochs)
        assert steps is not None
        target = self.global_step + steps
        run = self._named_run()
        run.begin(total=target, epoch=self.epoch, epochs=windows.epochs_at(target), note=self._arithmetic())
        gate = current_gate()
        under_gate = not gate.active
        reason: Reason = "failed"
        try:
            if self._torn:
                windows.rewind()
            self._torn = True
            self._abandon_window()
            self._module.train()
            self._clock.begin()
            self._tell_arithmetic()
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
            windows.rewind()
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
        if self._group is not dist.GroupMember.WORLD:
            self._rejoin()
        run = self._run
        if run is None or not run.open:
            run = self._named_run()
            run.begin(epoch=self.epoch, note=self._arithmetic())
            self._tell_arithmetic()
            self._clock.begin()
        self._clock.skip()
        outer, recorder.step = recorder.step, self._record
        try:
            closes = last or self._gradients.batches == self.accumulate - 1
            loss = self._gradients.add(batch, self.loss_fn, self.scaler, closes=closes)
            if closes:
                self._update(run, drawn=False)
        except BaseException:
            self._abandon_window()
            raise
        finally:
            recorder.step = outer
        return loss.detach()

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

    @property
    def epoch(self) -> int:
        """Finished passes over the loader."""
        return self._windows.epoch

    @property
    def loader(self) -> Iterable[Any]:
        """What batches are drawn from; another one is taken up at its beginning."""
        return self._windows.loader

    @loader.setter
    def loader(self, loader: Iterable[Any]) -> None:
        self._windows.loader = loader
        self._windows.place_at(self._windows.epoch, 0)

    def __repr__(self) -> str:
        return f"<Trainer step {self.global_step}, epoch {self.epoch}, {self.precision}, {self._arithmetic()}>"

    # One optimizer step

    def _train_one_step(self, run: Run) -> None:
        outer, recorder.step = recorder.step, self._record  # log() and span() add to it
        try:
            windows, gradients = self._windows, self._gradients
            window = windows.draw()
            self._clock.lap("data_wait")
            gradients.joined = windows.joined
            gradients.expect(window)
            last = len(window) - 1
            for number, batch in enumerate(window):
                gradients.add(batch, self.loss_fn, self.scaler, closes=number == last)
            self._update(run, drawn=True)
        finally:
            recorder.step = outer

    def _update(self, run: Run, *, drawn: bool) -> None:
        """Unscale, clip, step, in this order; then record the step."""
        record, optimizer, scaler, windows = self._record, self.optimizer, self.scaler, self._windows
        gradients = self._gradients
        epoch = windows.epoch
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
            self.global_step = number = self.global_step + 1
            if drawn:
                windows.advance(gradients.batches)
        clock = self._clock
        clock.lap("optimizer")
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
        if perf_counter() - self._sampled > SAMPLING_PERIOD:
            self._sample_dear_values(record)
        clock.finish(record, lambda step, ended: run.record(step, ended, number))
        run.epoch = windows.epoch
        self._open_window()

    def _all_averaged(self) -> bool:
        if not isinstance(self.model, DDP):
            return False
        averaged = set(map(id, self._parameters))
        return all(id(p) in averaged for group in self.optimizer.param_groups for p in group["params"])

    def _sample_dear_values(self, record: dict[str, Any]) -> None:
        self._sampled = perf_counter()
        if self._device.type == "cuda":
            record["memory_allocated"] = torch.cuda.memory_allocated(self._device)
            record["memory_peak"] = torch.cuda.max_memory_allocated(self._device)
        exposed = exposed_communication(self.model, self.global_step - self._sampled_at)
        self._sampled_at = self.global_step
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
            keep_spare=self._windows.joins,
        )

    def _open_window(self) -> None:
        self._record: dict[str, Any] = {}
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

    # The run, and the world it is in

    def _named_run(self) -> Run:
        if self._run is None:
            self._run = Run(f"train {rejoin.agreed_number()}")
        self._run.step = self.global_step
        return self._run

    def _rejoin(self) -> None:
        """Follow the process group when it was formed anew, and settle which step the ranks are at."""
        group = dist.GroupMember.WORLD
        if group is self._group:
            return
        parallel.check_group(self.model)
        check_shared_state(self.optimizer)
        parallel.follow(self.model)
        self._abandon_window()
        windows = self._windows
        windows.rewind()
        if group is not None and dist.get_world_size() > 1:
            parts = (self.optimizer, self.scheduler, self.scaler)
            place = (self.global_step, windows.epoch, windows.position)
            self.global_step, *place_in_data = rejoin.catch_up(self._module, parts, place, self._device)
            windows.place_at(*place_in_data)
        # only now: an interrupt above leaves it to the next call
        self._group = group

    def _tell_arithmetic(self) -> None:
        """Print the batch arithmetic in the cell, before the first step and whenever it has changed."""
        text = self._arithmetic()
        if text != self._told and recorder.publish is not None:
            self._told = text
            sys.stdout.write(f"nbdist: {text} per step\n")

    def _arithmetic(self) -> str:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return self._windows.arithmetic(ranks if self._layout is None else self._layout.dims.data_size)

    # What is saved, and what is copied to a rank in a dead one's place

    def state_dict(self) -> dict[str, Any]:
        """Give what an exact resume needs beside the model and the optimizer: plain data and tensors."""
        return {
            "step": self.global_step,
            "epoch": self.epoch,
            "position": self._windows.position,
            "seed": self._windows.seed,
            "samples": self._windows.position * self._samples_a_batch(),
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
        self.global_step = state["step"]
        self._windows.seed = state.get("seed")
        self._windows.place_at(state["epoch"], position)
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
