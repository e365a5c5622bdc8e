"""Telemetry of one rank: ``track``, ``log``, ``span`` and ``mean``, and the thread that sends what they record.

The training thread only appends a tuple to a bounded queue. A daemon thread turns what is there into records a few
times a second and hands them to ``publish``, given by ``start``; without it (a plain torchrun script) everything here
works and records are discarded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbdist.engine.cells.gate import StepStop, current_gate
from nbdist.engine.loading.data import epoch_of, first_tensor_length, length_of, watch_copies, watch_order
from nbdist.engine.strategies.parallel import device
from nbdist.engine.telemetry.recorder import FILLED_HERE, OWN_FIELDS, Publish, Reason, recorder

__all__ = ["begin_cell", "end_cell", "flush", "log", "mean", "span", "start", "track"]

PHASES = frozenset({"h2d", "forward", "backward", "optimizer"})  # of a step, timed by the Trainer or by span()

Batch = TypeVar("Batch")


def track(loader: Iterable[Batch], total: int | None = None) -> Iterator[Batch]:
    """Yield the batches of ``loader`` and time each pass through the loop body as one step of a run.

    Records data_wait (seconds in the loader), step_time (from the end of one step to the end of the next), samples
    (length of the first tensor of the batch) and this rank's samples/s. A second pass over the same loader in the same
    cell continues the run: its steps go on, its epoch is one more. The Stop of the notebook ends the loop at the same
    step on every rank.

    Parameters
    ----------
    loader : iterable
        Gives the batches; any iterable.
    total : int, optional
        Number of batches of this pass, where ``len(loader)`` does not tell it.

    Examples
    --------
    >>> for inputs, targets in nbdist.track(loader):
    ...     loss = loss_fn(model(inputs), targets)
    ...     nbdist.log(loss=loss)
    """
    run = recorder.run_of(loader)
    run.passes += 1
    watch_order(loader)
    watch_copies(loader)
    if total is None:
        total = length_of(loader)
    run.begin(total=None if total is None else run.step + total, epoch=run.passes)
    gate = current_gate()
    # a loop inside another one's step (evaluation inside training) stops with the outer loop
    under_gate = not gate.active
    outer = recorder.step
    with gate.run(run.step) if under_gate else contextlib.nullcontext():
        ended = perf_counter()
        batches = iter(loader)
        try:
            while True:
                if under_gate and not gate.enter():
                    raise StepStop(f"stopped after step {run.step}")
                # made before the batch: a data set that logs or times itself does it for the step that its batch is of
                step: dict[str, Any] = {}
                recorder.step = step
                waiting = perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                step["data_wait"] = perf_counter() - waiting
                step["samples"] = first_tensor_length(batch)
                run.epoch = epoch_of(loader, run.passes)
                yield batch
                # a break or an exception in the loop body never comes back here: a partial step is no step
                now = perf_counter()
                step["step_time"] = now - ended
                ended = now
                run.record(step)
        finally:
            run.touched = time.time()
            recorder.step = outer


def log(**values: Any) -> None:
    """Record values of this step; they appear on the plot and in ``cluster.telemetry``.

    Inside a ``track`` loop (or a Trainer's step) they join that step's record. Elsewhere each call is a step of its
    own; after a ``track`` loop, the values are put at the loop's last step. ``loss`` is taken as the mean over ``n``
    samples: the plot shows the mean over ranks weighted by it.

    Parameters
    ----------
    **values : float or tensor of one element
        ``n`` (or ``samples``), ``loss``, ``lr``, ``grad_norm`` and the other columns of the telemetry table fill
        these; ``step`` sets the step where no loop counts it; any other name is the user's own.

    Raises
    ------
    ValueError
        For a tensor of more than one element, or a name that nbdist fills itself.
    TypeError
        For a value that is not a number.

    Examples
    --------
    >>> for i in range(100):
    ...     nbdist.log(loss=loss, n=len(targets), temperature=0.7)
    """
    step = recorder.step
    if step is not None:
        for name, value in values.items():
            _put(step, name, value)
        step.pop("step", None)
        return
    alone: dict[str, Any] = {}
    for name, value in values.items():
        _put(alone, name, value)
    recorder.log_alone(alone)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Time a part of the step: its seconds are added up under ``name`` in the current step's record.

    In a loop of one's own, "h2d", "forward", "backward" and "optimizer" fill the columns that a Trainer fills.

    Examples
    --------
    >>> with nbdist.span("augment"):
    ...     inputs = augment(inputs)
    """
    if name not in PHASES and (name in OWN_FIELDS or name in FILLED_HERE or name in ("step", "n")):
        raise ValueError(f"span({name!r}) would overwrite a column of nbdist's own. Use another name.")
    began = perf_counter()
    try:
        yield
    finally:
        step = recorder.step
        if step is not None:
            step[name] = step.get(name, 0.0) + (perf_counter() - began)


def mean(value: float | torch.Tensor, weight: float = 1.0) -> float:
    """Give the mean of ``value`` over all ranks, weighted by ``weight``: sum(value * weight) / sum(weight).

    A collective: every rank calls it. With the number of samples as the weight, a mean over ranks that saw unequal
    batches is the mean over their samples.

    Returns
    -------
    float
        Equal on all ranks; NaN when the weights sum to zero.

    Examples
    --------
    >>> nbdist.mean(loss, weight=len(targets))
    2.0
    """
    value = float(value.detach() if isinstance(value, torch.Tensor) else value)
    if not (dist.is_available() and dist.is_initialized()):
        return value
    # a rank without samples may hold NaN as its mean: it must not spoil the others'
    pair = torch.tensor([value * weight if weight else 0.0, weight], dtype=torch.float64, device=device())
    dist.all_reduce(pair)
    total, weights = pair.tolist()
    return float(total / weights) if weights else float("nan")


def start(publish: Publish, *, rank: int, world_size: int) -> None:
    """Send records through ``publish`` from now on; called again under a new rank when the world was formed anew."""
    recorder.start(publish, rank, world_size)


def flush() -> None:
    """Send what has been recorded so far, now, from the calling thread; tell of a loss that is no number."""
    recorder.drain()
    recorder.tell_of_odd_loss()


def begin_cell(label: str) -> None:
    """Name the runs that the next lines open: ``label``, then ``label.2``, ..."""
    current_gate().reset()
    recorder.cell = label
    recorder.step = None
    recorder.close_runs("done")


def end_cell(reason: Reason) -> None:
    """End the runs that the cell left open."""
    recorder.step = None
    recorder.close_runs(reason)


def _put(step: dict[str, Any], name: str, value: Any) -> None:
    if name == "n":
        name = "samples"
    elif name in FILLED_HERE:
        raise ValueError(f"log() fills {name!r} itself. Use another name.")
    kind = type(value)
    if kind is float or kind is int:
        step[name] = value
    else:
        step[name] = _number(name, value)


def _number(name: str, value: Any) -> Any:
    """Read a number at once where that waits for nobody; leave a GPU's to the flusher."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"log({name}=...) takes one number, got a tensor of shape {tuple(value.shape)}. Reduce it first."
            )
        if value.device.type == "cpu":
            return value.item()
        # a copy: the user may go on adding to a running sum before the flusher reads it
        return value.detach().clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"log({name}=...) takes a number, got {type(value).__name__}.") from None
