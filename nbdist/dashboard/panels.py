"""The figures: made with bokeh here, drawn by BokehJS in the page, filled by the widget's own protocol."""

from __future__ import annotations

import functools
import gzip
from pathlib import Path
from typing import Any

import bokeh
from bokeh.embed import json_item
from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure
from bokeh.settings import settings

__all__ = ["GREY", "bokehjs", "bokehjs_version", "color_of", "panel", "ranks_of", "title_of"]

# Okabe-Ito: told apart with any colour vision, on light and dark
PALETTE = ("#2F8CCB", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
GREY = "#808080"  # text and lines that can be read on white and on near-black


@functools.cache
def bokehjs() -> bytes:
    """BokehJS as the installed bokeh package ships it, gzipped: 0.35 MB go to the page, once, and nothing to a CDN."""
    return gzip.compress((Path(settings.bokehjs_path()) / "js" / "bokeh.min.js").read_bytes(), mtime=0)


def bokehjs_version() -> str:
    """The version of BokehJS that `bokehjs` gives, and that draws the figures of `panel`."""
    return str(bokeh.__version__)


def title_of(series: str) -> tuple[str, str]:
    """Title and axis label, with its unit, of a curve."""
    return {
        "loss": ("Loss", "loss"),
        "samples_per_s": ("Throughput", "samples/s"),
    }.get(series, (series, series))


def ranks_of(series: str, world_size: int) -> str:
    """Whose values a curve shows."""
    if world_size == 1:
        return "1 rank"
    return f"all {world_size} ranks together" if series == "samples_per_s" else f"mean of {world_size} ranks"


def color_of(series: str) -> str:
    """The colour of a curve, the same in the live figure and in the saved picture."""
    return PALETTE[{"loss": 0, "samples_per_s": 2}.get(series, 3)]


def panel(series: str, world_size: int) -> dict[str, Any]:
    """Describe the figure of one curve.

    Parameters
    ----------
    series
        Name of the curve in `Run.curves`.
    world_size
        Ranks behind each value.

    Returns
    -------
    dict
        `series`, `title`, `legend` (line or band, colour, text) and `item`: the figure as bokeh's JSON, with an empty
        source named "points" whose columns x, mean, low and high the page fills.
    """
    title, label = title_of(series)
    source = ColumnDataSource({"x": [], "mean": [], "low": [], "high": []}, name="points")
    color = color_of(series)
    plot = figure(
        height=240,
        sizing_mode="stretch_width",
        min_width=240,
        x_axis_label="step",
        y_axis_label=label,
        tools="pan,box_zoom,reset",
        output_backend="canvas",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=GREY,
        outline_line_alpha=0.4,
    )
    plot.toolbar.autohide = True
    plot.toolbar.logo = None
    for axis in plot.axis:
        axis.axis_label_text_color = axis.major_label_text_color = GREY
        axis.axis_label_text_font_style = "normal"
        axis.axis_line_color = axis.major_tick_line_color = GREY
        axis.minor_tick_line_color = None
    plot.grid.grid_line_color = GREY
    plot.grid.grid_line_alpha = 0.2
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xaxis.ticker = BasicTicker(min_interval=1)  # there is no half step
    plot.x_range.start = 0
    # The legend is the page's: BokehJS 3.9 forgets the swatches of a figure that began without points
    legend = [("line", color, ranks_of(series, world_size))]
    if series == "samples_per_s":
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
        plot.y_range.start = 0
    elif world_size > 1:
        legend.append(("band", color, "lowest to highest rank"))
        plot.varea("x", "low", "high", source=source, fill_color=color, fill_alpha=0.25)
    line = plot.line("x", "mean", source=source, line_color=color, line_width=2)
    tips = [("step", "@x{0,0}"), (label, "@mean{0.[0000]}")]
    if series != "samples_per_s":
        tips.append(("ranks", "@low{0.[0000]} to @high{0.[0000]}"))
    plot.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline"))
    return {"series": series, "title": title, "legend": legend, "item": json_item(plot)}
