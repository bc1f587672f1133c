"""A table of runs, their curves as a picture, and a page with everything about them to send to somebody.

    python scripts/plot_metrics.py out
    python scripts/plot_metrics.py out/a_512_metrics.jsonl out/b_512_metrics.jsonl --x tokens --png curves.png
    python scripts/plot_metrics.py out --panels loss learning_rate --png out/curves.png --html out/runs.html

It reads the metrics files that training writes, also while a run is in progress, and the settings beside
them.
"""

import argparse
import math
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from tqdm.utils import disp_len

from common.errors import UserError, printable, say, warn
from scripts.runs import report
from scripts.runs.run import AXES, ENDING, RESULTS, Run, differing, read_run, shown
from trainer.run.paths import settings_path

PANELS = ("loss", "reward", "kl", "entropy", "completion_length", "learning_rate", "grad_norm")
PANELS += ("tokens_per_second", "expert_max_min")
PANEL_SIZE = (4.0, 2.8)  # inches
POINTS = 4000  # of all curves of a panel together, but some of each
LONGEST = 28  # characters of a cell on a terminal


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag("metrics", nargs="+", help="metrics files, out/<run>_metrics.jsonl, or folders of them")
    flag("--png", help="picture of the curves to write")
    flag("--html", help="page to write, to send to somebody: one file that needs no network")
    flag("--lang", choices=("en", "zh"), help="language of the page (default: en)")
    flag("--panels", nargs="+", help=f"fields of the records to draw (default: {' '.join(PANELS)})")
    flag("--x", choices=AXES, help="field on the x axis of the curves (default: update)")
    args = parser.parse_args()
    if args.lang and not args.html:
        raise UserError("--lang is the language of the page; add where to: --html FILE")
    if (args.panels or args.x) and not (args.png or args.html):
        raise UserError("--panels and --x say how curves are drawn; add where to: --png FILE or --html FILE")
    return args


def find_runs(paths: list[str]) -> list[Path]:
    """The metrics files among files and folders. Raises UserError if a folder holds none."""
    runs = []
    for path in map(Path, paths):
        files = sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} holds no metrics of a run (...{ENDING}); give the --save_dir of a run")
        runs += files
    return list(dict.fromkeys(runs))


def read_runs(paths: list[str]) -> dict[str, Run]:
    """The runs by their names, the one of the lowest held-out loss first. Of several, those that cannot be
    read or have no records yet are left out with a warning, and so are damaged lines and settings. Raises
    UserError if none is left.
    """
    runs: list[Run] = []
    problems = []
    for path in find_runs(paths):
        try:
            run = read_run(path)
        except OSError as error:
            problems.append(str(error))
            continue
        if run.about is None:
            warn(f"{settings_path(path)} is damaged: the settings of this run are not shown")
        if run.records:
            runs.append(run)
            if run.damaged:
                warn(f"{path}: damaged lines, left out: {run.damaged}")
        elif run.damaged:
            fields = ", ".join(AXES)
            problems.append(f"{path} is not a metrics file; its lines must be JSON objects with {fields}")
        else:
            problems.append(f"{path} holds no records yet; they come every --log_interval")
    if not runs:
        raise UserError("; ".join(problems))
    for problem in problems:
        warn(problem)

    def losses(run: Run) -> list[float]:
        return [run.figures.get(loss, math.inf) for loss in ("best_eval_loss", "loss")]

    runs.sort(key=losses)
    names = [str(run.path).removesuffix(".jsonl").removesuffix("_metrics") for run in runs]
    short = [Path(name).name for name in names]
    if len(set(short)) == len(short):
        names = short
    return {printable(name): run for name, run in zip(names, runs, strict=True)}


# --- the table


def run_rows(runs: dict[str, Run]) -> list[list[str]]:
    """The table of runs: a head, and a row for each. Behind the name stands what the run came to, then the
    settings that differ. Figures that are the same for all, and paths, which are long, are the last
    columns."""

    def figure_columns(names: Sequence[str]) -> list[list[str]]:
        columns = []
        for name in names:
            if any(name in run.figures for run in runs.values()):
                columns.append([name, *(shown(run.figures, name) for run in runs.values())])
        return columns

    def comes_last(column: list[str]) -> bool:
        cells = column[1:]
        return len(set(cells)) == 1 or any("/" in cell or "\\" in cell for cell in cells)

    others = figure_columns(AXES)
    for name in differing([run.settings for run in runs.values()]):
        others.append([name, *(run.settings.get(name, "-") for run in runs.values())])
    others.sort(key=comes_last)  # stable
    columns = [["run", *runs], *figure_columns(RESULTS), *others]
    return [[" ".join(printable(cell).split()) for cell in row] for row in zip(*columns, strict=True)]


