"""A checkpoint's files on their way back: all read and compared first, and only then put in place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nbdist.engine.cells.interrupts import Interrupts
from nbdist.engine.loading.randomness import set_random_states
from nbdist.engine.saving import folders, plain, shards, states

__all__ = ["Reading"]


class Reading:
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
            rank, now = _rank_and_size()
            if world == now:
                own = json.loads((folder / f"rank-{rank}.json").read_bytes())
                self.random = plain.decode(own["random"], plain.read_inline)
            else:
                self.remarks.append(
                    f"{folder.name} was saved by {world} ranks and is loaded by {now}: random states go on as they are."
                )

    def apply(self) -> dict[str, Any]:
        """Put everything back in place; give the plain data."""
        extra = {}
        with Interrupts():
            for one in self.restoring:
                value = one.apply(self.tensors)
                if one.kind == "plain":
                    extra[one.part.name] = value
            if self.random is not None:
                set_random_states(self.random)
        return extra


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


def _rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
