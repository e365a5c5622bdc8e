"""``save_checkpoint`` and ``load_checkpoint``: whole or not there, from any strategy to any other.

::

    checkpoints/
      latest                 the name of the newest
      step-500/
        meta.json            versions, plain data, where the tensors belong, the size of every file
        .metadata            torch.distributed.checkpoint's own
        __0_0.distcp         tensors of rank 0, ...
        rank-0.json          random states of rank 0, ...
      step-550.tmp/          being written, or cut off
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.loading.randomness import random_states
from nbdist.engine.saving import folders, plain, shards, states
from nbdist.engine.saving.reading import Reading
from nbdist.engine.saving.writing import SavedCheckpoint, line_of, wait_for, write
from nbdist.engine.world.meeting import meet

__all__ = ["load_checkpoint", "save_checkpoint"]

_last: SavedCheckpoint | None = None


def save_checkpoint(
    dir: str | os.PathLike[str], /, *, keep: int | None = None, asynchronous: bool = True, **state: Any
) -> SavedCheckpoint:
    """Write a checkpoint, by all ranks together, into a new folder ``dir/step-N``.

    Called on every rank. Returns once the state was copied; files are written by a thread, and the folder gets its
    name only when all of them are on the disk: whatever happens meanwhile, the checkpoint before stays whole. The
    random states of every rank go with it. Of tensors that every rank holds (DDP's parameters, and buffers, which may
    differ between ranks) those of the lowest rank are stored, under the model's own names.

    Parameters
    ----------
    dir : path
        A folder that all ranks see; made if it is not there.
    keep : int, optional
        Keep so many checkpoints in ``dir`` and remove older ones; by default all.
    asynchronous : bool
        False: return when it is written.
    **state
        Models (wrapped or not), optimizers, a Trainer (with its model and optimizer), anything with ``state_dict`` and
        ``load_state_dict``, tensors and plain data. ``step`` numbers the folder.

    Returns
    -------
    SavedCheckpoint
        ``.result(timeout)`` waits until it is written and gives the folder.

    Raises
    ------
    TypeError
        For a value of a class that a checkpoint cannot hold as data; it is named.
    WorldError
        When not every rank calls it.

    Examples
    --------
    >>> nbdist.save_checkpoint("checkpoints", trainer=trainer, keep=3)
    >>> nbdist.save_checkpoint("checkpoints", model=model, optimizer=optimizer, step=step, best=0.97)
    """
    global _last
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep is the number of checkpoints to keep, at least 1, got {keep!r}.")
    parent = Path(dir).expanduser().absolute()
    if _last is not None:
        wait_for(_last)
    tensors: dict[str, torch.Tensor] = {}
    trees: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    failure: Exception | None = None
    step = None
    try:
        for part in states.parts_of(state):
            trees[part.name] = part.capture(_keeper(tensors))
            kinds[part.name] = part.kind
        step = states.step_of(state)
    except Exception as error:  # the state's own code: the others must hear of it, whatever it is
        failure = error
    own = {"random": plain.encode(random_states(), "random", plain.inline_tensor)}
    key = shards.signature(tensors, dist.get_rank() if dist.is_initialized() else 0)
    mine = {"failure": line_of(failure), "dir": str(parent), "step": step, "key": key, "names": sorted(kinds)}
    try:
        meeting = meet("save_checkpoint()", {**mine, "plans": list(shards._plans)}, _agree_on_folder)
    except ValueError:
        if failure is not None:
            raise failure from None
        raise
    folder = Path(meeting.agreed["folder"])
    plan = shards.plan_together(
        meeting.agreed["key"], tensors, meeting.rank, meeting.world_size, fresh=meeting.agreed["plan"]
    )
    if key != meeting.agreed["keys"][0]:
        own["state"] = trees  # this rank holds other tensors than rank 0: other layers, or other optimizer states
    meta = {
        "format": folders.FORMAT,
        "nbdist": _version(),
        "torch": str(torch.__version__),
        "world_size": meeting.world_size,
        "step": meeting.agreed["step"],
        "serial": meeting.agreed["serial"],
        "parts": kinds,
        "state": trees,
    }
    saved = SavedCheckpoint(folder)
    parts: Mapping[str, torch.Tensor] = shards.stage(tensors, plan) if asynchronous else tensors
    arguments = (saved, meeting, parts, plan, own, meta, keep)
    _last = saved
    if asynchronous:
        # not a daemon: a script that ends right after saving must not lose it
        threading.Thread(target=write, args=arguments, name="nbdist checkpoint").start()
    else:
        write(*arguments)
        saved.result()
    return saved


def load_checkpoint(dir: str | os.PathLike[str], /, **state: Any) -> dict[str, Any]:
    """Put the state of a checkpoint back in place, on all ranks.

    Called on every rank, or in a process without a group. The strategy and the number of ranks may be others than when
    it was saved; tensors go to the device where the model is. Nothing in the files is executed, and nothing is changed
    before everything was found to fit and was read. Random states are put back where something is trained (an
    optimizer or a Trainer was given) by as many ranks as before.

    Parameters
    ----------
    dir : path
        A checkpoint, or the folder of several: then the newest whole one is taken.
    **state
        What to put back, by the names it was saved under.

    Returns
    -------
    dict
        The plain data in the checkpoint by its names; tensors among it on the CPU.

    Raises
    ------
    FileNotFoundError
        There is no whole checkpoint.
    ValueError
        The checkpoint is of another model, damaged, or from a newer version; nothing was changed.

    Warns
    -----
    UserWarning
        For each part that the checkpoint does not have, and each newer checkpoint that is not whole.

    Examples
    --------
    >>> nbdist.load_checkpoint("checkpoints", trainer=trainer)
    >>> extra = nbdist.load_checkpoint("checkpoints/step-500", model=model, optimizer=optimizer)
    >>> extra["best"]
    """
    if _last is not None:
        wait_for(_last)
    path = Path(dir).expanduser().absolute()
    found = meet("load_checkpoint()", {"dir": str(path)}, _agree_on_checkpoint).agreed
    if "missing" in found:
        raise FileNotFoundError(found["missing"])
    folder = Path(found["folder"])
    read: Reading | None = None
    failure: Exception | None = None
    try:
        read = Reading(folder, state)
    except Exception as error:  # files of any content: the others must hear of it, whatever it is
        failure = error
    surplus = [] if read is None else read.surplus
    try:
        meet("load_checkpoint()", {"failure": line_of(failure), "surplus": surplus}, _agree_on_content)
    except ValueError:
        if failure is not None:
            raise failure from None
        raise
    assert read is not None
    extra = read.apply()
    for line in (*found["skipped"], *read.remarks):
        warnings.warn(line, stacklevel=2)
    return extra


def _agree_on_folder(brought: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Settle where a checkpoint goes, and make its temporary folder; on rank 0."""
    _refuse_failures(brought)
    for what in ("dir", "step", "names"):
        if any(one[what] != brought[0][what] for one in brought):
            shown = ", ".join(f"{one[what]!r} on rank {rank}" for rank, one in enumerate(brought))
            raise ValueError(f"save_checkpoint() got different values for {what}: {shown}.")
    parent = Path(brought[0]["dir"])
    keys = [one["key"] for one in brought]
    key = " ".join(keys)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folders.clear_leftovers(parent)
        step = brought[0]["step"]
        step = folders.next_step(parent) if step is None else step
        folder = parent / f"step-{step}"
        folder.with_name(f"{folder.name}.tmp").mkdir()
    except OSError as error:
        raise ValueError(f"save_checkpoint() cannot write to {parent}: {error}") from error
    return {
        "folder": str(folder),
        "step": step,
        "serial": folders.next_serial(parent),
        "keys": keys,
        "key": key,
        "plan": not all(key in one["plans"] for one in brought),
    }


