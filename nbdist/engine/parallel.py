"""``parallelize``: one word makes a model train on all ranks, by torch's own parts."""

from __future__ import annotations

import hashlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine import process_group
from nbdist.errors import WorldError

__all__ = ["data_rank", "device", "follow", "follow_group", "is_stale", "parallelize", "unwrap"]

STRATEGIES = ("ddp",)
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
    model: nn.Module,
    strategy: str = "ddp",
    *,
    tp_plan: Mapping[str, Any] | None = None,
    mixed_precision: Any = None,
    comm_hook: Callable[..., Any] | tuple[Any, Callable[..., Any]] | None = None,
    **torch_options: Any,
) -> nn.Module:
    """Move the model to this rank's device and make its training one training over all ranks.

    A collective: every rank calls it, with the same model. With ``"ddp"`` the weights of rank 0 are given to all.
    A model that was wrapped before is unwrapped and wrapped anew.

    Parameters
    ----------
    model : torch.nn.Module
        The same architecture on every rank.
    strategy : str
        ``"ddp"``: each rank holds the whole model; gradients are averaged during the backward pass.
    comm_hook : callable or (state, callable), optional
        A DDP communication hook of torch's form ``hook(state, bucket) -> Future[Tensor]``.
    **torch_options
        Handed to ``torch.nn.parallel.DistributedDataParallel``: bucket_cap_mb, gradient_as_bucket_view,
        static_graph, find_unused_parameters, ...

    Returns
    -------
    torch.nn.Module
        The model to train with; the optimizer may hold the parameters of either, they are the same tensors.

    Raises
    ------
    ValueError
        Unknown strategy or option; or the models of two ranks differ: the message names the first parameter.
    WorldError
        There is no process group.

    Examples
    --------
    >>> model = nbdist.parallelize(Net(), "ddp")
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize() takes a torch.nn.Module, got {type(model).__name__}.")
    if strategy not in STRATEGIES:
        raise ValueError(f"Unknown strategy {strategy!r}. Known: {', '.join(map(repr, STRATEGIES))}.")
    if tp_plan is not None:
        raise ValueError('tp_plan is for tensor parallelism, strategy "ddp" splits no layer. Leave it out.')
    if mixed_precision is not None:
        raise ValueError('mixed_precision is not for "ddp". Use nbdist.Trainer(..., precision="bf16").')
    unknown = sorted(torch_options.keys() - DDP_OPTIONS)
    if unknown:
        raise ValueError(f'Strategy "ddp" has no option {unknown[0]!r}. Known: {", ".join(sorted(DDP_OPTIONS))}.')
    if not dist.is_initialized():
        raise WorldError("No process group. Start one with %cluster start, or torch.distributed.init_process_group().")
    inner = unwrap(model).to(device())
    _same_on_all_ranks(inner)
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        raise ValueError('No parameter of the model requires a gradient: there is nothing for "ddp" to average.')
    if isinstance(model, DDP):
        # its hooks sit on the same parameters and would average a second time
        model.reducer._remove_autograd_hooks()
    wrapped = DDP(inner, **torch_options)
    if comm_hook is not None:
        state, hook = comm_hook if isinstance(comm_hook, tuple) else (None, comm_hook)
        wrapped.register_comm_hook(state, hook)
    _wrapped.add(wrapped)
    return wrapped


def unwrap(model: nn.Module) -> nn.Module:
    """Give the user's own module inside a DDP wrapper (and inside ``torch.compile``'s)."""
    while True:
        inner = model.module if isinstance(model, DDP) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_stale(model: nn.Module) -> bool:
    """Tell whether the model was wrapped in a process group that has been left since."""
    if not isinstance(model, DDP) or not dist.is_initialized():
        return False
    try:
        dist.get_process_group_ranks(model.process_group)
    except (KeyError, ValueError):  # which of the two depends on the release of torch
        return True
    return False


def follow_group() -> None:
    """Put every live model that ``parallelize`` made into the current process group, in place.

    Local, no collective: called on each rank after the group was formed anew, so that the next cell can go on with
    the model that it has.
    """
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


def device() -> torch.device:
    """Give this rank's device: its GPU when there is one for it, else the CPU."""
    backend = dist.get_backend() if dist.is_initialized() else ""
    return process_group.device(int(os.environ.get("LOCAL_RANK", "0")), backend)


def data_rank() -> tuple[int, int]:
    """Give (rank, size) among the ranks that see different data."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _same_on_all_ranks(model: nn.Module) -> None:
    """Compare names, shapes and dtypes over the ranks, and name the first that differs on all of them.

    Tensors whose size every rank knows, no objects: whatever the models look like, each rank takes part in the same
    collectives and none is left waiting.
    """
    lines = list(_described(model))
    text = "\n".join(lines).encode()
    digest = hashlib.sha256(text).digest()
    halves = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8)]
    mine = torch.tensor([*halves, len(text)], dtype=torch.int64, device=device())
    world = dist.get_world_size()
    table = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(table, mine)
    rows = torch.stack(table).tolist()
    if all(row == rows[0] for row in rows):
        return
    longest = max(length for *_, length in rows)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device())
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(padded.device)
    texts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(texts, padded)
    models = [bytes(t[:n].cpu().tolist()).decode().split("\n") for t, (*_, n) in zip(texts, rows, strict=True)]
    raise ValueError(_first_difference(models))


def _described(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        frozen = "" if parameter.requires_grad else " frozen"
        yield f"parameter {name}\t{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}{frozen}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name}\t{tuple(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"


def _first_difference(models: list[list[str]]) -> str:
    """Say in one line where the model of some rank differs first from rank 0's."""
    first: tuple[int, int] | None = None  # (line, rank)
    for rank, lines in enumerate(models[1:], 1):
        for i in range(max(len(lines), len(models[0]))):
            if lines[i : i + 1] != models[0][i : i + 1]:
                if first is None or i < first[0]:
                    first = (i, rank)
                break
    assert first is not None, "the hashes differ, so some line does"
    line, other = first
    groups: dict[str, list[int]] = {}
    for rank, lines in enumerate(models):
        groups.setdefault(lines[line] if line < len(lines) else "", []).append(rank)
    zero = models[0][line] if line < len(models[0]) else ""
    theirs = models[other][line] if line < len(models[other]) else ""
    return (
        f"The model is not the same on all ranks: {_shown(zero, groups[zero])}, {_shown(theirs, groups[theirs])}. "
        "Build it from the same values everywhere."
    )


def _shown(line: str, ranks: list[int]) -> str:
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if not line:
        return f"nothing there on {where}"
    name, what = line.split("\t")
    return f"{name} is {what} on {where}"
