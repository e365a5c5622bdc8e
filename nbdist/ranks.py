"""Sets of ranks as people write and read them: ``0,2-3``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["PerRank", "fold", "parse", "spell"]


def parse(text: str, world_size: int) -> tuple[int, ...]:
    """Read ``0,2-3`` as ranks of a world.

    Raises
    ------
    ValueError
        With the rank that does not exist, or the text that is none.
    """
    ranks: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"--ranks {text}: write ranks like 0,2-3.")
        # before they are counted out: there may be no memory for that many
        check({int(first), int(last or first)}, world_size)
        ranks.update(range(int(first), int(last or first) + 1))
    return check(ranks, world_size)


def check(ranks: Iterable[int], world_size: int) -> tuple[int, ...]:
    """Give the ranks in order; a ValueError names one that is not in the world."""
    chosen = tuple(sorted(set(ranks)))
    for rank in chosen:
        if not 0 <= rank < world_size:
            raise ValueError(f"No rank {rank} in a world of {world_size}.")
    if not chosen:
        raise ValueError("No rank chosen.")
    return chosen


def spell(ranks: Iterable[int], separator: str = ",") -> str:
    """Write ranks shortly: 0, 2, 3 as ``0,2-3``."""
    parts: list[str] = []
    ordered = sorted(ranks)
    start = 0
    for i, rank in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != rank + 1:
            run = ordered[start : i + 1]
            parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{rank}")
            start = i + 1
    return separator.join(parts)


def named(ranks: Iterable[int]) -> str:
    """Write ranks in a sentence: ``rank 1``, ``ranks 0, 2-3``."""
    chosen = list(ranks)
    return f"rank{'s' if len(chosen) > 1 else ''} {spell(chosen, ', ')}"


def fold(texts: dict[int, str]) -> list[tuple[tuple[int, ...], str]]:
    """Group ranks whose texts are equal, in the order of the lowest rank of each group."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    return [(tuple(ranks), text) for text, ranks in groups.items()]


class PerRank(list[Any]):
    """One value per rank; equal values are shown once, under their ranks."""

    def __init__(self, values: Iterable[Any], ranks: Sequence[int]) -> None:
        super().__init__(values)
        self.ranks = tuple(ranks)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from IPython.lib.pretty import pretty

        lines = fold({rank: pretty(value) for rank, value in zip(self.ranks, self, strict=True)})
        printer.text("\n".join(f"[{spell(ranks)}] {text}" for ranks, text in lines))
