"""``parallelize``: one word makes a model train on all ranks, by torch's own parts."""

from __future__ import annotations

import inspect
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.strategies import hooks, sending
from nbdist.engine.strategies.changes import watch_changes, watch_shards
from nbdist.engine.strategies.dims import (
    Layout,
    ParallelDims,
    data_rank,
    device,
    forget_layouts,
    is_fsdp,
    lay_out,
    layout_of,
    mesh,
    remember,
)
from nbdist.engine.strategies.sameness import give_weights_of_rank_0, same_on_all_ranks
from nbdist.errors import WorldError

__all__ = [
    "ParallelDims",
    "align_random_states",
    "check_group",
    "data_rank",
    "device",
    "follow",
    "follow_group",
    "is_parallel",
    "is_stale",
    "layout_of",
    "mesh",
    "parallelize",
    "spread",
    "unwrap",
]

STRATEGIES = {
    "ddp": ParallelDims(dp_replicate=-1, dp_shard=1),
    "zero1": ParallelDims(dp_replicate=-1, dp_shard=1),
    "fsdp": ParallelDims(),
}
DDP_OPTIONS = frozenset(inspect.signature(DDP.__init__).parameters) - {
    "self",
    "module",
    "device_ids",
    "output_device",
    "dim",
    "process_group",
    "device_mesh",
    "mixed_precision",
    "check_reduction",
}

_wrapped: weakref.WeakSet[DDP] = weakref.WeakSet()


