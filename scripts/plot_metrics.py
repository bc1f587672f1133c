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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from tqdm.utils import disp_len

from common.errors import UserError, printable, say, warn
from scripts.runs import report
from scripts.runs.figures import PANELS, draw
from scripts.runs.run import AXES, ENDING, RESULTS, Run, differing, read_run, shown
from scripts.text_table import text_table

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
    read or have no records are left out with a warning, and so are damaged lines. Raises UserError if none is
    left.
    """
    runs: list[Run] = []
    problems = []
    for path in find_runs(paths):
        try:
            run = read_run(path)
        except OSError as error:
            problems.append(str(error))
            continue
        if not run.records:
            problems.append(f"{path} holds no log records: none came yet, or it is not a metrics file")
            continue
        runs.append(run)
        if run.damaged:
            warn(f"{path}: damaged lines, left out: {run.damaged}")
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


def run_rows(runs: dict[str, Run]) -> list[list[str]]:
    """The table of runs: a head, and a row for each: what the run came to, and the settings that differ."""
    columns = [["run", *runs]]
    for name in (*RESULTS, *AXES):
        if any(name in run.figures for run in runs.values()):
            columns.append([name, *(shown(run.figures, name) for run in runs.values())])
    for name in differing([run.settings for run in runs.values()]):
        columns.append([name, *(run.settings.get(name, "-") for run in runs.values())])
    return [[" ".join(printable(cell).split()) for cell in row] for row in zip(*columns, strict=True)]


def fitting_blocks(rows: list[list[str]], width: int) -> list[list[list[str]]]:
    """A table for a terminal of so many columns: long cells lose their beginning, and columns that do not fit
    stand in further tables, each with the first column again."""
    rows = [[cell if len(cell) <= LONGEST else f"…{cell[1 - LONGEST :]}" for cell in row] for row in rows]
    first, *columns = zip(*rows, strict=True)
    blocks = [[first]]
    for column in columns:
        used = sum(2 + max(map(disp_len, each)) for each in (*blocks[-1], column))
        if used - 2 > width and len(blocks[-1]) > 1:
            blocks.append([first])
        blocks[-1].append(column)
    return [[list(row) for row in zip(*block, strict=True)] for block in blocks]


def main() -> None:
    """Read the runs, print their table, write the files that are asked for."""
    args = parse_args()
    runs = read_runs(args.metrics)
    if report.are_stages(list(runs.values())):  # in their order
        runs = dict(sorted(runs.items(), key=lambda item: report.started(item[1])))
    rows = run_rows(runs)
    if sys.stdout.isatty():
        blocks = fitting_blocks(rows, shutil.get_terminal_size().columns)
        say("\n\n".join(map(text_table, blocks)))
    else:
        say(text_table(rows))
    for name, run in runs.items():
        compared = [
            f"{what} {came} (planned {planned})" for what, (planned, came) in report.outcomes(run).items()
        ]
        if compared:
            say(f"{name}: {', '.join(compared)}")
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
        field = figure.axes[0].get_title()
        if not args.panels and all("reward" in run.figures for run in runs.values()):
            field = "reward"
        curve = draw(runs, args.x or "tokens", [field])
        page = report.page(list(runs.values()), rows, curve, figure, args.lang or "en")
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