def table_lines(rows: list[list[str]], width: int | None) -> list[str]:
    """A table as text. With the width of a terminal, long cells lose their beginning, and columns that do not
    fit stand in further blocks below, each with the first column again."""
    if width:
        rows = [[cell if len(cell) <= LONGEST else f"…{cell[1 - LONGEST :]}" for cell in row] for row in rows]
    sizes = [max(map(disp_len, column)) for column in zip(*rows, strict=True)]
    blocks, used = [[0]], sizes[0]
    for column in range(1, len(sizes)):
        used += 2 + sizes[column]
        if width and used > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = sizes[0] + 2 + sizes[column]
        blocks[-1].append(column)
    lines: list[str] = []
    for block in blocks:
        if lines:
            lines.append("")
        for row in rows:
            # str.ljust counts characters, of which some are two columns wide
            missing = [size - disp_len(cell) for size, cell in zip(sizes, row, strict=True)]
            cells = [row[0].ljust(len(row[0]) + missing[0])]
            for i in block[1:]:
                cells.append(row[i].rjust(len(row[i]) + missing[i]))
            lines.append("  ".join(cells).rstrip())
    return lines


# --- the curves


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
        draw_panel(figure.add_subplot(down, across, place), panel, x, curves)
    drawn: dict[str, Any] = {}  # the runs of which there is a curve, with their colors
    for (name, columns), color in zip(curves.items(), run_colors(len(runs)), strict=True):
        if any(panel in columns or f"eval_{panel}" in columns for panel in panels):
            drawn[name] = color
    add_legend(figure, drawn)
    return figure


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
    axes.set_title(panel, parse_math=False)
    axes.set_xlabel(x)
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


def run_colors(count: int) -> list[Any]:
    """A colour for each run, none twice."""
    from matplotlib.colors import hsv_to_rgb

    if count <= 10:
        return [f"C{number}" for number in range(count)]  # matplotlib's own
    return [tuple(hsv_to_rgb((number / count, 1, 0.85 if number % 2 else 0.55))) for number in range(count)]


def html_page(
    runs: dict[str, Run], rows: list[list[str]], x: str, panels: Sequence[str], figure: Any, lang: str
) -> str:
    """The page of the report, with a large curve of the reward where the runs have one, else of the loss."""
    from matplotlib.colors import to_hex

    colors = [to_hex(color) for color in run_colors(len(runs))]
    field = panels[0]
    if "reward" in panels and all("reward" in run.figures for run in runs.values()):
        field = "reward"
    return report.page({run.path: run for run in runs.values()}, rows, colors, field, x, figure, lang)


def main() -> None:
    """Read the runs, print their table, write the files that are asked for."""
    args = parse_args()
    runs = read_runs(args.metrics)
    if report.are_stages(list(runs.values())):  # in their order
        runs = dict(sorted(runs.items(), key=lambda item: report.started(item[1])))
    rows = run_rows(runs)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(rows, width):
        say(line)
    for name, run in runs.items():
        outcome = report.outcome(run.path, run)
        if outcome:
            say(f"{name}: {outcome}")
    if not (args.png or args.html):
        return
    # in Chinese names; in HTML they are there
    warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
    panels = args.panels or PANELS
    figure = draw(runs, args.x or AXES[0], panels)
    if args.png:
        with writing("--png", args.png):
            figure.savefig(args.png, dpi=150)
    if args.html:
        page = html_page(runs, rows, args.x or "tokens", panels, figure, args.lang or "en")
        with writing("--html", args.html):
            Path(args.html).write_bytes(page.encode("utf-8", "backslashreplace"))


@contextmanager
def writing(flag: str, path: str) -> Iterator[None]:
    """Around writing a file: one line if it cannot be written, another one that says where it is."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be written: {error}") from error
    say(f"wrote {path}")


if __name__ == "__main__":
    with one_line_errors():
        main()
