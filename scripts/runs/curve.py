"""The large curve of the report, as an SVG element that takes its colours from the page."""

import math
from html import escape
from typing import NamedTuple

from scripts.runs.run import Run

POINTS = 200  # of a curve
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 26, 46  # margins


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count` round numbers between two numbers."""
    span = max(high - low, 1e-9)
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= next(times for times in (1, 2, 5, 10) if span / (step * times) <= count)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def tick_label(number: float) -> str:
    """A round number in few characters."""
    if abs(number) >= 1e6:
        return f"{number / 1e6:g} M"
    return f"{number / 1e3:g} k" if abs(number) >= 1e4 else f"{number:g}"


class Curve(NamedTuple):
    """What is drawn of a run."""

    kind: str  # trained or held-out; its class in the page's CSS
    color: str
    points: list[tuple[float, float]]


def curves_of(run: Run, color: str, field: str, x: str, start: float) -> list[Curve]:
    """The curves of a field, as far as the run has it. start: where on the x axis the run begins."""
    columns = run.columns(POINTS)
    trained = "mean_loss" if field == "loss" and "mean_loss" in columns else field
    curves = []
    for kind, name in (("trained", trained), ("held-out", f"eval_{field}")):
        points = []
        for at, value in zip(columns[x], columns.get(name, []), strict=False):
            if at is not None and value is not None:
                points.append((start + at, value))
        if points:
            curves.append(Curve(kind, color, points))
    return curves


def curve_svg(curves: list[Curve], size: tuple[int, int], axes: list[str]) -> str:
    """Curves as an SVG element: thin what was measured in training, bold with dots on held-out data. axes:
    the names of y and x. Empty where there are no curves."""
    if not curves:
        return ""
    width, height = size
    points = [point for curve in curves for point in curve.points]
    right = max(at for at, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    pad = 0.04 * max(high - low, 1e-3)
    low, high = low - pad, high + pad

    def place(at: float, value: float) -> tuple[float, float]:
        across = LEFT + (width - LEFT - RIGHT) * at / max(right, 1e-9)
        down = TOP + (height - TOP - BOTTOM) * (high - value) / (high - low)
        return round(across, 1), round(down, 1)

    def text(x: float, y: float, words: str, style: str) -> str:
        return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img">']
    for number in ticks(low, high, 6):
        _, y = place(0, number)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{width - RIGHT}" y2="{y}"/>')
        parts.append(text(LEFT - 8, y + 5, tick_label(round(number, 6)), 'text-anchor="end"'))
    for number in ticks(0, right, max(3, width // 130)):
        at, _ = place(number, low)
        parts.append(text(at, height - BOTTOM + 20, tick_label(number), 'text-anchor="middle"'))
    parts.append(text(LEFT, 15, axes[0], 'class="axis"'))
    parts.append(text(width - RIGHT, height - 6, axes[1], 'text-anchor="end" class="axis"'))
    for curve in curves:
        placed = [place(*point) for point in curve.points]
        path = " ".join(f"{at},{y}" for at, y in placed)
        parts.append(f'<polyline class="{curve.kind}" stroke="{curve.color}" points="{path}"/>')
        if curve.kind == "held-out" and len(placed) <= 40:
            parts += [f'<circle cx="{at}" cy="{y}" r="4" fill="{curve.color}"/>' for at, y in placed]
    return "".join(parts) + "</svg>"
