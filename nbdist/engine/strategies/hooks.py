"""Communication hooks of DDP: gradients travel compressed, and what travels is counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.strategies.powersgd import NamedState

__all__ = ["CommHook", "comm_hook", "hook_of", "register"]

KNOWN = ("fp16", "bf16", "powersgd")
BACKENDS = ("gloo", "nccl")
HookLike = Callable[..., Any]


class CommHook:
    """A hook with the bytes that it has sent. Made by ``comm_hook``.

    Attributes
    ----------
    name : str
        "fp16", "bf16" or "powersgd".
    sent : int
        Bytes of gradients that this rank has given to collectives so far.
    state : object
        What the algorithm keeps, torch's ``PowerSGDState``; None for the others.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.options = options
        self.sent = 0
        self.state: Any = None
        self.named: NamedState | None = None  # the state as a checkpoint takes it

    def __repr__(self) -> str:
        return f"<CommHook {self.name}, {self.sent} bytes sent>"


def comm_hook(name: str, **options: Any) -> CommHook:
    """Make a hook that compresses gradients on their way, for ``parallelize(model, comm_hook=...)``.

    Parameters
    ----------
    name : "fp16", "bf16" or "powersgd"
        Half the bytes, with fewer digits or less range; or low-rank factors of each matrix (lossy, with the error fed
        back into the next step).
    **options
        Of "powersgd", handed to torch's ``PowerSGDState``: ``matrix_approximation_rank`` (1), ``start_powerSGD_iter``
        (steps in full precision before, 5 here), ``use_error_feedback``, ...

    Examples
    --------
    >>> model = nbdist.parallelize(Net(), "ddp", comm_hook="bf16")
    >>> model = nbdist.parallelize(Net(), "ddp", comm_hook=nbdist.comm_hook("powersgd", matrix_approximation_rank=2))
    """
    if name not in KNOWN:
        raise ValueError(f"Unknown comm_hook {name!r}. Known: {', '.join(map(repr, KNOWN))}.")
    if options and name != "powersgd":
        raise ValueError(f"comm_hook {name!r} takes no options, got {sorted(options)[0]!r}.")
    return CommHook(name, options)


def register(wrapped: DDP, hook: str | CommHook | HookLike | tuple[Any, HookLike]) -> None:
    """Register a hook by name, one that ``comm_hook`` made, or one of torch's form."""
    if isinstance(hook, str):
        hook = comm_hook(hook)
    if not isinstance(hook, CommHook):
        state, call = hook if isinstance(hook, tuple) else (None, hook)
        wrapped.register_comm_hook(state, call)
        return
    backend = dist.get_backend(wrapped.process_group)
    if backend not in BACKENDS:
        raise ValueError(f"comm_hook {hook.name!r} runs on {' and '.join(BACKENDS)}, not on {backend!r}.")
    call = _power_sgd(hook, wrapped) if hook.name == "powersgd" else _halved(hook, wrapped)
    call.__annotations__ = {}  # DDP compares them with its own types, and these are strings
    wrapped.register_comm_hook(hook, call)
    wrapped.__dict__["_nbdist_hook"] = hook


def hook_of(model: Any) -> CommHook | None:
    """Give the counting hook of a DDP model, if it has one."""
    hook = model.__dict__.get("_nbdist_hook")
    return hook if isinstance(hook, CommHook) else None


def _halved(hook: CommHook, wrapped: DDP) -> HookLike:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[hook.name]
    # asked for at each call: the model may have followed the world into a new group
    model = weakref.ref(wrapped)

    def halved(hook: CommHook, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        group = model().process_group  # type: ignore[union-attr]
        buffer: torch.Tensor = bucket.buffer()
        # divided before it is sent: a sum over many ranks can leave the range of fp16. torch's own bf16 hook asks for
        # NCCL and a GPU; gloo sums bfloat16 as well
        compressed = buffer.to(dtype).div_(dist.get_world_size(group))
        hook.sent += compressed.numel() * compressed.element_size()
        sent: Any = dist.all_reduce(compressed, group=group, async_op=True)

        def widened(future: Any) -> torch.Tensor:
            buffer.copy_(future.value()[0])
            return buffer

        done: torch.futures.Future[torch.Tensor] = sent.get_future().then(widened)
        return done

    return halved


def _power_sgd(hook: CommHook, wrapped: DDP) -> HookLike:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 5, **hook.options}
    group = wrapped.process_group
    try:
        hook.state = powerSGD_hook.PowerSGDState(None if group is dist.group.WORLD else group, **options)
    except ImportError as error:
        raise ValueError(f"comm_hook 'powersgd' needs NumPy on the ranks: {error}.") from error
    hook.named = named = NamedState(hook.state, wrapped.module)

    def power_sgd(hook: CommHook, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        state = hook.state
        named.follow(bucket)
        size = bucket.buffer().element_size()
        if state.iter < state.start_powerSGD_iter:
            hook.sent += bucket.buffer().numel() * size
            return powerSGD_hook.powerSGD_hook(state, bucket)
        before = state.total_numel_after_compression
        done = powerSGD_hook.powerSGD_hook(state, bucket)
        if dist.get_backend(group) == "gloo":
            # torch's hook sends its second part from a callback, in whichever of gloo's threads ended the first. With
            # several buckets the order then differs between ranks, and they add up what does not belong together
            done.wait()
        hook.sent += (state.total_numel_after_compression - before) * size
        return done

    return power_sgd
