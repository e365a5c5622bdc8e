"""A Trainer as bytes: what ``%cluster repair --copy trainer`` takes from a living rank to a dead one's place."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.cells.interrupts import Interrupts
from nbdist.engine.loading import data
from nbdist.engine.loading.workers import mixed
from nbdist.engine.strategies import hooks, parallel
from nbdist.engine.telemetry.clocks import clock_for
from nbdist.engine.telemetry.recorder import Run

if TYPE_CHECKING:
    from nbdist.engine.steps.training import Trainer

__all__ = ["pack", "unpack"]

# what belongs to one process: made anew on the other side
LEFT_OUT = ("model", "_layout", "_hook", "_interrupts", "_clock", "_run", "_group", "_record", "_gradients")
DDP_OPTIONS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in signature(DDP.__init__).parameters else "broadcast_buffers"
)


def pack(trainer: Trainer) -> bytes:
    """Pickle a Trainer by value, its model without the wrapper.

    Raises
    ------
    TypeError
        For a sharded model: no rank has the whole of it.
    """
    inner = parallel.unwrap(trainer.model)
    if any(type(p).__name__ == "DTensor" or hasattr(p, "placements") for p in inner.parameters()):
        raise TypeError("A sharded model is on no rank whole: nbdist.load_checkpoint() into a newly made one instead.")
    if hasattr(trainer.optimizer, "_param_to_rank"):
        raise TypeError("ZeRO's optimizer state is on no rank whole: nbdist.load_checkpoint() instead.")
    parts = {name: value for name, value in trainer.__dict__.items() if name not in LEFT_OUT}
    parts["copied"] = {
        "wrapping": _wrapping(trainer.model),
        "run": None if trainer._run is None else trainer._run.name,
        "seed": (data._seed, data._same),
    }
    file = io.BytesIO()
    # torch.save and not pickle: a GPU's tensors would be rebuilt on the sender's device number
    torch.save(parts, file, pickle_module=cloudpickle)
    return file.getvalue()


def unpack(trainer: Trainer, packed: bytes) -> None:
    """Fill a bare Trainer from what ``pack`` gave, in the process group of this process. No collective."""
    device = parallel.device()
    parts = torch.load(io.BytesIO(packed), map_location=device, weights_only=False)
    copied = parts.pop("copied")
    trainer.__dict__.update(parts)
    module: nn.Module = trainer._module
    trainer.model = module
    trainer._layout = None  # of replicas, which are all ranks: what holds without one
    if dist.is_initialized() and copied["wrapping"] is not None:
        trainer.model = _wrapped(module, copied["wrapping"])
        parallel._wrapped.add(trainer.model)
    trainer._hook = hooks.hook_of(trainer.model)
    trainer._device = device
    trainer._group = None  # the next step settles with the others where all are
    trainer._interrupts = Interrupts()
    trainer._clock = clock_for(device)
    # the others have numbered this run already, and would not come to do so again
    trainer._run = None if copied["run"] is None else Run(copied["run"])
    trainer._gradients = trainer._new_gradients()
    trainer._open_window()
    k, same = copied["seed"]
    data.seed(k, same)
    # not the numbers that the run began with, once more
    rank, _ = parallel.data_rank()
    torch.manual_seed(mixed(k, 0 if same else rank, trainer.global_step) % 2**63)


def _wrapping(model: nn.Module) -> dict[str, Any] | None:
    if not isinstance(model, DDP):
        return None
    number = {id(p): i for i, (_, p) in enumerate(_reduced(model))}
    buckets = [[number[id(p)] for p in bucket.parameters()] for bucket in model.reducer._get_zeros_like_grad_buckets()]
    options = {name: getattr(model, name) for name in (*DDP_OPTIONS, BUFFERS)}
    hook = hooks.hook_of(model)
    if hook is not None and hook.name == "powersgd":
        raise TypeError("PowerSGD's state is each rank's own: nbdist.load_checkpoint() into a new Trainer instead.")
    return {
        "options": options,
        "cap": model.bucket_bytes_cap,
        "buckets": buckets,
        "hook": None if hook is None else hook.name,
    }


def _wrapped(module: nn.Module, wrapping: dict[str, Any]) -> DDP:
    """Wrap a module as the others' are wrapped now, without the collectives of a new DDP: they would not take part."""
    with _buckets(wrapping["buckets"], wrapping["cap"]):
        wrapped = DDP(
            module,
            process_group=dist.group.WORLD,
            bucket_cap_mb=wrapping["cap"] / (1 << 20),
            init_sync=False,
            **wrapping["options"],
        )
    if wrapping["hook"] is not None:
        hooks.register(wrapped, wrapping["hook"])
    return wrapped


@contextlib.contextmanager
def _buckets(buckets: list[list[int]], cap: int) -> Iterator[None]:
    """Let a new reducer lay out its buckets as the others' are.

    DDP changes the layout after the first backward pass, to the order in which gradients came. Others that have it
    would reduce their buckets with differently cut ones of ours, and nobody would notice.
    """
    usual = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    # the reducer gets them in reverse
    dist._compute_bucket_assignment_by_size = lambda *_: (buckets[::-1], [cap] * len(buckets))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = usual  # type: ignore[attr-defined]


def _reduced(model: DDP) -> list[tuple[str, torch.Tensor]]:
    """Give the parameters that DDP reduces, in its own numbering."""
    ignored = model.parameters_to_ignore
    return [(n, p) for n, p in model.module.named_parameters() if p.requires_grad and n not in ignored]
