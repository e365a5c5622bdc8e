"""Worker processes of a loader: what is sent to them, what they draw, how they end and what is said if they die."""

from __future__ import annotations

import contextlib
import gc
import glob
import multiprocessing
import os
import pickle
import platform
import random
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from nbdist.engine import limits
from nbdist.engine.cells.interrupts import Interrupts

__all__ = ["SeededBatches", "end_workers", "explained", "made_for_workers", "mixed", "value_of", "watch_memory"]

DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")

_warned = False

# A worker must not collect what it inherited by fork. Taking a process group apart joins its threads, which are not
# there in a worker: it dies by SIGSEGV, or waits for ever. Groups that were left, with models around them in reference
# cycles, lie about in every rank until some collection finds them. For every fork: a DataLoader of the user's own forks
# too, and no other child is harmed by it.
os.register_at_fork(after_in_child=gc.freeze)


class SeededBatch(list[Any]):
    """The indices of one batch, and the seed of what its worker draws for it."""

    seed = 0


class SeededBatches:
    """Batches of a batch sampler, each with a seed that follows from its place in the epoch.

    A worker that went on from the batch before would draw other numbers after a resume: it has other batches then.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self._seed = 0
        self._first = 0

    def begin(self, seed: int, first: int) -> None:
        """Let the next pass have this seed, and begin with the batch of this number."""
        self._seed, self._first = seed, first

    def __iter__(self) -> Iterator[SeededBatch]:
        for number, indices in enumerate(self.batches, self._first):
            batch = SeededBatch(indices)
            batch.seed = mixed(self._seed, number)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


class _Carried:
    """Carries an object to a worker, to a spawned one by value: its class may exist in the notebook only."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Any:
        # while it is being unpickled there is no _value yet
        if name.startswith("__") or name == "_value":
            raise AttributeError(name)
        return getattr(self._value, name)

    def __getstate__(self) -> bytes:
        import cloudpickle

        dumped: bytes = cloudpickle.dumps(self._value)
        return dumped

    def __setstate__(self, dumped: bytes) -> None:
        self._value = pickle.loads(dumped)


class _CarriedDataset(_Carried, Dataset[Any]):
    def __len__(self) -> int:
        return len(self._value)

    def __getitem__(self, index: Any) -> Any:
        return self._value[index]

    def __getitems__(self, indices: Any) -> Any:
        if isinstance(indices, SeededBatch):
            _seed_all(indices.seed)
        several = getattr(self._value, "__getitems__", None)
        return [self._value[index] for index in indices] if several is None else several(indices)


class _CarriedIterable(_Carried, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._value)


class _CarriedCall(_Carried):
    def __call__(self, *args: Any) -> Any:
        return self._value(*args)


def made_for_workers(dataset: Dataset[Any], options: dict[str, Any]) -> Dataset[Any]:
    """Choose how workers start, and make what is sent to them survive the way."""
    context = options.get("multiprocessing_context")
    if context is None and platform.system() == "Linux":
        # Python's default is forkserver from 3.14 on, which starts each worker by importing everything anew
        context = options["multiprocessing_context"] = "fork"
    if context is None:
        context = multiprocessing.get_start_method()
    method = context if isinstance(context, str) else context.get_start_method()
    if method != "fork":
        for name in ("collate_fn", "worker_init_fn"):
            if options.get(name) is not None:
                options[name] = _CarriedCall(options[name])
    return _CarriedIterable(dataset) if isinstance(dataset, IterableDataset) else _CarriedDataset(dataset)


def value_of(part: Any) -> Any:
    """Give what was carried."""
    return part._value if isinstance(part, _Carried) else part


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator at once, whatever they are at, and wait until they are gone."""
    workers = getattr(iterator, "_workers", None)
    if not workers:
        return
    with Interrupts():
        if iterator._worker_pids_set:
            # a worker that ends by a signal would otherwise raise in whatever runs here at that moment
            _forget_pids(id(iterator))
            iterator._worker_pids_set = False
        for worker in workers:
            with contextlib.suppress(AttributeError, ValueError):  # not started yet, or closed
                worker.terminate()
        iterator._shutdown_workers()
        _free_memory([worker.pid for worker in workers])


def explained(error: BaseException, iterator: Any, rank: int) -> RuntimeError | None:
    """Say in one line why a loader lost a worker or could not receive from it; None for any other error."""
    text = str(error)
    died = DIED.search(text)
    if died is not None:
        pid = int(died[1].split(",")[0])
        code = next((w.exitcode for w in getattr(iterator, "_workers", ()) if w.pid == pid), None)
        number = -code if code is not None and code < 0 else _signal_in(text)
        if number is None:
            return RuntimeError(f"rank {rank}: DataLoader worker pid {pid} ended with exit code {code}.")
        why = " (out of memory?)" if number == signal.SIGKILL else ""
        if number == signal.SIGBUS:
            advice = limits.shared_memory_advice()
            why = f". {advice}" if advice else " (out of shared memory?)"
        return RuntimeError(f"rank {rank}: DataLoader worker pid {pid} killed by signal {number}{why}")
    if "items of ancdata" in text or "Too many open files" in text:
        return RuntimeError(
            f"rank {rank}: no file descriptors left (limit {_limit()}). Keep fewer batches, raise `ulimit -n`, or call "
            "torch.multiprocessing.set_sharing_strategy('file_system')."
        )
    return None


def watch_memory(batch: Any, loader: Any) -> None:
    """Warn once when batches that workers have ready do not fit into shared memory."""
    global _warned
    if _warned or not loader.num_workers:
        return
    needed = _bytes(batch) * loader.num_workers * (loader.prefetch_factor or 2)
    memory = limits.shared_memory()
    # what is ready already takes its part: compare with the whole
    if memory is not None and needed > memory.size:
        _warned = True
        warnings.warn(limits.shared_memory_advice(needed), stacklevel=3)


def mixed(*numbers: int) -> int:
    """Give one seed out of several numbers, such that neighbours are far apart."""
    result = 0
    for number in numbers:
        result = (result ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03
        result &= 0xFFFFFFFFFFFFFFFF
        result ^= result >> 29
    return result


def _free_memory(pids: Iterable[int | None]) -> None:
    """Remove the shared memory that ended workers were just handing over.

    A descriptor is sent and the name removed at once; whoever is ended in between leaves the name, and the memory.
    """
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
        for pid in pids:
            for name in glob.glob(f"{limits.SHM}/torch_{pid}_*"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)


def _forget_pids(key: int) -> None:
    from torch.utils.data._utils import signal_handling

    forget: Any = getattr(signal_handling, "_remove_worker_pids")  # noqa: B009  # torch does not export it
    forget(key)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _signal_in(text: str) -> int | None:
    """Find the signal in torch's words: ``is killed by signal: Killed``."""
    match = re.search(r"killed by signal: ([^.]+)\.", text)
    if match is None:
        return None
    return next((int(s) for s in signal.Signals if signal.strsignal(s) == match[1].strip()), None)


def _limit() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _bytes(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        return sum(map(_bytes, batch.values()))
    if isinstance(batch, (list, tuple)):
        return sum(map(_bytes, batch))
    return 0
