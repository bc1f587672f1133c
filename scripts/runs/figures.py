"""The curves of runs as a matplotlib figure."""

import io
import math
from collections.abc import Sequence
from typing import Any

from common.errors import UserError
from scripts.runs.run import Run

PANELS = ("loss", "reward", "kl", "entropy", "completion_length", "learning_rate", "grad_norm")
PANELS += ("tokens_per_second", "expert_max_min")
PANEL_SIZE, SINGLE_SIZE = (4.0, 2.8), (7.6, 4.3)  # inches
POINTS, FEW_POINTS = 4000, 40  # of all curves of a panel together; of a curve, at least; so few are marked


def draw(runs: dict[str, Run], x: str, panels: Sequence[str] = PANELS) -> Any:
    """A matplotlib figure with a panel for each of the fields that a run has, a color for each run; what was
    measured on held-out data (`eval_<field>`) is dashed, in the panel of its field. The loss is the mean
    since the record before, where there is one; a value that is not finite leaves a gap in the curve.

    Raises:
        UserError: no run has any of the fields.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    curves = {name: curves_of(run, max(FEW_POINTS, POINTS // len(runs))) for name, run in runs.items()}
    fields = {field for columns in curves.values() for field in columns}
    # a held-out field has no panel of its own beside that of its field
    others = {f"eval_{panel}" for panel in panels}
    panels = [panel for panel in panels if panel in fields and panel not in others]
    if not panels:
        raise UserError("--panels: no run has any of these fields; leave the flag out to see what there is")
    colors: list[Any] = [f"C{number}" for number in range(len(runs))]
    if len(runs) > 10:  # more than matplotlib's own
        colors = [colormaps["turbo"](number / len(runs)) for number in range(len(runs))]
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    width, height = PANEL_SIZE if len(panels) > 1 else SINGLE_SIZE
    figure = Figure(layout="constrained", figsize=(width * across, height * down + 0.4 + 0.05 * len(runs)))
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(down, across, place)
        for number, (name, columns) in enumerate(curves.items()):
            # a run over another one hides it only in part
            style = {"color": colors[number], "linewidth": max(0.8, 2.4 - 0.4 * number)}
            # matplotlib hides names that begin with `_`
            draw_curves(axes, panel, x, name.lstrip("_"), columns, style)
        axes.grid(alpha=0.3)
        axes.set_title(panel, parse_math=False)
        axes.set_xlabel(x)
    add_legend(figure)
    return figure


def curves_of(run: Run, points: int) -> dict[str, list[float | None]]:
    """The values of each field to draw."""
    columns = run.columns(points)
    if "mean_loss" in columns:
        means = columns["mean_loss"]
        losses = columns.get("loss", means)
        columns["loss"] = [loss if mean is None else mean for loss, mean in zip(losses, means, strict=True)]
    if "eval_reward" in columns:
        columns.pop("eval_loss", None)  # minus the reward, which is no loss to draw
    return columns


def draw_curves(
    axes: Any, panel: str, x: str, name: str, columns: dict[str, list[float | None]], style: dict[str, Any]
) -> None:
    """Draw the curve of a field, and of what was measured of it on held-out data."""
    if panel in columns:
        values = [math.nan if value is None else value for value in columns[panel]]
        marker = "." if sum(not math.isnan(value) for value in values) < FEW_POINTS else None
        axes.plot(columns[x], values, label=name, marker=marker, **style)
    if f"eval_{panel}" in columns:
        points = zip(columns[x], columns[f"eval_{panel}"], strict=True)
        points = [(at, value) for at, value in points if value is not None]
        axes.plot(*zip(*points, strict=True), label=f"{name}, held-out", linestyle="--", marker=".", **style)


def add_legend(figure: Any) -> None:
    """A legend of all lines below the panels."""
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    legend = figure.legend(
        list(lines.values()), list(lines), loc="outside lower center", ncols=4, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a `$` in a name


def svg(figure: Any) -> str:
    """A matplotlib figure as an SVG element whose text stays text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]
