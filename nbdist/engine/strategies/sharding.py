"""Sharding by torch's ``fully_shard``: block by block, so that only one block's weights are whole at a time."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

__all__ = [
    "FSDP_OPTIONS",
    "blocks_of",
    "forget_unreduced",
    "precision_policy",
    "replicate_over",
    "shard_over",
    "shards_of",
    "warn_of_early_optimizers",
]

FSDP_OPTIONS = (frozenset(inspect.signature(fully_shard).parameters) | {"block"}) - {"module", "mesh", "mp_policy"}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard_over(
    model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None, options: dict[str, Any]
) -> None:
    """Shard in place over a 1-D mesh, or over a 2-D one: replicated along its first axis, sharded along its second."""
    options = dict(options)
    _check_offload(mesh, options)
    _quiet_about_views()
    if policy is not None:
        options["mp_policy"] = policy
    for part in blocks_of(model, options.pop("block", None)):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def replicate_over(
    model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None, options: dict[str, Any]
) -> None:
    """Average gradients over a 1-D mesh, of a model whose layers may be split over another: DDP x TP."""
    # DistributedDataParallel with a mesh renames the parameters that are DTensors
    from torch.distributed._composable.replicate_with_fsdp import replicate

    options = dict(options)
    _quiet_about_views()
    blocks = blocks_of(model, options.pop("block", None))
    if options:
        raise ValueError(f"Replicating over a mesh has no option {sorted(options)[0]!r}.")
    known: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    for part in blocks:
        replicate(part, mesh=mesh, **known)
    replicate(model, mesh=mesh, **known)


def precision_policy(asked: Any) -> MixedPrecisionPolicy | None:
    """Give torch's policy for "bf16", "fp16" (gradients are reduced in fp32), a dtype, or a policy."""
    if asked is None or isinstance(asked, MixedPrecisionPolicy):
        return asked
    dtype = HALVES.get(asked, asked) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f'mixed_precision is "bf16", "fp16", a torch dtype or a MixedPrecisionPolicy, got {asked!r}.')
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def blocks_of(model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...] | None = None) -> list[nn.Module]:
    """Give the parts that are gathered one at a time.

    Those of class ``kind``; by default the composite children of the outermost ModuleList, ModuleDict or Sequential:
    the layers of a transformer, the stages of a ResNet. A part that shares a parameter with the rest stays with it.
    """
    uses = Counter(id(p) for part in model.modules() for p in part._parameters.values() if p is not None)
    chosen = []
    for part in _outermost(model, kind):
        inside = Counter(id(p) for m in part.modules() for p in m._parameters.values() if p is not None)
        if inside and all(uses[key] == count for key, count in inside.items()):
            chosen.append(part)
    return chosen


def _outermost(model: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...] | None) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, kind) if kind is not None else _is_block(model, child):
            yield child
        else:
            yield from _outermost(child, kind)


def _is_block(parent: nn.Module, child: nn.Module) -> bool:
    holds_blocks = isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
    return holds_blocks and not is_container and next(child.children(), None) is not None


def forget_unreduced(model: nn.Module) -> None:
    """Drop gradients that were added up without reduction: ``zero_grad`` sees those of the shards only."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(True, recurse=False)
    for shard in shards_of(model):
        shard.unsharded_accumulated_grad = None
        if hasattr(shard, "_unsharded_param"):
            shard._unsharded_param.grad = None


def shards_of(model: nn.Module) -> list[Any]:
    """Give torch's ``FSDPParam`` of each parameter that ``fully_shard`` or ``replicate`` looks after."""
    shards: list[Any] = []
    for part in model.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                shards += group.fsdp_params if group is not None else ()
    return shards


def warn_of_early_optimizers(model: nn.Module) -> None:
    """Warn when an optimizer holds the parameters that sharding is about to replace."""
    mine = {id(p) for p in model.parameters()}
    for thing in gc.get_objects():
        # type(), not isinstance(): the latter asks lazy objects for their __class__, and wakes them
        if not issubclass(type(thing), torch.optim.Optimizer):
            continue
        if any(id(p) in mine for group in getattr(thing, "param_groups", ()) for p in group["params"]):
            warnings.warn(
                f"An {type(thing).__name__} of this model was made before sharding: it would train nothing. "
                "Make it anew from model.parameters().",
                stacklevel=4,
            )
            return


def _quiet_about_views() -> None:
    # every Linear on three axes gives a view: torch warns of nearly each model that an in-place operation on its
    # outputs would lose their gradient
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _check_offload(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    if options.get("offload_policy") is not None and mesh.device_type == "cpu":
        raise ValueError(
            "offload_policy moves shards from a GPU to its host. On CPU ranks they are there: leave it out."
        )
