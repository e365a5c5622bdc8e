"""Seeds and loaders: each rank its share of the data, a new order every epoch, different randomness everywhere."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_workers
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info

from nbdist.engine.cells.interrupts import Interrupts
from nbdist.engine.loading.randomness import held
from nbdist.engine.loading.workers import (
    SeededBatches,
    end_workers,
    explained,
    made_for_workers,
    mixed,
    value_of,
    watch_memory,
)
from nbdist.engine.strategies.parallel import data_rank, device

__all__ = [
    "DistributedLoader",
    "distributed_loader",
    "epoch_of",
    "first_tensor_length",
    "length_of",
    "own_samples",
    "seed",
    "watch_copies",
    "watch_order",
]

MADE_HERE = ("sampler", "batch_sampler", "generator")

_seed = 0
_same = False


def seed(k: int, same: bool = False) -> None:
    """Seed Python, NumPy and torch on this rank, and the loaders that are made afterwards.

    Ranks that see different data get different random numbers (``k`` + their data-parallel rank): with equal ones,
    noise, crops and dropout would be copies of each other.

    Parameters
    ----------
    k : int
        The seed of the run, the same on all ranks.
    same : bool
        Give every rank the same random numbers.

    Examples
    --------
    >>> nbdist.seed(0)
    >>> loader = nbdist.distributed_loader(dataset, batch_size=64)
    """
    global _seed, _same
    _seed, _same = k, same
    rank, _ = data_rank()
    mine = k if same else k + rank
    random.seed(mine)
    torch.manual_seed(mine)
    # a user who has not imported it draws nothing from it
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mine % 2**32)


def distributed_loader(
    dataset: Dataset[Any],
    batch_size: int = 1,
    *,
    shuffle: bool | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
    pin_memory: bool | None = None,
    seed: int | None = None,
    evaluation: bool = False,
    **dataloader_options: Any,
) -> DistributedLoader:
    """Make a torch DataLoader that gives this rank its share of ``dataset``.

    In training every rank gets the same number of batches (a few samples are repeated where the size does not divide,
    as torch's DistributedSampler does). Each pass has its own order, without ``set_epoch``. Workers draw random
    numbers that differ over rank, worker and epoch. Data set classes that were defined in a cell work with workers.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        Map-style, or iterable: then each rank and worker reads it whole and takes its share of the items, so it has
        to give the same items in the same order everywhere.
    batch_size : int
        Samples per batch *of this rank*.
    shuffle : bool, optional
        True for a map-style data set in training; False in evaluation.
    seed : int, optional
        Seed of the order, the same on all ranks; by default that of ``nbdist.seed``, else 0.
    evaluation : bool
        Give every sample exactly once over all ranks; they may have different numbers of batches.
    **dataloader_options
        Handed to ``torch.utils.data.DataLoader``.

    Returns
    -------
    DistributedLoader
        A DataLoader; ``loader.epoch`` is the number of the pass that is under way.

    Raises
    ------
    ValueError
        Fewer samples than ranks, a batch size below one, or an option that this function sets itself.

    Examples
    --------
    >>> loader = nbdist.distributed_loader(dataset, batch_size=64, num_workers=2)
    >>> for inputs, targets in loader:
    ...     ...
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is the number of samples per rank, at least 1, got {batch_size!r}.")
    for name in MADE_HERE:
        if name in dataloader_options:
            raise ValueError(
                f"distributed_loader() makes the {name} itself. Use torch.utils.data.DataLoader with yours."
            )
    rank, world = data_rank()
    order_seed = _seed if seed is None else seed
    iterable = isinstance(dataset, IterableDataset)
    if iterable and shuffle:
        raise ValueError("shuffle=True needs a map-style data set; an iterable one shuffles itself.")
    sampler: Sampler[int] | None = None
    source: Dataset[Any] = dataset
    if iterable:
        source = _Shard(dataset, rank, world, drop_last=drop_last, evaluation=evaluation)
    elif evaluation:
        sampler = EachOnce(dataset, rank, world, shuffle=bool(shuffle), seed=order_seed)
    else:
        _check_size(dataset, world, batch_size, drop_last)
        sampler = Shares(dataset, world, rank, shuffle=shuffle is None or shuffle, seed=order_seed, drop_last=drop_last)
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "drop_last": drop_last and not evaluation,
        "num_workers": num_workers,
        "prefetch_factor": prefetch_factor,
        "pin_memory": device().type == "cuda" if pin_memory is None else pin_memory,
        **dataloader_options,
    }
    if num_workers > 0:
        source = made_for_workers(source, options)
    return DistributedLoader(source, sampler=sampler, seed=order_seed, same=_same, evaluation=evaluation, **options)


