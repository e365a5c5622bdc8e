"""The figures: made with bokeh here, drawn by BokehJS in the page, filled by the widget's own protocol."""

from __future__ import annotations

import functools
import gzip
from pathlib import Path
from typing import Any

import bokeh
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.plotting import figure
from bokeh.settings import settings

__all__ = ["GREY", "bokehjs", "bokehjs_version", "color_of", "panel", "title_of"]

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
        `series`, `title`, and `item`: the figure as bokeh's JSON, with an empty source named "points" whose columns x,
        mean, low and high the page fills.
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
    if series == "samples_per_s":
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
        plot.y_range.start = 0
        legend = f"all {world_size} ranks together" if world_size > 1 else "1 rank"
    else:
        legend = f"mean of {world_size} ranks (band: lowest to highest)" if world_size > 1 else "1 rank"
        if world_size > 1:
            # no legend entry of its own: BokehJS 3.9 draws no swatches in a legend that holds an area
            plot.varea("x", "low", "high", source=source, fill_color=color, fill_alpha=0.25)
    line = plot.line("x", "mean", source=source, line_color=color, line_width=2, legend_label=legend)
    tips = [("step", "@x{0,0}"), (label, "@mean{0.[0000]}")]
    if series != "samples_per_s":
        tips.append(("ranks", "@low{0.[0000]} to @high{0.[0000]}"))
    plot.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline"))
    plot.legend.background_fill_alpha = 0
    plot.legend.border_line_color = None
    plot.legend.label_text_color = GREY
    plot.legend.location = "top_right" if series == "loss" else "bottom_right"
    return {"series": series, "title": f"{title} by step", "item": json_item(plot)}
