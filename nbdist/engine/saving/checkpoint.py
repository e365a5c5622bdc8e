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

import contextlib
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from nbdist.engine.loading.randomness import random_states, set_random_states
from nbdist.engine.saving import folders, plain, shards, states
from nbdist.engine.world.meeting import Meeting, meet

__all__ = ["SavedCheckpoint", "load_checkpoint", "save_checkpoint"]

log = logging.getLogger(__name__)

WRITE_LIMIT = 1800.0  # seconds that a rank may write

_last: SavedCheckpoint | None = None


class SavedCheckpoint:
    """A checkpoint that is being written, or was: what ``save_checkpoint`` gives."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._future: Future[Path] = Future()
        self._asked = False

    def result(self, timeout: float | None = None) -> Path:
        """Wait until every rank has written and the folder has its name; give the folder.

        Raises
        ------
        TimeoutError
            After ``timeout`` seconds; writing goes on.
        OSError
            On all ranks, when one of them could not write; the checkpoint before is still whole.
        """
        from concurrent.futures import TimeoutError as FutureTimeout

        try:
            path = self._future.result(timeout)
        except FutureTimeout:
            if self._future.done():
                self._asked = True
                raise
            raise TimeoutError(f"{self.path.name} is still being written after {timeout:g} s.") from None
        except BaseException:
            self._asked = True
            raise
        return path

    def done(self) -> bool:
        """Tell whether writing has ended, one way or the other."""
        return self._future.done()

    def __repr__(self) -> str:
        state = "being written"
        if self._future.done():
            state = "failed" if self._future.exception() else "written"
        return f"<SavedCheckpoint {self.path.name}, {state}>"


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
        _wait_for(_last)
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
    rank = _rank()
    key = shards.signature(tensors, rank)
    mine = {"failure": _line(failure), "dir": str(parent), "step": step, "key": key, "names": sorted(kinds)}
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
        threading.Thread(target=_write, args=arguments, name="nbdist checkpoint").start()
    else:
        _write(*arguments)
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
        _wait_for(_last)
    path = Path(dir).expanduser().absolute()
    found = meet("load_checkpoint()", {"dir": str(path)}, _agree_on_checkpoint).agreed
    if "missing" in found:
        raise FileNotFoundError(found["missing"])
    folder = Path(found["folder"])
    read: _Read | None = None
    failure: Exception | None = None
    try:
        read = _Read(folder, state)
    except Exception as error:  # files of any content: the others must hear of it, whatever it is
        failure = error
    surplus = [] if read is None else read.surplus
    try:
        meet("load_checkpoint()", {"failure": _line(failure), "surplus": surplus}, _agree_on_content)
    except ValueError:
        if failure is not None:
            raise failure from None
        raise
    assert read is not None
    extra = read.apply()
    for line in (*found["skipped"], *read.remarks):
        warnings.warn(line, stacklevel=2)
    return extra


class _Read:
    """A checkpoint as this rank has read it, with everything compared and nothing changed yet."""

    def __init__(self, folder: Path, state: Mapping[str, Any]) -> None:
        meta = folders.meta_of(folder)
        world = meta["world_size"]
        trees = dict(meta["state"])
        for name in meta["files"]:
            if name.startswith("rank-"):
                other = json.loads((folder / name).read_bytes())
                if "state" in other:
                    trees = {part: _merged(trees.get(part), tree) for part, tree in other["state"].items()} | {
                        part: tree for part, tree in trees.items() if part not in other["state"]
                    }
        metadata = shards.layout(folder) if (folder / shards.METADATA).exists() else None
        held = {} if metadata is None else metadata.state_dict_metadata
        sizes = {name: entry.size for name, entry in held.items() if hasattr(entry, "size")}
        parts = states.parts_of(state)
        self.remarks: list[str] = []
        self.surplus: list[str] = []
        self.restoring: list[states.Restoring] = []
        for part in parts:
            if part.name not in trees:
                self.remarks.append(f"No {part.name} in the checkpoint {folder.name}: it is left as it is.")
                continue
            kind = meta["parts"][part.name]
            self.restoring.append(states.Restoring(part, kind, trees[part.name], sizes))
            self.surplus += states.unexpected(part, trees[part.name])
        given = {part.name for part in parts}
        for name, kind in meta["parts"].items():
            if kind == "plain" and name not in given:
                part = states.Part(name=name, kind="plain", value=None)
                self.restoring.append(states.Restoring(part, kind, trees[name], sizes))
        targets = {name: tensor for one in self.restoring for name, tensor in one.targets.items()}
        try:
            self.tensors = shards.read(folder, metadata, targets) if metadata is not None else {}
        except Exception as error:  # torch.load has many words for bytes that are none of its own
            raise folders.Damaged(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
        self.random: Any = None
        if any(part.kind == "optimizer" for part in parts):
            now = _world_size()
            if world == now:
                own = json.loads((folder / f"rank-{_rank()}.json").read_bytes())
                self.random = plain.decode(own["random"], plain.read_inline)
            else:
                self.remarks.append(
                    f"{folder.name} was saved by {world} ranks and is loaded by {now}: random states go on as they are."
                )

    def apply(self) -> dict[str, Any]:
        from nbdist.engine.cells.interrupts import Interrupts

        extra = {}
        with Interrupts():
            for one in self.restoring:
                value = one.apply(self.tensors)
                if one.kind == "plain":
                    extra[one.part.name] = value
            if self.random is not None:
                set_random_states(self.random)
        return extra


# A loader's workers are forked. A lock that this thread holds within torch at that moment would stay locked in them.
_not_while_forking = threading.Lock()
os.register_at_fork(
    before=_not_while_forking.acquire,
    after_in_parent=_not_while_forking.release,
    after_in_child=_not_while_forking.release,
)


def _write(
    saved: SavedCheckpoint,
    meeting: Meeting,
    parts: Mapping[str, torch.Tensor],
    plan: shards.Plan,
    own: dict[str, Any],
    meta: dict[str, Any],
    keep: int | None,
) -> None:
    """Write this rank's files and see all the others' through; in a thread, without a collective."""
    temporary = saved.path.with_name(f"{saved.path.name}.tmp")
    try:
        failure: BaseException | None = None
        try:
            with _not_while_forking:
                _write_own(temporary, meeting.rank, parts, plan, own)
        except BaseException as error:
            failure = error
        meeting.tell(f"wrote-{meeting.rank}", failure=_line(failure))
        if meeting.rank == 0:
            _complete(saved.path, temporary, meeting, failure, plan, meta, keep)
        else:
            end = meeting.hear("finished", 0, limit=2 * WRITE_LIMIT)
            if end["failure"]:
                raise OSError(end["failure"])
        saved._future.set_result(saved.path)
    except BaseException as error:
        log.error("%s was not written: %s", saved.path, error)
        saved._future.set_exception(error)


def _write_own(
    temporary: Path, rank: int, parts: Mapping[str, torch.Tensor], plan: shards.Plan, own: dict[str, Any]
) -> None:
    if not temporary.is_dir():
        raise OSError(f"{temporary.parent} is not the same folder on all ranks: give one on a shared file system")
    results = shards.write(temporary, parts, plan, rank)
    folders.write_file(temporary / f"rank-{rank}.json", shards.dumps(own))
    folders.write_file(temporary / f"results-{rank}", shards.dumps(results))


def _complete(
    folder: Path,
    temporary: Path,
    meeting: Meeting,
    failure: BaseException | None,
    plan: shards.Plan,
    meta: dict[str, Any],
    keep: int | None,
) -> None:
    """Wait for all ranks' files, describe them and publish the folder; rank 0."""
    try:
        failures = [] if failure is None else [f"rank 0: {_line(failure)}"]
        for rank in range(1, meeting.world_size):
            end = meeting.hear(f"wrote-{rank}", rank, limit=WRITE_LIMIT)
            if end["failure"]:
                failures.append(f"rank {rank}: {end['failure']}")
        if failures:
            raise OSError("; ".join(failures))
        results = []
        for rank in range(meeting.world_size):
            path = temporary / f"results-{rank}"
            results.append(json.loads(path.read_bytes()))
            path.unlink()
        shards.finish(temporary, plan, results)
        files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        folders.write_file(temporary / folders.META, shards.dumps({**meta, "files": files}))
        folders.publish(temporary, folder, keep)
    except BaseException as error:
        text = f"{folder.name} was not written ({error}). The checkpoint before it is still whole."
        meeting.tell("finished", failure=text)
        _discard(temporary)
        raise OSError(text) from error
    meeting.tell("finished", failure="")


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


def _merged(zero: Any, other: Any) -> Any:
    """Join what two ranks hold of one part; rank 0's counts where both have a value."""
    if isinstance(zero, dict) and isinstance(other, dict):
        return {
            key: _merged(zero[key], other[key]) if key in zero and key in other else zero.get(key, other.get(key))
            for key in {**zero, **other}
        }
    if isinstance(zero, list) and isinstance(other, list):
        if all(isinstance(part, str) for part in (*zero, *other)):
            return list(dict.fromkeys((*zero, *other)))
        return [_merged(a, b) for a, b in zip(zero, other, strict=False)] or zero
    return other if zero is None else zero


def _wait_for(saved: SavedCheckpoint) -> None:
    """Wait for the save before; a failure that nobody has asked for is told now."""
    if saved._future.done() and saved._asked:
        return
    failure = saved._future.exception()
    if failure is not None and not saved._asked:
        saved._asked = True
        warnings.warn(str(failure), stacklevel=3)


def _discard(temporary: Path) -> None:
    import shutil

    with contextlib.suppress(OSError):
        shutil.rmtree(temporary)


def _line(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _version() -> str:
    from nbdist import __version__

    return __version__
