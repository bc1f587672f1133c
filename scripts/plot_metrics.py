"""Plot one or several runs to a PNG: loss, held-out loss, learning rate, gradient norm, speed, rewards.

    python scripts/plot_metrics.py out/full_sft_512_metrics.jsonl
    python scripts/plot_metrics.py out/a_512_metrics.jsonl out/b_512_metrics.jsonl --x tokens --png out/curves.png
    python scripts/plot_metrics.py out/demo --panels loss eval_loss

It reads the metrics files that training writes, also while a run is in progress.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from trainer.components.metrics import read_metrics

PANELS = ("loss", "eval_loss", "reward", "eval_reward", "kl", "entropy", "completion_length", "learning_rate")
PANELS += ("grad_norm", "tokens_per_second", "expert_max_min")
AXES = ("update", "tokens", "seconds")
Records = list[dict[str, Any]]


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag("metrics", nargs="+", help="metrics files, out/<run>_metrics.jsonl, or folders of them; one curve each")
    flag("--panels", nargs="+", default=list(PANELS), help="fields of the records to draw, as far as they are there")
    flag("--x", choices=AXES, default="update", help="field on the x axis")
    flag("--png", default="curves.png", help="file to write")
    return parser.parse_args()


def find_runs(paths: list[str]) -> list[Path]:
    """The metrics files among files and folders. Raises UserError if a folder holds none."""
    runs = []
    for path in map(Path, paths):
        files = sorted(path.glob("*_metrics.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} holds no metrics of a run (..._metrics.jsonl); give the --save_dir of a run")
        runs += files
    return list(dict.fromkeys(runs))


def read_run(path: Path) -> Records:
    """The records of a metrics file, their numbers only. Raises UserError if it is missing, empty or something else."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give metrics files, such as out/full_sft_512_metrics.jsonl")
    records = read_metrics(path)
    if not all(record.keys() >= {*AXES} for record in records):
        raise UserError(f"{path} is not a metrics file; its lines must be JSON objects with {', '.join(AXES)}")
    if not records:
        raise UserError(f"{path} holds no records yet; the first comes after --log_interval micro-batches")
    drawable = (int, float, type(None))  # `null` stands for a number that is not finite
    return [{name: value for name, value in record.items() if type(value) in drawable} for record in records]


def points(records: Records, name: str, x: str) -> tuple[list[float], list[float]]:
    """x and y values of the records that have a field; `null` (not finite) leaves a gap in the curve.

    The loss is the mean since the record before, where there is one."""
    names = ("mean_loss", "loss") if name == "loss" else (name,)
    pairs = [(record[x], next(record[n] for n in names if n in record)) for record in records if {*names} & {*record}]
    return [at for at, _ in pairs], [math.nan if value is None else value for _, value in pairs]


def draw(runs: dict[str, Records], x: str, panels: Sequence[str] = PANELS) -> Any:
    """A matplotlib figure: one panel for each field that a run has, one color for each run.

    Raises:
        UserError: no run has any of the fields, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plotting needs matplotlib: pip install -r requirements.txt") from error
    panels = [name for name in panels if any(name in record for run in runs.values() for record in run)]
    if not panels:
        raise UserError("--panels: no run has any of these fields; leave the flag out to see what there is")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(layout="constrained", figsize=(4 * columns, 0.4 + 2.8 * rows))
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for number, (name, run) in enumerate(runs.items()):
            at, values = points(run, panel, x)
            style: dict[str, Any] = {"color": f"C{number % 10}", "marker": "." if len(values) < 40 else None}
            style["linestyle"] = ("-", "--", ":")[number % 3]  # a run over another one hides it only in part
            axes.plot(at, values, label=name, **style)
        axes.set(title=panel, xlabel=x)
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    """Read the runs, plot them, write the file."""
    args = parse_args()
    files = find_runs(args.metrics)
    runs = {str(path).removesuffix(".jsonl").removesuffix("_metrics"): read_run(path) for path in files}
    names = {name: Path(name).name for name in runs}  # full paths only if the file names are ambiguous
    if len(set(names.values())) == len(names):
        runs = {names[name]: run for name, run in runs.items()}
    figure = draw(runs, args.x, args.panels)
    try:
        figure.savefig(args.png, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--png {args.png} cannot be written: {error}") from error
    print(f"wrote {args.png}")


if __name__ == "__main__":
    with one_line_errors():
        main()
