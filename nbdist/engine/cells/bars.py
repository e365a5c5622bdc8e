"""Progress bars of a rank are text: a widget made here would have no page to live in."""

from __future__ import annotations

import importlib.util
import sys
import types

__all__ = ["use_text_bars"]


def use_text_bars() -> None:
    """Let ``tqdm.auto`` and ``tqdm.notebook`` give tqdm's text bar; tqdm itself looks only whether IPython is there."""
    if importlib.util.find_spec("tqdm") is None:
        return
    from tqdm import std

    for name in ("tqdm.autonotebook", "tqdm.notebook"):
        module = types.ModuleType(name, "Text bars, since this is a rank of an nbdist cluster.")
        module.__dict__.update(
            tqdm=std.tqdm, trange=std.trange, tqdm_notebook=std.tqdm, tnrange=std.trange, __all__=["tqdm", "trange"]
        )
        sys.modules[name] = module
