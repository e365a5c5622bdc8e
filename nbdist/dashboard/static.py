"""What stays in a saved notebook: a picture of the curves and a table, without script, kernel or network."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbdist.dashboard.panels import GREY, color_of, ranks_of, title_of
from nbdist.runs import Run
from nbdist.telemetry import Telemetry, summary

__all__ = ["bundle", "html_of", "png", "svg"]

WIDTH, HEIGHT = 380, 220  # pixels of one plot
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 24, 38
COLUMNS = 2
POINTS = 400  # drawn points a curve: about one a pixel
MAX_PLOTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    x: float
    y: float
    text: str
    anchor: str = "middle"  # start, middle, end
    turned: bool = False
    size: int = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    points: tuple[tuple[float, float], ...]
    color: str
    filled: bool = False
    alpha: float = 1.0
    width: float = 1.0


def bundle(telemetry: Telemetry, run: Run | None) -> dict[str, str]:
    """Give the display data of a run that is over: HTML with an SVG picture, PNG, and text, together < 300 kB."""
    data = {"text/plain": telemetry.table(), "text/html": html_of(telemetry, run)}
    if run is not None and run.curves:
        data["image/png"] = base64.b64encode(png(run)).decode("ascii")
    return data


def html_of(telemetry: Telemetry, run: Run | None) -> str:
    """Picture and table as HTML that passes every sanitizer: no script, no style sheet, no inline SVG."""
    parts = []
    if run is not None and run.curves:
        # As an image, not inline: an untrusted notebook is shown without its <svg> elements
        picture = base64.b64encode(svg(run).encode()).decode("ascii")
        said = html.escape(f"Curves of {run.name}: {', '.join(title_of(name)[0].lower() for name in _names(run))}")
        parts.append(f'<p><img alt="{said}" src="data:image/svg+xml;base64,{picture}"></p>')
    header = ("run", "steps", "loss", "samples/s", "first step", "time", "end")
    rows = [summary(r) for r in telemetry.runs[-20:]]
    cells = "".join(f"<th>{name}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    parts.append(f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>")
    if run is not None and run.note:
        parts.append(f"<p>{html.escape(run.note)}</p>")
    if telemetry.dropped:
        parts.append(f"<p>{telemetry.dropped:,} records were lost on the way.</p>")
    return "".join(parts)


def svg(run: Run) -> str:
    """Draw the curves of a run as SVG, readable on light and dark backgrounds."""
    width, height, shapes, texts = _draw(run)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" fill="{GREY}">'
    ]
    for shape in shapes:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        if shape.filled:
            parts.append(f'<polygon points="{points}" fill="{shape.color}" fill-opacity="{shape.alpha}"/>')
        else:
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{shape.color}" stroke-opacity="{shape.alpha}" '
                f'stroke-width="{shape.width}" stroke-linejoin="round"/>'
            )
    for text in texts:
        turn = f' transform="rotate(-90 {text.x:.1f} {text.y:.1f})"' if text.turned else ""
        parts.append(
            f'<text x="{text.x:.1f}" y="{text.y:.1f}" font-size="{text.size}" text-anchor="{text.anchor}"{turn}>'
            f"{html.escape(text.text)}</text>"
        )
    return "".join(parts) + "</svg>"


def png(run: Run, scale: int = 2) -> bytes:
    """Draw the same picture as a transparent PNG, for viewers that show neither HTML nor SVG."""
    from PIL import Image, ImageColor, ImageDraw, ImageFont  # comes with bokeh

    width, height, shapes, texts = _draw(run)
    image = Image.new("RGBA", (width * scale, height * scale), (0, 0, 0, 0))
    for shape in shapes:
        color = (*ImageColor.getrgb(shape.color)[:3], round(255 * shape.alpha))
        points = [(x * scale, y * scale) for x, y in shape.points]
        # each on a layer of its own: ImageDraw replaces pixels, alpha and all, where it should blend
        layer = Image.new("RGBA", image.size, (0, 0, 0, 0))
        pen = ImageDraw.Draw(layer)
        if shape.filled:
            pen.polygon(points, fill=color)
        else:
            pen.line(points, fill=color, width=round(shape.width * scale), joint="curve")
        image.alpha_composite(layer)
    grey = ImageColor.getrgb(GREY)
    for text in texts:
        font = ImageFont.load_default(text.size * scale)
        if text.turned:
            box = font.getbbox(text.text)
            tile = Image.new("RGBA", (round(box[2]) + 2, round(box[3]) + 2), (0, 0, 0, 0))
            ImageDraw.Draw(tile).text((0, 0), text.text, fill=grey, font=font)
            tile = tile.rotate(90, expand=True)
            place = (round(text.x * scale - tile.width), round(text.y * scale - tile.height / 2))
            image.alpha_composite(tile, (max(0, place[0]), max(0, place[1])))
        else:
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[text.anchor]
            ImageDraw.Draw(image).text((text.x * scale, text.y * scale), text.text, fill=grey, font=font, anchor=anchor)
    # 128 colours are enough for lines and text, and a third of the bytes
    out = io.BytesIO()
    image.quantize(128, method=Image.Quantize.FASTOCTREE).save(out, "PNG", optimize=True)
    return out.getvalue()


def _names(run: Run) -> list[str]:
    first = [name for name in ("loss", "samples_per_s") if name in run.curves]
    return (first + [name for name in tuple(run.curves) if name not in first])[:MAX_PLOTS]


def _draw(run: Run) -> tuple[int, int, list[_Shape], list[_Text]]:
    names = _names(run)
    shapes: list[_Shape] = []
    texts: list[_Text] = []
    for i, name in enumerate(names):
        x, y = i % COLUMNS * WIDTH, i // COLUMNS * HEIGHT
        _plot(run, name, x, y, shapes, texts)
    rows = -(-len(names) // COLUMNS)
    return WIDTH * min(COLUMNS, max(1, len(names))), HEIGHT * max(1, rows), shapes, texts


def _plot(run: Run, name: str, x0: float, y0: float, shapes: list[_Shape], texts: list[_Text]) -> None:
    curve, color = run.curves[name], color_of(name)
    stride = -(-len(curve) // POINTS)
    picked = range((len(curve) - 1) % max(1, stride), len(curve), max(1, stride))  # the last point is always among them
    xs = [curve.x[i] for i in picked]
    means = [curve.mean[i] for i in picked]
    # a spike between the picked points still widens the band
    lows = [_reduce(min, curve.low[max(0, i - stride + 1) : i + 1]) for i in picked]
    highs = [_reduce(max, curve.high[max(0, i - stride + 1) : i + 1]) for i in picked]
    x_low, x_high = _span(xs, 0.5)
    y_low, y_high = _span([*lows, *highs, *([0.0] if name == "samples_per_s" else [])], 0.05)
    left, right, top, bottom = x0 + LEFT, x0 + WIDTH - RIGHT, y0 + TOP, y0 + HEIGHT - BOTTOM

    def at_x(x: float) -> float:
        return left + (x - x_low) / (x_high - x_low) * (right - left)

    def at_y(y: float) -> float:
        return bottom - (y - y_low) / (y_high - y_low) * (bottom - top)

    for tick in _ticks(y_low, y_high, 5):
        shapes.append(_Shape(points=((left, at_y(tick)), (right, at_y(tick))), color=GREY, alpha=0.2))
        texts.append(_Text(x=left - 5, y=at_y(tick) + 4, text=_label(tick), anchor="end"))
    for tick in _ticks(x_low, x_high, 5):
        if tick == round(tick):
            texts.append(_Text(x=at_x(tick), y=bottom + 15, text=f"{tick:,.0f}"))
    shapes.append(_Shape(points=((left, top), (left, bottom), (right, bottom)), color=GREY))
    title, axis = title_of(name)
    texts.append(
        _Text(
            x=left,
            y=y0 + 15,
            text=f"{title} · {run.name} · {ranks_of(name, run.world_size)}"[:60],
            anchor="start",
            size=12,
        )
    )
    texts.append(_Text(x=(left + right) / 2, y=bottom + 32, text="step"))
    texts.append(_Text(x=x0 + 14, y=(top + bottom) / 2, text=axis[:24], turned=True))
    if name != "samples_per_s" and run.world_size > 1:
        for part in _unbroken(xs, lows, highs):
            band = [(at_x(x), at_y(low)) for x, low, _ in part] + [(at_x(x), at_y(high)) for x, _, high in part[::-1]]
            shapes.append(_Shape(points=tuple(band), color=color, filled=True, alpha=0.25))
    for part in _unbroken(xs, means, means):
        line = [(at_x(x), at_y(mean)) for x, mean, _ in part]
        if len(line) == 1:  # a point without neighbours is drawn as a short dash
            line = [(line[0][0] - 2, line[0][1]), (line[0][0] + 2, line[0][1])]
        shapes.append(_Shape(points=tuple(line), color=color, width=2))


def _unbroken(xs: Sequence[float], a: Sequence[float], b: Sequence[float]) -> list[list[tuple[float, float, float]]]:
    """Cut where a value is not finite."""
    parts: list[list[tuple[float, float, float]]] = [[]]
    for point in zip(xs, a, b, strict=True):
        if math.isfinite(point[1]) and math.isfinite(point[2]):
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _reduce(choose: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return choose(known) if known else math.nan


def _span(values: Sequence[float], empty: float) -> tuple[float, float]:
    known = [value for value in values if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if high > low:
        return low, high
    margin = max(abs(low) * empty, empty)
    return low - margin, high + margin


def _ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
