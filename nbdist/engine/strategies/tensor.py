"""Tensor parallelism: check a plan of torch's parallel styles against the model, then apply it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

__all__ = ["loss_context", "matched", "split_layers"]

EXAMPLE = 'tp_plan={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}'


def split_layers(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any] | None, *, whole: bool = True) -> None:
    """Split the layers that the plan names over the mesh, in place.

    Parameters
    ----------
    plan : dict
        Name of a layer, in which * stands for one part, to a style of ``torch.distributed.tensor.parallel``.
    whole : bool
        Every name has to be found; False for one stage of a model.

    Raises
    ------
    ValueError
        A name that fits no layer, or a layer whose size does not divide.
    """
    mine = matched(model, plan, mesh.size(), whole=whole)
    if mine:
        parallelize_module(model, mesh, mine)


def matched(model: nn.Module, plan: Mapping[str, Any] | None, size: int, *, whole: bool = True) -> dict[str, Any]:
    """Give the part of the plan that fits this model, and refuse what cannot be split."""
    if not plan:
        raise ValueError(f"tp ({size}) splits the layers that tp_plan names. Give one, e.g. {EXAMPLE}.")
    mine = {}
    for pattern, style in plan.items():
        found = [(name, layer) for name, layer in _layers(model) if _fits(name, pattern)]
        if not found and whole:
            raise ValueError(f"tp_plan names {pattern!r}, and no layer of the model is called so.")
        for name, layer in found:
            _check_divides(name, layer, style, size)
            mine[name] = style  # torch's own * warns of every part that lacks the layer
    return mine


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, layer) for name, layer in model.named_modules() if name or not list(model.children()))


def _fits(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _check_divides(name: str, layer: nn.Module, style: Any, size: int) -> None:
    """Refuse uneven shards: torch would pad or drop, or fail somewhere in the middle of the forward pass."""
    if isinstance(style, ColwiseParallel):
        attribute = "embedding_dim" if isinstance(layer, nn.Embedding) else "out_features"
    elif isinstance(style, RowwiseParallel):
        attribute = "num_embeddings" if isinstance(layer, nn.Embedding) else "in_features"
    else:
        return
    length = getattr(layer, attribute, None)
    if isinstance(length, int) and length % size:
        raise ValueError(
            f"{type(style).__name__} cannot split {name!r}: {attribute} ({length}) does not divide by tp ({size})."
        )


def loss_context(outputs: Any) -> contextlib.AbstractContextManager[Any]:
    """Compute the loss of outputs that are sharded over their classes without gathering them."""
    if isinstance(outputs, DTensor) and any(placement.is_shard() for placement in outputs.placements):
        return loss_parallel()
    return contextlib.nullcontext()
