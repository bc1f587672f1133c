"""The curves of runs as matplotlib figures: a panel for each field, and one large curve for the report."""

import io
import math
from collections.abc import Sequence
from colorsys import hsv_to_rgb
from typing import Any

from common.errors import UserError
from scripts.runs.run import Run

PANELS = ("loss", "reward", "kl", "entropy", "completion_length", "learning_rate", "grad_norm")
PANELS += ("tokens_per_second", "expert_max_min")
PANEL_SIZE, LARGE_SIZE = (4.0, 2.8), (7.6, 4.3)  # inches
POINTS = 4000  # of all curves of a panel together, but some of each


def draw(runs: dict[str, Run], x: str, panels: Sequence[str] = PANELS) -> Any:
    """A matplotlib figure with a panel for each of the fields that a run has, a color for each run; what was
    measured on held-out data (`eval_<field>`) is dashed, in the panel of its field. The loss is the mean
    since the record before, where there is one; `null` (not finite) leaves a gap in the curve. Raises
    UserError if no run has any of the fields, or matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plotting needs matplotlib: pip install -r requirements.txt") from error
    curves = {name: curves_of(run, max(40, POINTS // len(runs))) for name, run in runs.items()}
    fields = {field for columns in curves.values() for field in columns}
    # a held-out field has no panel of its own beside that of its field
    others = {f"eval_{panel}" for panel in panels}
    panels = [panel for panel in panels if panel in fields and panel not in others]
    if not panels:
        raise UserError("--panels: no run has any of these fields; leave the flag out to see what there is")
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    legend_height = 0.4 + 0.2 * math.ceil(len(runs) / 4)
    size = (PANEL_SIZE[0] * across, PANEL_SIZE[1] * down + legend_height)
    figure = Figure(layout="constrained", figsize=size)
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(down, across, place)
        draw_panel(axes, panel, x, curves)
        axes.set_title(panel, parse_math=False)
        axes.set_xlabel(x)
    drawn: dict[str, Any] = {}  # the runs of which there is a curve, with their colors
    for (name, columns), color in zip(curves.items(), run_colors(len(runs)), strict=True):
        if any(panel in columns or f"eval_{panel}" in columns for panel in panels):
            drawn[name] = color
    add_legend(figure, drawn)
    return figure


def draw_large(runs: list[Run], x: str, field: str, labels: list[str], in_a_row: bool) -> Any:
    """A matplotlib figure of one field; None if no run has it.

    Args:
        labels: of the axes x and y.
        in_a_row: each run begins where the one before ended.
    """
    from matplotlib.figure import Figure

    curves, start = {}, 0.0
    for number, run in enumerate(runs):
        columns = curves_of(run, max(40, POINTS // len(runs)))
        columns[x] = [start + at for at in columns[x]]
        curves[str(number)] = columns
        if in_a_row:
            start += run.figures[x]
    figure = Figure(layout="constrained", figsize=LARGE_SIZE)
    axes = figure.add_subplot()
    draw_panel(axes, field, x, curves)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    return figure if axes.lines else None


def curves_of(run: Run, points: int) -> dict[str, list]:
    """The values of each field to draw."""
    columns = run.columns(points)
    if "mean_loss" in columns:
        means = columns["mean_loss"]
        losses = columns.get("loss", means)
        columns["loss"] = [loss if mean is None else mean for loss, mean in zip(losses, means, strict=True)]
    if "eval_reward" in columns:
        columns.pop("eval_loss", None)  # minus the reward, which is no loss to draw
    return columns


def draw_panel(axes: Any, panel: str, x: str, curves: dict[str, dict[str, list]]) -> None:
    """Draw the curves of a field, and of what was measured of it on held-out data."""
    colors = run_colors(len(curves))
    for number, (name, columns) in enumerate(curves.items()):
        # a run over another one hides it only in part
        style = {"color": colors[number], "linewidth": max(0.8, 2.4 - 0.4 * number)}
        if panel in columns:
            ys = [math.nan if y is None else y for y in columns[panel]]
            count = sum(not math.isnan(y) for y in ys)
            marker = "." if count < max(40, len(ys) / 2) else None
            axes.plot(columns[x], ys, label=name, marker=marker, **style)
        if f"eval_{panel}" in columns:
            points = zip(columns[x], columns[f"eval_{panel}"], strict=True)
            points = [(at, y) for at, y in points if y is not None]
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, label=f"{name}, held-out", linestyle="--", marker=".", **style)
    axes.grid(alpha=0.3)


def add_legend(figure: Any, drawn: dict[str, Any]) -> None:
    """A legend of the runs below the panels, and of the dashed lines if there are any."""
    from matplotlib.lines import Line2D

    names = list(drawn)
    handles = [Line2D([], [], color=color) for color in drawn.values()]
    if any(line.get_linestyle() == "--" for axes in figure.axes for line in axes.lines):
        names.append("held-out")
        handles.append(Line2D([], [], color="gray", linestyle="--", marker="."))
    # matplotlib hides names that begin with `_`
    labels = [f" {name}" if name.startswith("_") else name for name in names]
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a `$` in a name


def run_colors(count: int) -> list[str]:
    """A colour for each run, none twice."""
    from matplotlib.colors import to_hex

    if count <= 10:
        return [to_hex(f"C{number}") for number in range(count)]  # matplotlib's own
    colors = []
    for number in range(count):
        brightness = 0.85 if number % 2 else 0.55
        colors.append(to_hex(hsv_to_rgb(number / count, 1.0, brightness)))
    return colors


def svg(figure: Any) -> str:
    """A matplotlib figure as an SVG element whose text stays text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]
