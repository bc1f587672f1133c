"""Plot one or several runs to a PNG: loss, held-out loss, learning rate, gradient norm, speed.

    python scripts/plot_metrics.py out/full_sft_512_metrics.jsonl
    python scripts/plot_metrics.py out/a_512_metrics.jsonl out/b_512_metrics.jsonl --x tokens --png out/curves.png

It reads the metrics files that training writes, also while a run is in progress. It needs matplotlib
(pip install matplotlib).
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from trainer.components.metrics import read_metrics

PANELS = {  # title: fields; the first one that a record has is plotted
    "loss": ("mean_loss", "loss"),
    "held-out loss": ("eval_loss",),
    "learning rate": ("learning_rate",),
    "gradient norm": ("grad_norm",),
    "tokens per second": ("tokens_per_second",),
}
AXES = {"update": "update", "tokens": "tokens trained", "seconds": "seconds"}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag("metrics", nargs="+", help="metrics files, out/<run>_metrics.jsonl; one curve each")
    flag("--x", choices=list(AXES), default="update", help="quantity on the x axis")
    flag("--png", default="curves.png", help="file to write")
    return parser.parse_args()


def read_run(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file. Raises UserError if it is missing, empty or not a metrics file."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give metrics files, such as out/full_sft_512_metrics.jsonl")
    records = read_metrics(path)
    if not all(record.keys() >= AXES.keys() for record in records):
        raise UserError(f"{path} is not a metrics file; its lines must be JSON objects with {', '.join(AXES)}")
    if not records:
        raise UserError(f"{path} holds no records yet; the first comes after --log_interval micro-batches")
    return records


def points(records: list[dict[str, Any]], fields: tuple[str, ...], x: str) -> tuple[list[float], list[float]]:
    """x and y values of the records that have one of the fields. `null` (not finite) leaves a gap in the curve."""
    found = [(record[x], next(record[f] for f in fields if f in record)) for record in records if {*fields} & {*record}]
    return [at for at, _ in found], [math.nan if value is None else value for _, value in found]


def new_figure(**options: Any) -> Any:
    """An empty matplotlib figure. Raises UserError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plotting needs matplotlib: pip install matplotlib") from error
    return Figure(layout="constrained", **options)


def draw(runs: dict[str, list[dict[str, Any]]], x: str) -> Any:
    """One panel for each quantity that a run has, one curve for each run."""
    curves = {title: {name: points(run, fields, x) for name, run in runs.items()} for title, fields in PANELS.items()}
    curves = {title: lines for title, lines in curves.items() if any(values for _, values in lines.values())}
    columns = min(3, len(curves))
    figure = new_figure(figsize=(4 * columns, 0.4 + 2.8 * math.ceil(len(curves) / columns)))
    for place, (title, lines) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(math.ceil(len(curves) / columns), columns, place)
        for name, (at, values) in lines.items():
            axes.plot(at, values, label=name, linewidth=1.5, marker="." if len(values) < 40 else None)
        axes.set(title=title, xlabel=AXES[x])
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    """Read the runs, plot them, write the file."""
    args = parse_args()
    runs = {path.removesuffix(".jsonl").removesuffix("_metrics"): read_run(Path(path)) for path in args.metrics}
    names = {name: Path(name).name for name in runs}  # full paths only if the file names are ambiguous
    if len(set(names.values())) == len(names):
        runs = {names[name]: run for name, run in runs.items()}
    figure = draw(runs, args.x)
    try:
        figure.savefig(args.png, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--png {args.png} cannot be written: {error}") from error
    print(f"wrote {args.png}")


if __name__ == "__main__":
    with one_line_errors():
        main()