def parallelize(
    model: nn.Module | Sequence[nn.Module],
    strategy: str | ParallelDims = "ddp",
    *,
    tp_plan: Mapping[str, Any] | None = None,
    mixed_precision: Any = None,
    comm_hook: str | Callable[..., Any] | tuple[Any, Callable[..., Any]] | hooks.CommHook | None = None,
    **torch_options: Any,
) -> nn.Module:
    """Move the model to this rank's device and make its training one training over all ranks.

    A collective: every rank calls it, with the same model; the weights of rank 0 are given to all. A model that was
    wrapped by DDP before is unwrapped and wrapped anew. All strategies but "ddp" and "zero1" replace the parameters:
    make the optimizer afterwards.

    Parameters
    ----------
    model : torch.nn.Module
        The same architecture on every rank; a list of stages where ``pp`` is above 1 (see ``nbdist.pipeline``).
    strategy : str or ParallelDims
        ``"ddp"``: each rank holds the whole model; gradients are averaged during the backward pass.
        ``"zero1"``: as "ddp", with the optimizer's state shared out: make it by ``nbdist.zero1``.
        ``"fsdp"``: weights, gradients and optimizer state are sharded; each block is gathered when it is used.
        ``ParallelDims``: hybrids. ``dp_replicate`` and ``dp_shard`` above 1 are HSDP, ``tp`` splits layers.
    tp_plan : dict, optional
        Name of a layer (``"blocks.*.up"``) to a style of ``torch.distributed.tensor.parallel``: ColwiseParallel,
        RowwiseParallel, SequenceParallel, ... A last layer with ``output_layouts=Shard(-1), use_local_output=False``
        keeps its outputs sharded, and the Trainer computes the loss by torch's ``loss_parallel``.
    mixed_precision : optional
        For sharded models: "bf16", "fp16", a dtype or ``torch.distributed.fsdp.MixedPrecisionPolicy``.
    comm_hook : str, CommHook, callable or (state, callable), optional
        For DDP: "fp16", "bf16", "powersgd", what ``nbdist.comm_hook`` made, or a hook of torch's form
        ``hook(state, bucket) -> Future[Tensor]``.
    **torch_options
        Handed to ``DistributedDataParallel`` (bucket_cap_mb, gradient_as_bucket_view, static_graph,
        find_unused_parameters, ...) or ``fully_shard`` (reshard_after_forward, offload_policy, ...). ``block`` is the
        class of the parts to gather one at a time, by default the layers in the model's outermost lists.

    Returns
    -------
    torch.nn.Module
        The model to train with: a DDP wrapper around the given one, or the given one, sharded in place.

    Raises
    ------
    ValueError
        Unknown strategy or option, sizes that do not multiply to the world or do not divide a layer; or the models of
        two ranks differ: the message names the first parameter.
    WorldError
        There is no process group.

    Examples
    --------
    >>> model = nbdist.parallelize(Net(), "fsdp")
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> trainer = nbdist.Trainer(model, optimizer, loss_fn, loader)
    """
    if isinstance(model, (list, tuple)):
        from nbdist.engine.strategies.pipeline import pipeline

        dims = strategy if isinstance(strategy, ParallelDims) else None
        if comm_hook is not None:
            raise ValueError('comm_hook is for "ddp" and "zero1": the stages of a pipeline do not reduce by buckets.')
        return pipeline(model, dims=dims, tp_plan=tp_plan, mixed_precision=mixed_precision, **torch_options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize() takes a torch.nn.Module, got {type(model).__name__}.")
    name, dims = _named(strategy)
    if dims.pp > 1:
        raise ValueError(f"pp ({dims.pp}) takes the model in stages: nbdist.pipeline([...], dims=...).")
    if dist.is_initialized():
        dims = dims.resolve(dist.get_world_size())
        if dims.dp_replicate > 1 and dims.dp_shard == dims.tp == 1:
            name = "zero1" if name == "zero1" else "ddp"
    _check_options(name, dims, tp_plan, mixed_precision, comm_hook, torch_options)
    if not dist.is_initialized():
        raise WorldError("No process group. Start one with %cluster start, or torch.distributed.init_process_group().")
    inner = unwrap(model)
    if is_fsdp(inner) or (layout_of(inner) is not None and dims.tp > 1):
        raise ValueError("The model is sharded already, and torch cannot undo that. Parallelize a newly made one.")
    is_empty = any(parameter.is_meta for parameter in inner.parameters())
    if not is_empty:
        inner.to(device())
    same_on_all_ranks(inner)
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        raise ValueError(f'No parameter of the model requires a gradient: there is nothing for "{name}" to average.')
    if isinstance(model, DDP):
        _take_off(model, comm_hook)
    if dims.tp > 1:
        from nbdist.engine.strategies import tensor

        tensor.matched(inner, tp_plan, dims.tp)  # before anything is changed or sent
    layout = lay_out(name, dims)
    if layout.stays_put:
        from nbdist.engine.strategies import sharding

        sharding.warn_of_early_optimizers(inner)
        if not is_empty:
            give_weights_of_rank_0(inner)
    elif is_empty:
        raise ValueError(
            f'The model is on the meta device. Give it weights, or shard it by "fsdp" instead of "{name}".'
        )
    spreaded = spread(inner, layout, tp_plan, mixed_precision, torch_options, comm_hook=comm_hook)
    if is_empty:
        spreaded.to_empty(device=device())
        warnings.warn("The weights are empty: load them by nbdist.load_checkpoint(dir, model=model).", stacklevel=2)
    align_random_states(layout)
    remember(spreaded, layout)
    if layout.stays_put:
        spreaded.register_forward_pre_hook(_refuse_a_left_group, prepend=True)
    else:
        watch_changes(spreaded, inner)
    return spreaded


def spread(
    model: nn.Module,
    layout: Layout,
    tp_plan: Mapping[str, Any] | None,
    mixed_precision: Any,
    torch_options: dict[str, Any],
    *,
    comm_hook: Any = None,
    whole: bool = True,
) -> nn.Module:
    """Apply tensor parallelism, then data parallelism, to a model or to one stage of it."""
    dims, axes = layout.dims, layout.mesh
    if not layout.stays_put:
        return _wrapped_by_ddp(model, comm_hook, torch_options)
    # these import another second's worth of torch
    from nbdist.engine.strategies import sharding, tensor

    if dims.tp > 1:
        tensor.split_layers(model, axes["tp"], tp_plan, whole=whole)
    policy = sharding.precision_policy(mixed_precision)
    if layout.strategy == "fsdp" or dims.dp_shard > 1:
        names = ("dp_replicate", "dp_shard") if dims.dp_replicate > 1 else ("dp_shard",)
        sharding.shard_over(model, axes[names], policy, torch_options)
    elif dims.dp_replicate > 1:
        sharding.replicate_over(model, axes["dp_replicate"], policy, torch_options)
    watch_shards(model, sharding.shards_of(model))
    return model


def _wrapped_by_ddp(model: nn.Module, comm_hook: Any, torch_options: dict[str, Any]) -> nn.Module:
    wrapped = DDP(model, **torch_options)
    if comm_hook is not None:
        hooks.register(wrapped, comm_hook)
    _wrapped.add(wrapped)
    return wrapped


def unwrap(model: nn.Module) -> nn.Module:
    """Give the user's own module inside a DDP wrapper (and inside ``torch.compile``'s)."""
    while True:
        inner = model.module if isinstance(model, DDP) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_parallel(model: nn.Module) -> bool:
    """Tell whether something averages this model's gradients or holds its shards, ours or the user's own."""
    inner = getattr(model, "_orig_mod", model)
    return isinstance(inner, DDP) or is_fsdp(inner) or layout_of(model) is not None


def is_stale(model: nn.Module) -> bool:
    """Tell whether the model was wrapped in a process group that has been left since."""
    layout = layout_of(model)
    if layout is not None and layout.stays_put:
        return layout.is_stale
    if not isinstance(model, DDP) or not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(model.process_group)
    except (KeyError, ValueError):  # which of the two depends on the release of torch
        return True
    return False


def check_group(model: nn.Module) -> None:
    """Refuse a model whose shards are in a process group that was left.

    Raises
    ------
    WorldError
        It could only fail, or wait for ever, in its first collective.
    """
    layout = layout_of(model)
    if layout is not None and layout.stays_put and layout.is_stale:
        raise WorldError(
            "The model is sharded over a process group that was left, and its shards cannot follow. Parallelize a "
            "newly made model, make its optimizer, and nbdist.load_checkpoint() into them."
        )


def follow_group() -> None:
    """Put every live model that ``parallelize`` made into the current process group, in place.

    Local, no collective: called on each rank after the group was formed anew, so that the next cell can go on with
    the model that it has. Sharded models stay behind: ``check_group`` refuses them.
    """
    forget_layouts()
    for model in list(_wrapped):
        follow(model)


def follow(model: nn.Module) -> bool:
    """Move one DDP model whose group is gone to the default group; tell whether it had to move."""
    if not isinstance(model, DDP) or not is_stale(model):
        return False
    model.zero_grad(set_to_none=True)  # of the step that was cut off
    model.require_backward_grad_sync = True  # it may have been cut off within no_sync()
    model._update_process_group(dist.group.WORLD)
    return True


def align_random_states(layout: Layout) -> None:
    """Give ranks that see the same batch the same random numbers: their dropout and augmentation must agree."""
    numpy = sys.modules.get("numpy")
    for axis in ("pp", "tp"):
        group = layout.group_of(axis)
        if group is None:
            continue
        theirs = None if numpy is None else numpy.random.get_state()
        states: list[Any] = [
            random.getstate(),
            torch.get_rng_state(),
            None if theirs is None else (theirs[0], torch.from_numpy(theirs[1].astype("int64")), *theirs[2:]),
        ]
        states = sending.broadcast(states, 0, group=group)
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if device().type == "cuda":
            torch.cuda.manual_seed(torch.initial_seed())
        if numpy is not None and states[2] is not None:
            name, keys, *rest = states[2]
            numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))


