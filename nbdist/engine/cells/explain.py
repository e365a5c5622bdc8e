"""Errors of torch whose own text does not say what to do, in one line that is the same on every rank."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator

from torch.nn.parallel import DistributedDataParallel as DDP

from nbdist.engine.world import process_group

__all__ = ["explain", "from_transport"]

# What gloo and NCCL raise on a rank whose connection was cut, or whose peer is gone or late.
TRANSPORT = re.compile(
    r"\bgloo/\S+\.(cc|h):\d+\]|Connection (closed|reset) by peer|NCCL communicator was aborted|"
    r"Timed out waiting \d+ ?ms"
)
UNKNOWN_GROUP = re.compile(r"not initialized in the world group map|[Ii]nvalid process group")
UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
SHOWN_NAMES = 6


def from_transport(error: BaseException) -> bool:
    """Tell whether the error says no more than that a collective did not come to its end."""
    return isinstance(error, RuntimeError) and bool(TRANSPORT.search(_text(error)))


def explain(error: BaseException, before: process_group.Counters) -> tuple[str, str] | None:
    """Give name and text of an error that says what the error of torch means; None where torch's own is better.

    Parameters
    ----------
    before : mapping
        ``process_group.counters()`` of the moment at which the cell began.
    """
    text = _text(error)
    unknown = isinstance(error, ValueError) and UNKNOWN_GROUP.search(text) is not None
    if unknown or from_transport(error):
        left = process_group.left_group(before)
        if left is not None or unknown:
            which = f"generation {left}" if left is not None else "an earlier generation"
            return "WorldError", (
                f"this object (a DDP model, or a group) belongs to {which} of the process group; the ranks are in "
                f"generation {process_group.current_generation()} now. Wrap the model again: "
                "model = nbdist.parallelize(model)"
            )
    unused = UNUSED.search(text)
    if unused is not None:
        names = _parameters(error, [int(index) for index in unused[1].split()])
        return "RuntimeError", (
            f"{names} took no part in the loss. Leave out what is not used, or wrap with "
            "nbdist.parallelize(model, find_unused_parameters=True)"
        )
    if "initialize the default process group twice" in text:
        return "RuntimeError", (
            "nbdist has formed the process group already: leave init_process_group() out, or guard it by "
            "`if not dist.is_initialized()`"
        )
    return None


def _parameters(error: BaseException, indices: list[int]) -> str:
    """Name the parameters that a DDP model, found in the stack of the error, counts by these numbers."""
    for frame in _frames(error):
        model = frame.f_locals.get("self")
        if isinstance(model, DDP):
            names = [
                name
                for name, parameter in model.module.named_parameters()
                if parameter.requires_grad and name not in model.parameters_to_ignore
            ]
            known = [names[index] for index in indices if index < len(names)]
            more = f" and {len(known) - SHOWN_NAMES} more" if len(known) > SHOWN_NAMES else ""
            return ", ".join(known[:SHOWN_NAMES]) + more
    return f"parameters {', '.join(map(str, indices))}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as raised:  # a user's __str__ may raise anything
        return f"<unprintable {type(error).__name__}: {type(raised).__name__} in its __str__>"


def _frames(error: BaseException) -> Iterator[types.FrameType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