class DistributedLoader(DataLoader[Any]):
    """One rank's loader. Made by ``distributed_loader``."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sampler: Sampler[int] | None,
        seed: int,
        same: bool,
        evaluation: bool,
        **options: Any,
    ) -> None:
        self.epoch = 0
        self.evaluation = evaluation
        self._next_epoch = 0
        self._skip = 0
        self._given = 0  # batches of the pass under way
        self._ended = False
        self._seed = seed
        self._same = same
        super().__init__(dataset, sampler=sampler, generator=torch.Generator(), **options)
        if self.num_workers and not isinstance(dataset, IterableDataset):
            # the plain way: DataLoader has no batch_size where it is given a batch sampler, and refuses to change one
            object.__setattr__(self, "batch_sampler", SeededBatches(self.batch_sampler))

    def __iter__(self) -> Any:
        """Begin a pass: the next epoch's order and random numbers.

        A pass counts once a second batch was asked of it: ``next(iter(loader))``, a look at one batch that often one
        rank alone takes, must not put that rank's order out of step with the others'.
        """
        epoch = self.epoch = self._next_epoch
        skip, self._skip = self._skip, 0
        self._given, self._ended = skip, False
        rank, world = data_rank()
        for part in (self.sampler, self.dataset):
            _set_share(part, epoch, rank, world)
        # of this generator the DataLoader draws the seed of its workers, and worker w gets that seed + w
        pass_seed = mixed(self._seed, 0 if self._same else rank, epoch)
        self.generator.manual_seed(pass_seed)
        if isinstance(self.batch_sampler, SeededBatches):
            self.batch_sampler.begin(pass_seed, skip)
        read_over = skip
        if isinstance(self.sampler, (Shares, EachOnce)):
            self.sampler.skip, read_over = skip * (self.batch_size or 1), 0
        batches: Any = None
        try:
            with Interrupts():  # half of the workers started would be left alone
                batches = super().__iter__()
            if read_over:
                with held():  # what is read over was drawn before, by whoever saved the position
                    for _ in itertools.islice(batches, read_over):
                        pass
            for batch in batches:
                if self._given == skip:
                    watch_memory(batch, self)
                self._given += 1
                yield batch
                self._next_epoch = epoch + 1
            self._ended = True
            if skip:
                self._next_epoch = epoch + 1
        except BaseException as error:
            broken = not isinstance(error, GeneratorExit)
            if broken or not self.persistent_workers:
                clear = explained(error, batches, rank) if broken else None
                end_workers(batches)
                self._iterator = None
                if clear is not None:
                    raise clear from None
            raise

    def state_dict(self) -> dict[str, int]:
        """Give the position in the data: what ``save_checkpoint(..., loader=loader)`` stores.

        In the middle of a pass it is after the batches that were given so far.
        """
        if self._ended or (self._given == 0 and not self._skip):
            return {"epoch": self._next_epoch, "batches": 0, "seed": self._seed}
        if self._skip:
            return {"epoch": self._next_epoch, "batches": self._skip, "seed": self._seed}
        return {"epoch": self.epoch, "batches": self._given, "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass begin at this position."""
        self.epoch = self._next_epoch = state["epoch"]
        self._skip, self._given, self._ended = state["batches"], 0, False
        self._seed = state["seed"]
        for part in (self.sampler, self.dataset):
            if isinstance(part, (Shares, EachOnce)):
                part.seed = self._seed

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the running workers, and the generator, which each pass seeds anew."""
        state = dict(self.__dict__)
        state.update(_iterator=None, generator=None, _given=0)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one with this number."""
        self._next_epoch = epoch

    def skip(self, batches: int) -> None:
        """Begin the next pass after this many of its batches; a map-style data set does not read them."""
        self._skip = batches

    def __repr__(self) -> str:
        rank, world = data_rank()
        return f"<DistributedLoader rank {rank} of {world}, batch size {self.batch_size}, epoch {self.epoch}>"


class Shares(DistributedSampler[Any]):
    """torch's DistributedSampler, which can begin in the middle of an epoch."""

    skip = 0  # samples

    def __iter__(self) -> Iterator[Any]:
        """Give this rank's indices of the current epoch."""
        skip, self.skip = self.skip, 0
        return itertools.islice(super().__iter__(), skip, None)


class EachOnce(Sampler[int]):
    """Every index on exactly one rank; the last ranks may have one fewer."""

    def __init__(self, dataset: Any, rank: int, world: int, *, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.num_replicas = world
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.skip = 0  # samples

    def __iter__(self) -> Iterator[int]:
        """Give this rank's indices of the current epoch."""
        skip, self.skip = self.skip, 0
        count = len(self.dataset)
        order: range | list[int] = range(count)
        if self.shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        return iter(order[self.rank :: self.num_replicas][skip:])

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))


