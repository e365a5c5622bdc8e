"""The batches of one optimizer step after the other: where in the data training is, over passes and across calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch.distributed as dist

from nbdist.engine.loading.data import DistributedLoader, first_tensor_length, watch_copies
from nbdist.engine.steps.uneven import Passes

__all__ = ["Windows"]


class Windows:
    """Draws windows of up to ``accumulate`` batches; none reaches over the end of a pass.

    A window that was drawn counts only once ``advance`` says that its step was finished: after an interrupt the same
    batches are drawn again.

    Attributes
    ----------
    epoch : int
        Finished passes.
    position : int
        Batches of the current pass that went into finished steps.
    joined : float
        Ranks, per rank that has a batch of its own in the window drawn last.
    """

    def __init__(self, loader: Iterable[Any], accumulate: int, uneven: str) -> None:
        self.loader = loader
        self.epoch = 0
        self.position = 0
        self.joined = 1.0
        self._accumulate = accumulate
        self._passes = Passes(uneven)
        self._batches: Iterator[Any] | None = None
        self._length: int | None = None  # of the current pass, once it was begun
        self._ends_pass = False

    @property
    def joins(self) -> bool:
        """True when ranks may take part in a step without a batch of their own."""
        return self._passes.joins

    @property
    def seed(self) -> int | None:
        """The seed of a ``DistributedLoader``'s order, None for other loaders: a resumed pass goes on in that order."""
        return self.loader.state_dict()["seed"] if isinstance(self.loader, DistributedLoader) else None

    @seed.setter
    def seed(self, seed: int | None) -> None:
        if seed is not None and isinstance(self.loader, DistributedLoader):
            self.loader.load_state_dict({**self.loader.state_dict(), "seed": seed})

    def agree(self) -> None:
        """Learn all ranks' lengths. A collective; raises where they may not differ and do."""
        self._passes.agree(self.loader)

    def rewind(self) -> None:
        """Read on from after the last finished step, by a new iterator: the one that was may have lost a batch."""
        self._batches = None

    def place_at(self, epoch: int, position: int) -> None:
        """Go on after so many batches of that pass."""
        self.epoch, self.position = epoch, position
        self._batches = None

    def draw(self) -> list[Any]:
        """Give the batches of the next optimizer step: of the next pass when this one has ended."""
        self._ends_pass = False
        batch = self._next(0)
        if batch is None and self.position:
            self.epoch, self.position = self.epoch + 1, 0
            batch = self._next(0)
        if batch is None:
            raise ValueError("The loader gives no batch.")
        if self._passes.joins and self._passes.ranks:
            # a rank has its batches at the beginning of a window: the others' number at the first one counts
            self.joined = dist.get_world_size() / self._passes.ranks
        window = [batch]
        while len(window) < self._accumulate and not self._ends_pass:
            batch = self._next(len(window))
            if batch is None:
                self._ends_pass = True
            else:
                window.append(batch)
        return window

    def advance(self, batches: int) -> None:
        """Count the batches of a window that has just been used, together with the weights that it gave."""
        self.position += batches
        if self._ends_pass or (self._length is not None and self.position >= self._length):
            self.epoch, self.position = self.epoch + 1, 0
            self._batches = None

    def steps_of(self, epochs: float) -> int:
        """Give the optimizer steps in so many passes."""
        length = self._passes.length(self.loader)
        if length is None:
            raise ValueError("The loader does not tell its length: epochs cannot be counted in steps. Give steps.")
        if length == 0:
            raise ValueError("The loader gives no batch.")
        return round(epochs * math.ceil(length / self._accumulate))

    def epochs_at(self, step: int) -> float | None:
        """Give the passes that so many steps are, where the length of one is known."""
        length = self._passes.length(self.loader)
        return step / math.ceil(length / self._accumulate) if length else None

    def arithmetic(self, ranks: int) -> str:
        """Write the batch arithmetic: per rank x ranks x accumulated = samples per optimizer step."""
        size = getattr(self.loader, "batch_size", None)
        if size is None and isinstance(self.loader, (list, tuple)) and self.loader:
            size = first_tensor_length(self.loader[0])
        whole = "" if size is None else f" = {size * ranks * self._accumulate}"
        each = "?" if size is None else size
        return f"{each} per rank × {ranks} ranks × {self._accumulate} accumulated{whole} samples"

    def _next(self, number: int) -> Any:
        """Give the batch with this number in the window; None at the end of the pass."""
        if self._batches is None:
            self._batches = self._begin_pass()
        passes = self._passes
        batch = next(self._batches, None) if passes.alone else passes.next(self._batches, self.position + number)
        if batch is None:
            self._batches = None
        return batch

    def _begin_pass(self) -> Iterator[Any]:
        loader, position = self.loader, self.position
        if isinstance(loader, DistributedLoader):
            loader.set_epoch(self.epoch)
            loader.skip(position)
            batches: Iterator[Any] = iter(loader)
        else:
            sampler: Any = getattr(loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            watch_copies(loader)
            batches = islice(iter(loader), position, None)
        # once a pass: a DataLoader works it out anew each time that it is asked
        self._length = self._passes.length(loader)
        return batches

    def __getstate__(self) -> dict[str, Any]:
        # an iterator, and its workers, belong to one process
        return {**self.__dict__, "_batches": None}
