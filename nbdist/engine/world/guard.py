"""Collectives checked before they run: each rank tells the others what it is about to call.

The telling is an all_gather of a small fixed-size message on the same group, so it needs no other group and cannot
itself mismatch. It replaces ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, with which building DDP on gloo ends the process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbdist.engine.cells import runner
from nbdist.errors import CollectiveMismatch

__all__ = ["switch"]

CHECKED = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
# what a rank gives is the same everywhere for these; for the others only the op is compared
SAME_SHAPE = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
MESSAGE_BYTES = 256

_all_gather = c10d.all_gather
_originals: dict[str, Callable[..., Any]] = {}
_inside = False


def switch(on: bool) -> bool:
    """Check collectives from now on, or stop it; give what it was before."""
    was = bool(_originals)
    if on and not was:
        for name in CHECKED:
            if hasattr(c10d, name):
                _originals[name] = original = getattr(c10d, name)
                checked = _checked(name, original)
                for module in (c10d, dist):
                    if getattr(module, name, None) is original:
                        setattr(module, name, checked)
    elif not on and was:
        for name, original in _originals.items():
            for module in (c10d, dist):
                if getattr(getattr(module, name, None), "__wrapped__", None) is original:
                    setattr(module, name, original)
        _originals.clear()
    return was


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check_then_call(*args: Any, **kwargs: Any) -> Any:
        global _inside
        group = kwargs.get("group")
        if not _inside and dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER:
            _inside = True  # torch's own collectives call each other
            try:
                _compare(name, args, kwargs, group)
            finally:
                _inside = False
        return original(*args, **kwargs)

    return check_then_call


def _compare(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> None:
    """Tell the group what this rank is about to call; raise on every rank where the ranks differ."""
    line, _ = runner.where(sys._getframe(2))
    call = _describe(name, args, kwargs)
    text = f"{call}|{line}".encode()[:MESSAGE_BYTES]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    mine = mine.to(device)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    _all_gather(theirs, mine, group=group)
    told = [bytes(each.cpu().tolist()).rstrip(b"\0").decode(errors="replace").partition("|") for each in theirs]
    if len({call for call, _, _ in told}) > 1:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        parts = [f"rank {rank}: {call} at {line or '?'}" for rank, (call, _, line) in zip(ranks, told, strict=True)]
        raise CollectiveMismatch("; ".join(parts))


def _describe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Write what must be equal on all ranks: ``all_reduce [4] float32``."""
    value = (
        args[0] if args else next((kwargs[k] for k in ("tensor", "output_tensor", "tensor_list") if k in kwargs), None)
    )
    if name not in SAME_SHAPE or not isinstance(value, torch.Tensor):
        return name
    text = f"{name} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if name in ("broadcast", "reduce"):
        root = kwargs.get("src", kwargs.get("dst", args[1] if len(args) > 1 else None))
        text += f" root {root}"
    op = kwargs.get("op")
    return f"{text} {op}" if op is not None else text
