"""Pipeline parallelism: consecutive stages of a model on different ranks, by the schedules of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from nbdist.engine.loading.data import first_tensor_length
from nbdist.engine.strategies import parallel, sending
from nbdist.engine.strategies.dims import Layout, ParallelDims, device, lay_out, remember
from nbdist.engine.strategies.sameness import give_weights_of_rank_0, same_on_all_ranks
from nbdist.errors import WorldError

__all__ = ["Pipeline", "pipeline"]

SHORT = {"zbv": "ZBVZeroBubble", "zerobubble": "InterleavedZeroBubble"}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SHAPES_KEPT = 4  # batch shapes whose buffers are kept

LEARNS_UNDER_AUTOCAST = hasattr(PipelineStage, "_compute_outputs")

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def pipeline(
    stages: Sequence[nn.Module],
    schedule: str = "1F1B",
    n_microbatches: int | None = None,
    *,
    dims: ParallelDims | None = None,
    tp_plan: Mapping[str, Any] | None = None,
    mixed_precision: Any = None,
    **torch_options: Any,
) -> Pipeline:
    """Put consecutive stages of a model on different ranks; micro-batches flow through them.

    A collective: every rank gives all stages, the same ones, and keeps its own. What comes back is the model for
    ``nbdist.Trainer``; its state_dict has the names of ``nn.Sequential(*stages)``, those of this rank's stages.

    Parameters
    ----------
    stages : list of torch.nn.Module
        Each takes what the one before gives: a tensor, or several.
    schedule : str
        With one stage per rank "1F1B" or "GPipe"; with two or more "Interleaved1F1B", "LoopedBFS",
        "InterleavedZeroBubble"; with two in the shape of a V "ZBV", "DualPipeV".
    n_microbatches : int, optional
        Equal parts that each batch is cut into, at least as many as stages (the default).
    dims : ParallelDims, optional
        With data or tensor parallelism; by default the stages take the whole world.
    tp_plan, mixed_precision, **torch_options
        As in ``nbdist.parallelize``, for each stage. Names in ``tp_plan`` are those within a stage.

    Raises
    ------
    ValueError
        A number of stages or of micro-batches that the schedule cannot run; nothing has been sent then.

    Examples
    --------
    >>> model = nbdist.pipeline([Front(), Back()], schedule="1F1B", n_microbatches=4)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> trainer = nbdist.Trainer(model, optimizer, loss_fn, loader)
    """
    if not stages or not all(isinstance(stage, nn.Module) for stage in stages):
        raise TypeError("pipeline() takes a list of torch.nn.Module, one per stage.")
    if not dist.is_initialized():
        raise WorldError("No process group. Start one with %cluster start, or torch.distributed.init_process_group().")
    world = dist.get_world_size()
    dims = (dims or ParallelDims(pp=world, dp_shard=1)).resolve(world)
    count = len(stages)
    kind = _schedule_named(schedule)
    _check_counts(kind, count, dims.pp, n_microbatches)
    for stage in stages:
        same_on_all_ranks(stage)
    layout = lay_out("dims", dims)
    for stage in stages:
        give_weights_of_rank_0(stage.to(device()))
    owners = [_owner(kind, index, count, dims.pp) for index in range(count)]
    _check_shares(stages, owners)
    mine: dict[int, nn.Module] = {}
    if dims.dp_shard > 1:
        # gathered for each micro-batch otherwise
        torch_options.setdefault("reshard_after_forward", False)
    for index, stage in enumerate(stages):
        if owners[index] == layout.place("pp"):
            mine[index] = parallel.spread(stage, layout, tp_plan, mixed_precision, torch_options, whole=False)
    parallel.align_random_states(layout)
    model = Pipeline(mine, owners, kind, n_microbatches or count, layout)
    remember(model, layout)
    return model


class Pipeline(nn.Module):
    """This rank's stages, and the schedule that runs them together with the others'. Made by ``pipeline``."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        owners: list[int],
        kind: type[Any],
        n_microbatches: int,
        layout: Layout,
    ) -> None:
        super().__init__()
        for index, stage in stages.items():
            self.add_module(str(index), stage)
        self.n_microbatches = n_microbatches
        self._owners = owners
        self._kind = kind
        self._layout = layout
        self._schedules: dict[Any, Any] = {}
        self._held = False
        self._schedule_for(())  # torch's own refusals, before anything is sent

    def __repr__(self) -> str:
        mine = ", ".join(name for name, _ in self.named_children())
        return (
            f"<Pipeline {self._kind.__name__.removeprefix('Schedule')}, {len(self._owners)} stages, "
            f"{self.n_microbatches} micro-batches, here: {mine}>"
        )

    def forward(self, inputs: Any) -> Any:
        """Run a batch through all stages, one after another, without gradients.

        Every rank of the pipeline calls it with the same batch.

        Returns
        -------
        Any
            The outputs, on the rank of the last stage; None on the others.
        """
        parallel.check_group(self)
        if torch.is_grad_enabled():
            raise RuntimeError("A pipeline trains by forward_backward(), as Trainer does. Call it under no_grad().")
        me, last = self._layout.place("pp"), len(self._owners) - 1
        group = self._layout.group_of("pp")
        value: Any = inputs
        for index, owner in enumerate(self._owners):
            if owner != me:
                continue
            if index > 0 and self._owners[index - 1] != me:
                value = _receive(self._owners[index - 1], group)
            stage = self.get_submodule(str(index))
            value = stage(*value) if isinstance(value, tuple) else stage(value)
            if index < last and self._owners[index + 1] != me:
                _send(value, self._owners[index + 1], group)
        return value if self._owners[last] == me else None

    def forward_backward(
        self,
        inputs: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        factor: float | torch.Tensor = 1.0,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = lambda: _NOTHING,
    ) -> torch.Tensor:
        """Add the gradient of a batch's mean loss, times ``factor``; give the loss, on all ranks of the pipeline.

        Raises
        ------
        ValueError
            The batch does not divide into the micro-batches; nothing has been sent then.

        Examples
        --------
        >>> loss = model.forward_backward(inputs, targets, nn.functional.cross_entropy)
        >>> optimizer.step(); optimizer.zero_grad()
        """
        parallel.check_group(self)
        self._check_divides(inputs)
        seen: list[torch.Tensor] = []

        def scaled_loss(outputs: Any, targets: Any) -> torch.Tensor:
            with autocast():
                loss = loss_fn(outputs, targets)
            if loss.ndim:
                raise ValueError(f"loss_fn gives one number, the mean over the batch; got shape {tuple(loss.shape)}.")
            seen.append(loss.detach())
            return loss * (factor / self.n_microbatches)

        if not LEARNS_UNDER_AUTOCAST:
            with autocast():
                if torch.is_autocast_enabled(device().type):
                    raise ValueError(
                        f"torch {torch.__version__} learns the shapes of a pipeline in fp32: "
                        "take precision='fp32', or a torch of 2.13."
                    )
        schedule = self._schedule_for((_shapes(inputs), _shapes(targets)))
        schedule._loss_fn = scaled_loss
        for stage in self._stages_of(schedule):
            stage.held, stage.autocast = self._held, autocast
        me = self._layout.place("pp")
        feeds = (inputs,) if self._owners[0] == me else ()
        ends = self._owners[-1] == me
        schedule.step(*feeds, return_outputs=False, **({"target": targets, "losses": []} if ends else {}))
        # torch asks for the loss once more when it learns the shapes: the last ones count
        loss = torch.stack(seen[-self.n_microbatches :]).mean().float() if ends else torch.zeros((), device=device())
        group = self._layout.group_of("pp")
        if group is not None:
            dist.broadcast(loss, group_src=self._owners[-1], group=group)
        return loss

    def hold_gradients(self, hold: bool) -> None:
        """Add gradients up on this rank, without reduction over the data-parallel ranks."""
        self._held = hold

    def _check_divides(self, inputs: Any) -> None:
        size = first_tensor_length(inputs)
        if size is not None and size % self.n_microbatches:
            fit = [n for n in range(len(self._owners), size + 1) if size % n == 0]
            use = (
                f"use n_microbatches {', '.join(map(str, fit))}" if fit else f"use at least {len(self._owners)} samples"
            )
            raise ValueError(
                f"A batch of {size} is not divisible by {self.n_microbatches} micro-batches: {use}, or drop_last=True."
            )

    def _schedule_for(self, shapes: Any) -> Any:
        """Give the schedule for batches of these shapes: torch fixes its buffers at the first one."""
        if shapes not in self._schedules:
            self._schedules.pop((), None)
            while len(self._schedules) >= SHAPES_KEPT:
                del self._schedules[next(iter(self._schedules))]
            group = self._layout.group_of("pp")
            stages = [
                _Stage(module, int(index), len(self._owners), device(), group=group)
                for index, module in self.named_children()
            ]
            single = issubclass(self._kind, PipelineScheduleSingle)
            self._schedules[shapes] = self._kind(
                stages[0] if single else stages,
                n_microbatches=self.n_microbatches,
                loss_fn=lambda outputs, targets: outputs,
                scale_grads=False,
            )
        return self._schedules[shapes]

    @staticmethod
    def _stages_of(schedule: Any) -> list[Any]:
        return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages


