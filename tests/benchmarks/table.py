"""A table of measurements, and the interleaving of the sides that it compares."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """What was measured, row by row, under a title; ``str()`` renders it for a terminal or a Markdown page."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    met: bool = True

    def add(self, *cells: str) -> None:
        assert len(cells) == len(self.columns), cells
        self.rows.append(cells)

    def verdict(
        self, value: float, unit: str = "", *, at_most: float | None = None, at_least: float | None = None
    ) -> str:
        """Say whether a value is within its bound, and remember if not."""
        ok = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        self.met &= ok
        bound = f"≤ {at_most:,}" if at_most is not None else f"≥ {at_least:,}"
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        return f"{shown}{unit} ({bound}: {'met' if ok else 'NOT MET'})"

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in [self.columns, *self.rows]) for i in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

        return "\n".join(
            [
                f"### {self.title}",
                "",
                line(self.columns),
                "|" + "|".join("-" * (width + 2) for width in widths) + "|",
                *map(line, self.rows),
                *(f"- {note}" for note in self.notes),
            ]
        )


def interleave(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure each side ``repeats`` times in turn, every other round backwards: no side is always first."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(repeats):
        for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
            values[name].append(sides[name]())
    return values


def spread(values: Sequence[float], unit: str, scale: float = 1.0) -> str:
    """Render the median and the range of some measurements."""
    low, middle, high = (scale * v for v in (min(values), statistics.median(values), max(values)))
    return f"{middle:.3g} {unit} ({low:.3g}–{high:.3g})"


def percentile(values: Sequence[float], share: float) -> float:
    """Give the value below which ``share`` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
