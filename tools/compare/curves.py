"""The curves of several variants, each trained with several seeds."""

from pathlib import Path
from statistics import mean
from typing import Any

from scripts.runs.run import read_run


def draw_spread(runs: dict[str, list[Path]], metric: str) -> Any:
    """A matplotlib figure over tokens: the training loss (or reward) as a line, and a held-out metric, if it
    was evaluated, as a dashed line. Each line is a variant's mean over its metrics files; the band is the
    range from the lowest to the highest value."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", figsize=(7.6, 4.3))
    axes = figure.add_subplot()
    axes.set_xlabel("tokens")
    axes.grid(alpha=0.3)
    for number, (name, paths) in enumerate(runs.items()):
        records = [read_run(path).records for path in paths]
        field = "reward" if any("reward" in record for record in records[0]) else "mean_loss"
        for shown, style in ((field, "-"), (metric, "--")):
            points = [[record for record in of_run if shown in record] for of_run in records]
            columns = list(zip(*points, strict=False))  # each has the records of all runs at one point
            x = [mean(record["tokens"] for record in column) for column in columns]
            values = [[record[shown] for record in column] for column in columns]
            marker = "." if len(x) < 3 else None
            means = [mean(column) for column in values]
            label = name if shown == field else f"{name}, {metric}"
            axes.plot(x, means, style, marker=marker, color=f"C{number}", label=label)
            low, high = [min(column) for column in values], [max(column) for column in values]
            axes.fill_between(x, low, high, color=f"C{number}", alpha=0.2)
    for text in axes.legend().get_texts():
        text.set_parse_math(False)  # a flag may contain `$`
    return figure
