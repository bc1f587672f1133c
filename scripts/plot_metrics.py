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
from collections.abc import Sequence
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

PANELS = (
    "loss",
    "reward",
    "kl",
    "entropy",
    "completion_length",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
)
PANELS += ("expert_max_min",)
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
    runs, problems = {}, []
    for path in find_runs(paths):
        try:
            run = read_run(path)
        except OSError as error:
            problems.append(str(error))
            continue
        if run.records:
            runs[str(path).removesuffix(".jsonl").removesuffix("_metrics")] = run
        else:
            what = f"is not a metrics file; its lines must be JSON objects with {', '.join(AXES)}"
            problems.append(
                f"{path} {what if run.damaged else 'holds no records yet; they come every --log_interval'}"
            )
        if run.records and run.damaged:
            warn(f"{path}: damaged lines, left out: {run.damaged}")
        if run.about is None:
            warn(f"{settings_path(path)} is damaged: the settings of this run are not shown")
    if not runs:
        raise UserError("; ".join(problems))
    for problem in problems:
        warn(problem)
    is_clear = len({Path(name).name for name in runs}) == len(runs)  # else full paths
    losses = ("best_eval_loss", "loss")
    order = sorted(runs, key=lambda name: [runs[name].figures.get(loss, math.inf) for loss in losses])
    return {printable(Path(name).name if is_clear else name): runs[name] for name in order}


# --- the table
# -------------------------------------------------------------------------------------------------------


def run_rows(runs: dict[str, Run]) -> list[list[str]]:
    """The table of runs: a head, and a row for each. Behind the name stands what the run came to, then the
    settings that differ. Figures that are the same for all, and paths, which are long, are the last
    columns."""

    def figure_columns(names: Sequence[str]) -> list[list[str]]:
        there = [name for name in names if any(name in run.figures for run in runs.values())]
        return [[name, *(shown(run.figures, name) for run in runs.values())] for name in there]

    others = figure_columns(AXES)
    for name in differing([run.settings for run in runs.values()]):
        others.append([name, *(run.settings.get(name, "-") for run in runs.values())])

    def comes_last(column: list[str]) -> bool:
        cells = column[1:]
        return len(set(cells)) == 1 or any("/" in cell or "\\" in cell for cell in cells)

    others.sort(key=comes_last)  # stable
    rows = zip(["run", *runs], *figure_columns(RESULTS), *others, strict=True)
    return [[" ".join(printable(cell).split()) for cell in row] for row in rows]


def table_lines(rows: list[list[str]], width: int | None) -> list[str]:
    """A table as text. With the width of a terminal, long cells lose their beginning, and columns that do not
    fit stand in further blocks below, each with the first column again."""
    if width:
        rows = [[cell if len(cell) <= LONGEST else f"…{cell[1 - LONGEST :]}" for cell in row] for row in rows]
    sizes = [max(map(disp_len, column)) for column in zip(*rows, strict=True)]
    blocks: list[list[int]] = [[0]]
    for column in range(1, len(sizes)):
        if width and len(blocks[-1]) > 1 and sum(sizes[i] + 2 for i in [*blocks[-1], column]) - 2 > width:
            blocks.append([0])
        blocks[-1].append(column)
    lines: list[str] = []
    for block in blocks:
        lines += [""] if lines else []
        for row in rows:
            pads = [" " * (sizes[i] - disp_len(row[i])) for i in block]
            lines.append(
                "  ".join([row[0] + pads[0], *(pads[n] + row[i] for n, i in enumerate(block) if n)]).rstrip()
            )
    return lines


# --- the curves
# ------------------------------------------------------------------------------------------------------


