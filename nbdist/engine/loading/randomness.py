"""The random states of this process: Python's, NumPy's, torch's and this rank's GPU's."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["held", "random_states", "set_random_states"]


def random_states() -> dict[str, Any]:
    """Give the states as plain data and tensors."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    # whoever has not imported it has drawn nothing from it
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    # asking a GPU that this process has not used would take memory on it
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Go on with states that ``random_states`` gave; those of a device that is not here are left."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Leave the random states behind as they were before."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
