"""Print a table of runs, draw their curves, and write a report page to send to somebody.

    python scripts/plot_metrics.py out
    python scripts/plot_metrics.py out/a_512_metrics.jsonl out/b_512_metrics.jsonl --x tokens --png curves.png
    python scripts/plot_metrics.py out --panels loss learning_rate --png out/curves.png --html out/runs.html

It reads the metrics files that training writes, even while a run is in progress, and the settings files
beside them.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from common.errors import UserError, printable, say, warn
from scripts.runs import report
from scripts.runs.figures import PANELS, draw
from scripts.runs.run import AXES, RESULTS, Run, differing_settings, format_figure, read_run
from scripts.runs.words import LANGUAGES, user_language
from scripts.text_table import text_table
from trainer.weights.paths import METRICS_SUFFIX

MAX_RUN_COLUMNS = 3  # of more each is a row of the table, not a column


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag("metrics", nargs="+", help="metrics files, out/<run>_metrics.jsonl, or folders of them")
    flag("--png", help="picture of the curves to write")
    flag("--html", help="report page to write: one file to send, which needs no network")
    text = "language of the page (default: that of the system)"
    flag("--lang", choices=LANGUAGES, default=user_language(), help=text)
    flag("--panels", nargs="+", help=f"fields of the records to draw (default: {' '.join(PANELS)})")
    flag("--x", choices=AXES, help="field on the x axis of the curves (default: update)")
    args = parser.parse_args()
    if (args.panels or args.x) and not (args.png or args.html):
        raise UserError("--panels and --x choose how curves are drawn; add where: --png FILE or --html FILE")
    return args


def find_runs(paths: list[str]) -> list[Path]:
    """The metrics files among these files and folders. Raises UserError if a folder contains none."""
    runs = []
    for path in map(Path, paths):
        files = sorted(path.glob(f"*{METRICS_SUFFIX}")) if path.is_dir() else [path]
        if not files:
            raise UserError(
                f"{path} holds no metrics of a run (...{METRICS_SUFFIX}); give the --save_dir of a run"
            )
        runs += files
    return list(dict.fromkeys(runs))


def read_runs(paths: list[str]) -> dict[str, Run]:
    """Name -> run. Stages of one model are in their order; other runs are sorted by their held-out loss, the
    lowest first. If there are several, those that cannot be read or have no records are left out with a
    warning. Raises UserError if none is left."""
    runs: list[Run] = []
    problems = []
    for path in find_runs(paths):
        try:
            run = read_run(path)
        except OSError as error:
            problems.append(str(error))
            continue
        if run.count:
            runs.append(run)
        else:
            problems.append(f"{path} holds no log records: none came yet, or it is not a metrics file")
    if not runs:
        raise UserError("; ".join(problems))
    for problem in problems:
        warn(problem)
    if report.are_stages(runs):
        runs.sort(key=lambda run: run.about["starts"][0]["time"])  # when it was first started
    else:
        runs.sort(key=lambda run: run.figures.get("best_eval_loss", math.inf))
    names = [str(run.path).removesuffix(METRICS_SUFFIX) for run in runs]
    short = [Path(name).name for name in names]
    if len(set(short)) == len(short):
        names = short
    return {printable(name): run for name, run in zip(names, runs, strict=True)}


def run_table(runs: dict[str, Run]) -> list[list[str]]:
    """The table of runs: their results, and the settings that differ. Few runs are columns, many runs are
    rows."""
    columns = [["run", *runs]]
    for name in (*RESULTS, *AXES):
        if any(name in run.figures for run in runs.values()):
            columns.append([name, *(format_figure(run.figures, name) for run in runs.values())])
    for name in differing_settings([run.settings for run in runs.values()]):
        columns.append([name, *(printable(run.settings.get(name, "-")) for run in runs.values())])
    if len(runs) <= MAX_RUN_COLUMNS:
        return columns
    return [list(row) for row in zip(*columns, strict=True)]


def main() -> None:
    """Read the runs, print their table, write the files that are asked for."""
    args = parse_args()
    runs = read_runs(args.metrics)
    table = run_table(runs)
    say(text_table(table))
    for name, run in runs.items():
        if compared := report.compare_with_plan(run, args.lang):
            say(f"{name}: {compared}")
    # in Chinese names; in HTML they are there
    warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
    panels = args.panels or PANELS
    if args.png:
        figure = draw(runs, args.x or AXES[0], panels)
        with writing("--png", args.png):
            figure.savefig(args.png, dpi=150)
    if args.html:
        field = "loss"
        if all("reward" in run.figures for run in runs.values()):
            field = "reward"
        first = [args.panels[0]] if args.panels else [field]
        curve, others = draw(runs, args.x or "tokens", first), draw(runs, args.x or AXES[0], panels)
        page = report.page(runs, table, curve, others, args.lang)
        with writing("--html", args.html):
            Path(args.html).write_bytes(page.encode("utf-8", "backslashreplace"))


@contextmanager
def writing(flag: str, path: str) -> Iterator[None]:
    """Wrap the writing of a file: raises UserError if it cannot be written, otherwise prints where it is."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be written: {error}") from error
    say(f"wrote {path}")


if __name__ == "__main__":
    with one_line_errors():
        main()