def draw(
    runs: dict[str, Run], x: str, panels: Sequence[str] = PANELS, size: tuple[float, float] = (4, 2.8)
) -> Any:
    """A matplotlib figure with panels of this size in inches, one for each field that a run has, a color for
    each run; what was measured on held-out data (`eval_<field>`) is dashed, in the panel of its field. The
    loss is the mean since the record before, where there is one; `null` (not finite) leaves a gap in the
    curve. Raises UserError if no run has any of the fields, or matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise UserError("plotting needs matplotlib: pip install -r requirements.txt") from error
    curves = {name: run.columns(max(40, POINTS // len(runs))) for name, run in runs.items()}
    for columns in curves.values():
        if means := columns.get("mean_loss"):
            columns["loss"] = [
                a if b is None else b for a, b in zip(columns.get("loss", means), means, strict=True)
            ]
        if "eval_reward" in columns:
            columns.pop("eval_loss", None)  # minus the reward, which is no loss to draw
    there = {field for columns in curves.values() for field in columns}
    panels = [
        name for name in panels if name in there and name.removeprefix("eval_") not in {*panels} - {name}
    ]
    if not panels:
        raise UserError("--panels: no run has any of these fields; leave the flag out to see what there is")
    across = min(3, len(panels))
    rows = math.ceil(len(panels) / across)
    width, height = size[0] * across, size[1] * rows
    legend_height = 0.4 + 0.2 * math.ceil(len(runs) / 4)
    figure = Figure(layout="constrained", figsize=(width, height + legend_height))
    handles: dict[str, Any] = {}
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, across, place)
        for name, line in draw_panel(axes, panel, x, curves).items():
            handles.setdefault(name, line)
    if any(line.get_linestyle() == "--" for axes in figure.axes for line in axes.lines):
        handles["held-out"] = Line2D([], [], color="gray", linestyle="--", marker=".")
    names = [f" {name}" if name.startswith("_") else name for name in handles]  # those with a `_` are hidden
    legend = figure.legend(handles.values(), names, loc="outside lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a `$` in a name
    return figure


def draw_panel(axes: Any, panel: str, x: str, curves: dict[str, dict[str, list]]) -> dict[str, Any]:
    """Draw the curves of a field, and of what was measured of it on held-out data. Returns a line of each
    run that has one."""
    lines = {}
    colors = run_colors(len(curves))
    for number, (name, columns) in enumerate(curves.items()):
        for field in (panel, f"eval_{panel}"):
            if field not in columns:
                continue
            held_out = field.startswith("eval_")
            xs, ys = [], []
            for at, y in zip(columns[x], columns[field], strict=True):
                if y is None and held_out:
                    continue
                xs.append(at)
                ys.append(math.nan if y is None else y)
            count = sum(not math.isnan(y) for y in ys)
            few = count < max(40, len(ys) / 2)
            (line,) = axes.plot(
                xs,
                ys,
                label=f"{name}, held-out" if held_out else name,
                color=colors[number],
                linestyle="--" if held_out else "-",
                marker="." if held_out or few else None,
                # a run over another one hides it only in part
                linewidth=max(0.8, 2.4 - 0.4 * number),
            )
            lines.setdefault(name, line)
    axes.set_title(panel, parse_math=False)
    axes.set_xlabel(x)
    axes.grid(alpha=0.3)
    return lines


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
    for line in table_lines(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
        say(line)
    for name, run in runs.items():
        if came := report.outcome(run.path, run):
            say(f"{name}: {came}")
    if not (args.png or args.html):
        return
    # in Chinese names; in HTML they are there
    warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
    panels = args.panels or PANELS
    figure = draw(runs, args.x or AXES[0], panels)
    page = ""
    if args.html:
        page = html_page(runs, rows, args.x or "tokens", panels, figure, args.lang or "en")
    for flag, path in (("--png", args.png), ("--html", args.html)):
        try:
            if path and flag == "--png":
                figure.savefig(path, dpi=150)
            elif path:
                Path(path).write_bytes(page.encode("utf-8", "backslashreplace"))
        except (OSError, ValueError) as error:
            raise UserError(f"{flag} {path} cannot be written: {error}") from error
        if path:
            say(f"wrote {path}")


if __name__ == "__main__":
    with one_line_errors():
        main()