def _named(strategy: str | ParallelDims) -> tuple[str, ParallelDims]:
    if isinstance(strategy, ParallelDims):
        return "dims", strategy
    if strategy not in STRATEGIES:
        raise ValueError(
            f"Unknown strategy {strategy!r}. Known: {', '.join(map(repr, STRATEGIES))}, ParallelDims(...)."
        )
    return strategy, STRATEGIES[strategy]


def _check_options(
    name: str, dims: ParallelDims, tp_plan: Any, mixed_precision: Any, comm_hook: Any, options: dict[str, Any]
) -> None:
    wraps = name in ("ddp", "zero1")
    called = f'"{name}"' if name in STRATEGIES else repr(dims)
    if tp_plan is not None and dims.tp == 1:
        raise ValueError(f"tp_plan is for tensor parallelism, strategy {called} splits no layer. Leave it out.")
    if mixed_precision is not None and wraps:
        raise ValueError(f'mixed_precision is not for {called}. Use nbdist.Trainer(..., precision="bf16").')
    if comm_hook is not None and not wraps:
        raise ValueError(f'comm_hook is for "ddp" and "zero1": {called} does not reduce by buckets.')
    if wraps:
        known = DDP_OPTIONS
    else:
        from nbdist.engine.strategies.sharding import FSDP_OPTIONS as known
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(f"Strategy {called} has no option {unknown[0]!r}. Known: {', '.join(sorted(known))}.")


def _take_off(model: DDP, new_hook: Any) -> None:
    """Take a DDP wrapper off its module: its hooks would average a second time."""
    old = hooks.hook_of(model)
    new = getattr(new_hook, "name", new_hook)
    if old is not None and new != old.name:
        # a DDP wrapper takes one hook in its life
        warnings.warn(f"The model had the comm_hook {old.name!r}: rewrapped with {new!r}.", stacklevel=3)
    model.reducer._remove_autograd_hooks()


def _refuse_a_left_group(model: nn.Module, inputs: Any) -> None:
    check_group(model)
