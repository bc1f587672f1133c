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
MAX_POINTS, MAX_MARKED_POINTS = 1000, 40  # points are marked on curves with at most this many


def draw(runs: dict[str, Run], x: str, panels: Sequence[str] = PANELS) -> Any:
    """A matplotlib figure with a panel for each field that a run has and a color for each run. Held-out
    values (`eval_<field>`) are dashed, in the panel of their field, and begin before the first update. The
    loss is the mean since the record before, if there is one. A value that is not finite leaves a gap in the
    curve.

    Raises:
        UserError: no run has any of the fields.
    """
    from matplotlib.figure import Figure

    curves = {name: curves_of(run) for name, run in runs.items()}
    fields = {field for columns in curves.values() for field in columns}
    panels = [panel for panel in panels if panel in fields]
    if not panels:
        raise UserError(
            "--panels: no run has any of these fields; leave the flag out to draw the default fields"
        )
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    width, height = PANEL_SIZE if len(panels) > 1 else SINGLE_SIZE
    figure = Figure(layout="constrained", figsize=(width * across, height * down + 0.4 + 0.05 * len(runs)))
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(down, across, place)
        for number, (name, columns) in enumerate(curves.items()):
            draw_curves(axes, panel, x, name, columns, f"C{number}")
        axes.grid(alpha=0.3)
        axes.set_title(panel)
        axes.set_xlabel(x)
    lines: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    legend = figure.legend(
        list(lines.values()), list(lines), loc="outside lower center", ncols=4, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may contain `$`
    return figure


def curves_of(run: Run) -> dict[str, list[float | None]]:
    """The values of each field to draw."""
    columns = run.columns(MAX_POINTS)
    if "mean_loss" in columns:
        means = columns["mean_loss"]
        losses = columns.get("loss", means)
        columns["loss"] = [loss if mean is None else mean for loss, mean in zip(losses, means, strict=True)]
    if "eval_reward" in columns:
        columns.pop("eval_loss", None)  # it is minus the reward, not a loss
    return columns


def draw_curves(
    axes: Any, panel: str, x: str, name: str, columns: dict[str, list[float | None]], color: str
) -> None:
    """Draw the curve of a field, and the curve of its held-out values."""
    if panel in columns:
        values = [math.nan if value is None else value for value in columns[panel]]
        marker = "." if len(values) < MAX_MARKED_POINTS else None
        axes.plot(columns[x], values, label=name, marker=marker, color=color)
    if f"eval_{panel}" in columns:
        points = zip(columns[x], columns[f"eval_{panel}"], strict=True)
        points = [(at, value) for at, value in points if value is not None]
        initial = columns.get(f"initial_eval_{panel}", [None])[0]
        if initial is not None:
            points.insert(0, (columns[x][0], initial))
        label = f"{name}, held-out"
        axes.plot(*zip(*points, strict=True), label=label, linestyle="--", marker=".", color=color)


def svg(figure: Any) -> str:
    """A matplotlib figure as an SVG element whose text stays text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]