def _agree_on_checkpoint(brought: Sequence[dict[str, Any]]) -> dict[str, Any]:
    places = {one["dir"] for one in brought}
    if len(places) > 1:
        raise ValueError(f"load_checkpoint() got different folders: {', '.join(sorted(places))}.")
    try:
        folder, skipped = folders.chosen(Path(brought[0]["dir"]))
    except FileNotFoundError as error:
        return {"missing": str(error)}
    return {"folder": str(folder), "skipped": skipped}


def _agree_on_content(brought: Sequence[dict[str, Any]]) -> dict[str, Any]:
    _refuse_failures(brought)
    # each rank of a pipeline has some of the layers only: foreign is what no rank knows
    foreign = set.intersection(*(set(one["surplus"]) for one in brought))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ValueError(
            f"The checkpoint is of another model: it has {min(foreign)}{more}, which the model here has not."
        )
    return {}


def _refuse_failures(brought: Iterable[Mapping[str, Any]]) -> None:
    for rank, one in enumerate(brought):
        if one["failure"]:
            raise ValueError(f"rank {rank}: {one['failure']}")


def _keeper(tensors: dict[str, torch.Tensor]) -> Any:
    def put(place: str, tensor: torch.Tensor) -> str:
        name = place
        while name in tensors:  # keys that differ by their type only
            name += "'"
        tensors[name] = tensor
        return name

    return put


def _version() -> str:
    from nbdist import __version__

    return __version__