class _Stage(PipelineStage):
    """torch's stage, which can hold the reduction over data-parallel ranks back until a window of batches is whole."""

    held = False
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = staticmethod(lambda: _NOTHING)

    def _compute_outputs(self, *args: Any, module: nn.Module, **kwargs: Any) -> Any:
        # torch runs a stage once to learn its shapes, with zeros: in the precision of the real passes, or the next
        # stage would take bf16 for fp32; and leaving no trace in running statistics or random numbers
        before = [(buffer, buffer.clone()) for buffer in module.buffers()]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self.autocast():
            outputs = super()._compute_outputs(*args, module=module, **kwargs)
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        return outputs

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward and not self.held)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self.held:
            super().perform_reduce_grad(grad_scale_factor)


def _schedule_named(name: str) -> type[Any]:
    try:
        kind: type[Any] = get_schedule_class(SHORT.get(name.lower(), name))
    except ValueError:
        known = "1F1B, GPipe, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBV, DualPipeV"
        raise ValueError(f"Unknown schedule {name!r}. Known: {known}.") from None
    return kind


def _check_counts(kind: type[Any], count: int, pp: int, n_microbatches: int | None) -> None:
    name = kind.__name__.removeprefix("Schedule")
    if issubclass(kind, PipelineScheduleSingle):
        if count != pp:
            raise ValueError(f'"{name}" holds one stage per rank: {count} stages ≠ pp ({pp}).')
    elif name in V_SHAPED:
        if count != 2 * pp:
            raise ValueError(f'"{name}" holds two stages per rank: {count} stages ≠ 2 × pp ({pp}).')
    elif count % pp or count < 2 * pp:
        raise ValueError(f'"{name}" holds two or more stages per rank: {count} stages, pp ({pp}).')
    if n_microbatches is not None and n_microbatches < count:
        raise ValueError(f"n_microbatches ({n_microbatches}) < {count} stages: use n_microbatches >= {count}.")


