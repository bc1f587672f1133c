"""The large curve of the report, as an SVG element that takes its colours from the page."""

import math
from html import escape

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


def curve_svg(
    runs: list[Run],
    colors: list[str],
    field: str,
    x: str,
    size: tuple[int, int],
    axes: list[str],
    starts: list[float],
) -> str:
    """The curves of a field over `x`: thin what was measured in training, bold with dots on held-out data.
    axes: the names of y and x. starts: where on the x axis each run begins. Empty where no run has the
    field."""
    width, height = size
    lines: list[tuple[str, str, list[tuple[float, float]]]] = []  # class, color, points
    for run, color, start in zip(runs, colors, starts, strict=True):
        columns = run.columns(POINTS)
        trained = columns.get(field, [])
        if field == "loss":
            trained = columns.get("mean_loss", trained)
        for name, values in (("trained", trained), ("held-out", columns.get(f"eval_{field}", []))):
            points = []
            for at, value in zip(columns[x], values, strict=False):
                if at is not None and value is not None:
                    points.append((start + at, value))
            if points:
                lines.append((name, color, points))
    if not lines:
        return ""
    every = [point for _, _, points in lines for point in points]
    right = max(at for at, _ in every)
    low, high = min(value for _, value in every), max(value for _, value in every)
    pad = 0.04 * max(high - low, 1e-3)
    low, high = low - pad, high + pad

    def place(at: float, value: float) -> tuple[float, float]:
        across = LEFT + (width - LEFT - RIGHT) * at / max(right, 1e-9)
        down = TOP + (height - TOP - BOTTOM) * (high - value) / (high - low)
        return round(across, 1), round(down, 1)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img">']
    for number in ticks(low, high, 6):
        _, y = place(0, number)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{width - RIGHT}" y2="{y}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 5}" text-anchor="end">{tick_label(round(number, 6))}</text>'
        )
    for number in ticks(0, right, max(3, width // 130)):
        at, _ = place(number, low)
        parts.append(
            f'<text x="{at}" y="{height - BOTTOM + 20}" text-anchor="middle">{tick_label(number)}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="15" class="axis">{escape(axes[0])}</text>')
    parts.append(
        f'<text x="{width - RIGHT}" y="{height - 6}" text-anchor="end" class="axis">{escape(axes[1])}</text>'
    )
    for name, color, points in lines:
        placed = [place(*point) for point in points]
        path = " ".join(f"{at},{y}" for at, y in placed)
        parts.append(f'<polyline class="{name}" stroke="{color}" points="{path}"/>')
        if name == "held-out" and len(placed) <= 40:
            parts += [f'<circle cx="{at}" cy="{y}" r="4" fill="{color}"/>' for at, y in placed]
    return "".join(parts) + "</svg>"