class _Shard(IterableDataset[Any]):
    """An iterable data set's items for one rank and one worker of it.

    Items go out in groups of one per rank, the groups to the workers in turn: the workers with the same number have
    equally many on every rank, and only the very last group can lack some.
    """

    def __init__(self, dataset: Any, rank: int, world: int, *, drop_last: bool, evaluation: bool) -> None:
        self.dataset = dataset
        self.rank = rank
        self.num_replicas = world
        self.drop_last = drop_last
        self.evaluation = evaluation

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # a set that deals its items out to workers by itself would leave us every second one
        with _as_without_workers():
            items = iter(self.dataset)
        for number in itertools.count():
            with _as_without_workers():
                group = list(itertools.islice(items, self.num_replicas))
            whole = len(group) == self.num_replicas
            if group and number % workers == worker:
                if self.rank < len(group) and (whole or not self.drop_last or self.evaluation):
                    yield group[self.rank]
                elif not self.drop_last and not self.evaluation:
                    yield group[self.rank % len(group)]  # a repeated item: ranks need equally many batches
            if not whole:
                return


@contextlib.contextmanager
def _as_without_workers() -> Iterator[None]:
    """Let ``get_worker_info`` say that there are no workers."""
    info, torch_workers._worker_info = torch_workers._worker_info, None
    try:
        yield
    finally:
        torch_workers._worker_info = info


def watch_copies(loader: Any) -> None:
    """Warn once of an iterable data set in a loader that deals nothing out to ranks and workers."""
    dataset = getattr(loader, "dataset", None)
    if type(loader) is not DataLoader or not isinstance(dataset, IterableDataset) or loader in _watched:
        return
    _watched.add(loader)
    ranks, workers = data_rank()[1], max(1, loader.num_workers)
    if ranks * workers > 1:
        each = f"{ranks} ranks × {workers} workers" if workers > 1 else f"{ranks} ranks"
        warnings.warn(
            "An iterable data set in a DataLoader of your own: unless it deals its samples out itself, "
            f"{each} read each one {ranks * workers} times. Use nbdist.distributed_loader(dataset).",
            stacklevel=3,
        )


def watch_order(loader: Any) -> None:
    """Warn when a torch DistributedSampler begins another pass in the order of the one before."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(loader, DistributedLoader) or not isinstance(sampler, DistributedSampler) or not sampler.shuffle:
        return
    if _last_epoch.get(sampler) == sampler.epoch:
        warnings.warn(
            f"The loader repeats the order of epoch {sampler.epoch}. Call sampler.set_epoch(epoch) before each pass, "
            "or use nbdist.distributed_loader().",
            stacklevel=3,
        )
    _last_epoch[sampler] = sampler.epoch


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_last_epoch: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def epoch_of(loader: Any, passes: int) -> int:
    """Give the epoch of the pass under way: the loader's own count, else the caller's."""
    return loader.epoch if isinstance(loader, DistributedLoader) else passes


def first_tensor_length(batch: Any) -> int | None:
    """Give the number of samples of a batch: the length of its first tensor, or None when it holds none."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, (list, tuple)):
        parts: Iterable[Any] = batch
    elif isinstance(batch, Mapping):
        parts = batch.values()
    else:
        samples = getattr(batch, "samples", None)  # a window of batches
        return samples if isinstance(samples, int) else None
    for part in parts:
        length = first_tensor_length(part)
        if length is not None:
            return length
    return None


def length_of(loader: Any) -> int | None:
    """Give the number of batches of one pass, where it is known."""
    if not isinstance(loader, Sized):
        return None
    try:
        return len(loader)
    except TypeError:  # a DataLoader over an iterable data set has __len__, and raises
        return None


def own_samples(loader: Any) -> int | None:
    """Give how many samples of a pass are this rank's own, not repeated to make the ranks' shares equal.

    None where every sample of the loader counts.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    # the padding is at the end of the order, which is dealt out to the ranks in turn
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]


def _check_size(dataset: Any, world: int, batch_size: int, drop_last: bool) -> None:
    count = len(dataset)
    if count < world:
        raise ValueError(
            f"{count} samples for {world} ranks: in training each rank needs at least one. "
            "Start fewer ranks, or pass evaluation=True."
        )
    if drop_last and count // world < batch_size:
        raise ValueError(
            f"batch_size {batch_size} with drop_last=True leaves no batch: "
            f"{count} samples over {world} ranks are {count // world} per rank."
        )


def _set_share(part: Any, epoch: int, rank: int, world: int) -> None:
    """Tell a sampler or a sharded data set which pass it is, and the rank and world of today."""
    part = value_of(part)
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)
    if isinstance(part, EachOnce):
        part.epoch = epoch
    if not isinstance(part, (DistributedSampler, EachOnce, _Shard)):
        return
    # the world may have been formed anew with other ranks since the loader was made
    if isinstance(part, DistributedSampler) and (part.rank, part.num_replicas) != (rank, world):
        count = len(part.dataset)  # type: ignore[arg-type]
        part.num_samples = count // world if part.drop_last else math.ceil(count / world)
        part.total_size = part.num_samples * world
    part.rank, part.num_replicas = rank, world
