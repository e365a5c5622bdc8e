"""Checkpoints of a Trainer while it trains: every k steps, and when the notebook's Stop ends it."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING

from nbdist.engine.cells.gate import StepStop

if TYPE_CHECKING:
    from nbdist.engine.saving.writing import SavedCheckpoint
    from nbdist.engine.steps.training import Trainer

__all__ = ["Autosave", "every"]

KEEP = 3


class Autosave:
    """``with every(trainer, 50, dir) as saved:``, then ``saved()`` after each step."""

    def __init__(self, trainer: Trainer, steps: int | None, dir: str | os.PathLike[str] | None) -> None:
        self._trainer = trainer
        self._steps = steps
        self._dir = dir
        self._last: SavedCheckpoint | None = None
        self._saved_at = trainer.global_step

    def __call__(self) -> None:
        """Save when it is time to."""
        if self._steps is not None and self._trainer.global_step % self._steps == 0:
            self._save()

    def __enter__(self) -> Autosave:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # only Stop ends all ranks at the same step, with the group whole
        if isinstance(error, StepStop) and self._steps is not None and self._saved_at != self._trainer.global_step:
            self._save()
        if self._last is not None and (error is None or isinstance(error, StepStop)):
            self._last.result()

    def _save(self) -> None:
        # imports another second's worth of torch
        from nbdist.engine.saving.checkpoint import save_checkpoint

        assert self._dir is not None
        self._last = save_checkpoint(self._dir, keep=KEEP, trainer=self._trainer)
        self._saved_at = self._trainer.global_step
        # the time that this took belongs to no phase of the next step
        self._trainer._clock.skip()


def every(trainer: Trainer, steps: int | None, dir: str | os.PathLike[str] | None) -> Autosave:
    """Save ``trainer`` every so many steps into ``dir``, of which the last three are kept; with None never.

    Raises
    ------
    ValueError
        When only one of the two is given, or ``steps`` is below one.
    """
    if (steps is None) != (dir is None):
        raise ValueError("checkpoint_every and checkpoint_dir go together: every how many steps, and where to.")
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise ValueError(f"checkpoint_every is a number of steps, at least 1, got {steps!r}.")
    return Autosave(trainer, steps, dir)
