"""Plot one or several runs to a PNG: loss, held-out loss, learning rate, gradient norm, speed, experts' load, rewards.

    python scripts/plot_metrics.py out/full_sft_512_metrics.jsonl
    python scripts/plot_metrics.py out/a_512_metrics.jsonl out/b_512_metrics.jsonl --x tokens --png out/curves.png
    python scripts/plot_metrics.py out/demo --smoothing 0.9 --log_scale

It reads the metrics files that training writes, also while a run is in progress.
"""

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from trainer.components.metrics import read_metrics

PANELS = {  # name: title, fields; the first one that a record has is plotted
    "loss": ("loss", ("mean_loss", "loss")),
    "eval_loss": ("held-out loss", ("eval_loss",)),
    "reward": ("reward", ("reward",)),
    "eval_reward": ("held-out reward", ("eval_reward",)),
    "kl": ("KL divergence from the reference", ("kl",)),
    "entropy": ("entropy per token", ("entropy",)),
    "completion_length": ("tokens of a completion", ("completion_length",)),
    "learning_rate": ("learning rate", ("learning_rate",)),
    "grad_norm": ("gradient norm", ("grad_norm",)),
    "tokens_per_second": ("tokens per second", ("tokens_per_second",)),
    "expert_load": ("share of each expert", ("expert_load",)),
}
NOISY = (
    "loss",
    "reward",
    "kl",
    "entropy",
    "completion_length",
    "grad_norm",
    "tokens_per_second",
)  # what --smoothing smooths
AXES = {"update": "update", "tokens": "tokens trained", "seconds": "seconds"}
Curve = tuple[list[float], list[Any]]  # x and y; a y of the experts' panel is a list, one share per expert


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag("metrics", nargs="+", help="metrics files, out/<run>_metrics.jsonl, or folders of them; one curve each")
    flag("--panels", nargs="+", choices=list(PANELS), default=list(PANELS), help="what to draw, as far as it is there")
    flag("--x", choices=list(AXES), default="update", help="quantity on the x axis")
    flag("--smoothing", type=float, default=0.0, help="0 to below 1: weight of the past in a moving average")
    flag("--log_scale", action="store_true", help="logarithmic y axes")
    flag("--png", default="curves.png", help="file to write")
    args = parser.parse_args()
    if not 0 <= args.smoothing < 1:
        raise UserError("--smoothing must be 0 or more and below 1; 0.9 is a usual value")
    return args


def find_runs(paths: list[str]) -> list[Path]:
    """The metrics files among files and folders. Raises UserError if a folder holds none."""
    found = []
    for path in map(Path, paths):
        files = sorted(path.glob("*_metrics.jsonl")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} holds no metrics of a run (..._metrics.jsonl); give the --save_dir of a run")
        found += files
    return list(dict.fromkeys(found))


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


def points(records: list[dict[str, Any]], fields: tuple[str, ...], x: str) -> Curve:
    """x and y values of the records that have one of the fields. `null` (not finite) leaves a gap in the curve."""
    found = [(record[x], next(record[f] for f in fields if f in record)) for record in records if {*fields} & {*record}]
    return [at for at, _ in found], [math.nan if value is None else value for _, value in found]


def smooth(values: list[float], weight: float) -> list[float]:
    """Exponential moving average, divided by the sum of its weights so that it begins at the first value; a gap stays
    one."""
    total = norm = 0.0
    found = []
    for value in values:
        if not math.isnan(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        found.append(math.nan if math.isnan(value) else total / norm)
    return found


def new_figure(**options: Any) -> Any:
    """An empty matplotlib figure. Raises UserError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plotting needs matplotlib: pip install -r requirements.txt") from error
    return Figure(layout="constrained", **options)


def draw(
    runs: dict[str, list[dict[str, Any]]],
    x: str,
    smoothing: float = 0.0,
    log_scale: bool = False,
    panels: Iterable[str] = PANELS,
) -> Any:
    """One panel for each quantity that a run has, one color for each run.

    Raises:
        UserError: no run has any of them.
    """
    curves = {panel: {name: points(run, PANELS[panel][1], x) for name, run in runs.items()} for panel in panels}
    curves = {panel: lines for panel, lines in curves.items() if any(values for _, values in lines.values())}
    if not curves:
        raise UserError(f"--panels {' '.join(panels)}: no run has any of them; leave the flag out to see what there is")
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = new_figure(figsize=(4 * columns, 0.4 + 2.8 * rows))
    for place, (panel, lines) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        for number, (name, curve) in enumerate(lines.items()):
            plot(axes, name, f"C{number % 10}", curve, smoothing if panel in NOISY else 0.0)
        scale = "log" if log_scale and panel != "expert_load" else "linear"
        axes.set(title=PANELS[panel][0], xlabel=AXES[x], yscale=scale)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def plot(axes: Any, name: str, color: str, curve: Curve, smoothing: float) -> None:
    """The curve of a run: smoothed over its faint raw one, or a thin line for each expert."""
    at, values = curve
    if values and isinstance(values[0], list):
        experts = max(map(len, values))
        shares = [[share[i] if i < len(share) else math.nan for share in values] for i in range(experts)]
        for place, share in enumerate(shares):
            axes.plot(at, share, label=name if not place else None, color=color, linewidth=0.8)
        return
    if smoothing:
        axes.plot(at, values, color=color, linewidth=1, alpha=0.25)
        values = smooth(values, smoothing)
    axes.plot(at, values, label=name, color=color, linewidth=1.5, marker="." if len(values) < 40 else None)


def main() -> None:
    """Read the runs, plot them, write the file."""
    args = parse_args()
    files = find_runs(args.metrics)
    runs = {str(path).removesuffix(".jsonl").removesuffix("_metrics"): read_run(path) for path in files}
    names = {name: Path(name).name for name in runs}  # full paths only if the file names are ambiguous
    if len(set(names.values())) == len(names):
        runs = {names[name]: run for name, run in runs.items()}
    figure = draw(runs, args.x, args.smoothing, args.log_scale, args.panels)
    try:
        figure.savefig(args.png, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--png {args.png} cannot be written: {error}") from error
    print(f"wrote {args.png}")


if __name__ == "__main__":
    with one_line_errors():
        main()
