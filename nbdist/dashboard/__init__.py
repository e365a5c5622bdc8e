"""The live panel of a notebook: curves, progress, ranks, Stop."""

from __future__ import annotations

from nbdist.dashboard.live import Dashboard

__all__ = ["Dashboard"]