def _check_shares(stages: Sequence[nn.Module], owners: Sequence[int]) -> None:
    """Refuse a rank with nothing to train beside others that have: no optimizer of torch's takes an empty list."""
    trains = [any(p.requires_grad for p in stage.parameters()) for stage in stages]
    for rank in sorted(set(owners)):
        held = [index for index, owner in enumerate(owners) if owner == rank]
        if any(trains) and not any(trains[index] for index in held):
            named = f"Stage {held[0]} has" if len(held) == 1 else f"Stages {' and '.join(map(str, held))} have"
            raise ValueError(f"{named} no parameter that requires a gradient. Join it with a neighbouring stage.")


def _owner(kind: type[Any], index: int, count: int, pp: int) -> int:
    """Give the pipeline rank that holds a stage: they go round in a loop, or there and back in a V."""
    if kind.__name__.removeprefix("Schedule") in V_SHAPED:
        return min(index, count - 1 - index)
    return index % pp


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(part) for part in value)
    return None


def _send(value: Any, to: int, group: Any) -> None:
    tensors = value if isinstance(value, tuple) else (value,)
    sending.send([isinstance(value, tuple), [(tuple(t.shape), t.dtype) for t in tensors]], to, group=group)
    for tensor in tensors:
        dist.send(tensor.contiguous(), group_dst=to, group=group)


def _receive(source: int, group: Any) -> Any:
    is_tuple, shapes = sending.receive(source, group=group)
    tensors = [torch.empty(shape, dtype=dtype, device=device()) for shape, dtype in shapes]
    for tensor in tensors:
        dist.recv(tensor, group_src=source, group=group)
    return tuple(tensors) if is_tuple else tensors[0]
