"""PowerSGD's state by parameters instead of buckets: it outlives a checkpoint, and DDP's own change of its buckets.

torch keeps what it feeds back (errors, and the factors that the next step begins with) under the number of a bucket.
A new DDP lays its buckets out anew after its first backward pass, so in a resumed run the numbers mean other
parameters: torch would add the errors of one layer to the gradients of another.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["NamedState"]

COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression")
Kept = dict[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]  # parameter -> its error, its Q


class NamedState:
    """What torch's ``PowerSGDState`` holds for the parameters of one model; a checkpoint's part with ``state_dict``."""

    def __init__(self, state: Any, module: nn.Module) -> None:
        self._state = state
        self._module = module
        self._buckets: dict[int, list[torch.Tensor]] = {}  # as the state's numbers mean them
        self._kept: Kept = {}
        self._kept_at = -1  # the iteration before which they were taken

    def follow(self, bucket: Any) -> None:
        """Let the state's number of this bucket mean the parameters that are in it now; before each use of it."""
        index, parameters = bucket.index(), bucket.parameters()
        if self._kept_at < self._state.iter and self._buckets:
            self._kept = {}
        before = self._buckets.get(index)
        if before is not None and _alike(before, parameters):
            return
        state = self._state
        if self._kept_at != state.iter:
            self._kept, self._kept_at = self._by_parameter(), state.iter
        self._buckets[index] = parameters
        for held in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            held.pop(index, None)
        kept = [self._kept.get(parameter, (None, None)) for parameter in parameters]
        if any(error is not None for error, _ in kept):
            parts = [
                torch.zeros_like(p).reshape(-1) if error is None else error
                for p, (error, _) in zip(parameters, kept, strict=True)
            ]
            state.error_dict[index] = torch.cat(parts).to(bucket.buffer())
        compressed = self._compressed(parameters)
        factors = [self._kept.get(parameter, (None, None))[1] for parameter in compressed]
        if compressed and all(factor is not None for factor in factors):
            state.q_memory_dict[index] = torch.cat(factors).to(bucket.buffer())  # type: ignore[arg-type]
            rows = sum(p.shape[0] * self._rank_of(p) for p in compressed)
            state.p_memory_dict[index] = bucket.buffer().new_empty(rows)

    def state_dict(self) -> dict[str, Any]:
        """Give the factors, equal on all ranks, and this rank's errors."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        kept = self._by_parameter()
        state = self._state
        algorithm, keys, *rest = state.rng.get_state()
        return {
            **{name: getattr(state, name) for name in COUNTERS},
            "world_size": _world_size(),
            "random": [algorithm, keys.tolist(), *rest],
            "factors": {names[p]: factor for p, (_, factor) in kept.items() if factor is not None},
            "errors": {_place(): {names[p]: error for p, (error, _) in kept.items() if error is not None}},
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from there, in whatever buckets the parameters are by now.

        Each rank's errors are its own: on another number of ranks they begin anew, with a warning.
        """
        state = self._state
        for name in COUNTERS:
            setattr(state, name, saved[name])
        algorithm, keys, *rest = saved["random"]
        state.rng.set_state((algorithm, keys, *rest))
        for held in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            held.clear()
        errors = saved["errors"].get(_place(), {})
        if saved.get("world_size", _world_size()) != _world_size():
            errors = {}
            warnings.warn(
                f"PowerSGD's errors are those of {saved['world_size']} ranks, and this is a world of {_world_size()}: "
                "they begin at zero, and the next steps compress a little worse.",
                stacklevel=2,
            )
        parameters = dict(self._module.named_parameters())
        self._kept = {p: (errors.get(name), saved["factors"].get(name)) for name, p in parameters.items()}
        self._kept_at = state.iter
        self._buckets.clear()

    @staticmethod
    def own_part(saved: dict[str, Any]) -> dict[str, Any]:
        """Leave the other ranks' errors out of what a checkpoint has of this."""
        own = {place: errors for place, errors in saved["errors"].items() if place == _place()}
        return {**saved, "errors": own}

    def _by_parameter(self) -> Kept:
        """Take the buckets' memory apart."""
        state = self._state
        if not self._buckets:  # put back, and not used since
            return self._kept
        errors: dict[torch.Tensor, torch.Tensor] = {}
        factors: dict[torch.Tensor, torch.Tensor] = {}
        for index, parameters in self._buckets.items():
            if index in state.error_dict:
                sizes = [p.numel() for p in parameters]
                errors.update(zip(parameters, state.error_dict[index].split(sizes), strict=True))
            if index in state.q_memory_dict:
                compressed = self._compressed(parameters)
                sizes = [p.numel() // p.shape[0] * self._rank_of(p) for p in compressed]
                factors.update(zip(compressed, state.q_memory_dict[index].split(sizes), strict=True))
        return {p: (errors.get(p), factors.get(p)) for p in (*errors, *(factors.keys() - errors.keys()))}

    def _compressed(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Give the parameters of a bucket that are compressed, in the order of their factors: equal shapes together."""
        shapes: dict[tuple[int, int], list[torch.Tensor]] = {}
        state = self._state
        for parameter in parameters:
            rows = parameter.shape[0]
            columns = parameter.numel() // rows
            rank = self._rank_of(parameter)
            if (rows + columns) * rank * state.min_compression_rate < rows * columns:
                shapes.setdefault((rows, columns), []).append(parameter)
        return [parameter for alike in shapes.values() for parameter in alike]

    def _rank_of(self, parameter: torch.Tensor) -> int:
        rows = parameter.shape[0]
        return int(min(rows, parameter.numel() // rows, self._state.matrix_approximation_rank))


def _alike(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _place() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else 0}"


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
