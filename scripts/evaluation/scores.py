"""Scores of models on the same items: estimates, 95 % confidence intervals, differences, and a table of them.

Every metric is a ratio of two sums over items: an item adds (value, weight). For a share of right answers
these are 0 or 1, and 1; for bits per byte the bits and the bytes of a record.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000
ENOUGH = 30  # items; of fewer the bootstrap's interval is too narrow to call a difference clear
Z = 1.959964  # standard normal quantile of 97.5 %


@dataclass
class Item:
    """What one model got for one item (a question, a record, a prompt).

    Attributes:
        key: names the item; alike for all models.
        scores: name of a metric -> (value, weight).
        group: a part of the items that is reported on its own as well, such as a language.
        answer: what the model said, if anything.
    """

    key: str
    scores: dict[str, tuple[float, float]]
    group: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def ratio(scores: np.ndarray) -> float:
    """Sum of the values over sum of the weights; scores [items, 2]."""
    value, weight = scores.sum(axis=0)
    return float(value / weight)


def estimate(scores: np.ndarray) -> Estimate:
    """The ratio of the sums, of scores [items, 2]: with Wilson's interval for a share, else by the
    bootstrap."""
    if (scores[:, 1] == 1).all() and np.isin(scores[:, 0], (0, 1)).all():
        return wilson(int(scores[:, 0].sum()), len(scores))
    return bootstrap(scores, ratio)


def wilson(right: int, count: int) -> Estimate:
    """A share and Wilson's score interval (Wilson 1927), which holds near 0 and 1 and for few items, too."""
    share = right / count
    center = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * np.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return Estimate(share, max(0.0, float(center - half)), min(1.0, float(center + half)))


def difference(scores: np.ndarray, first: np.ndarray) -> Estimate:
    """How much more a model has than the first one on the same items [items, 2], by the paired bootstrap:
    both are computed on the same resample, so that what makes an item hard for both cancels out."""
    return bootstrap(np.hstack([scores, first]), lambda both: ratio(both[:, :2]) - ratio(both[:, 2:]))


def bootstrap(scores: np.ndarray, value: Callable[[np.ndarray], float]) -> Estimate:
    """A value of items, and its 2.5 % and 97.5 % quantiles over resamples, which are always the same."""
    rng, count = np.random.default_rng(0), len(scores)
    low, high = np.quantile(
        [value(scores[rng.integers(0, count, count)]) for _ in range(RESAMPLES)], [0.025, 0.975]
    )
    return Estimate(value(scores), float(low), float(high))


def summarize(task: str, results: dict[str, list[Item]]) -> list[dict[str, Any]]:
    """One row per metric, and per group of the items if there are several. results: model -> its items."""
    first = next(iter(results.values()))
    groups = sorted({item.group for item in first})
    rows = []
    for group in [None, *groups] if len(groups) > 1 else [None]:
        chosen = {
            name: [item for item in items if group in (None, item.group)] for name, items in results.items()
        }
        for metric in first[0].scores:
            rows.append({"task": task, "metric": metric, "group": group or "all"} | _row(metric, chosen))
    return rows


def _row(metric: str, results: dict[str, list[Item]]) -> dict[str, Any]:
    scores = {name: np.array([item.scores[metric] for item in items]) for name, items in results.items()}
    keys = {name: [item.key for item in items] for name, items in results.items()}
    baseline, *others = results
    alike = [name for name in others if keys[name] == keys[baseline]]
    differences = {name: asdict(difference(scores[name], scores[baseline])) for name in alike}
    models = {name: asdict(estimate(values)) for name, values in scores.items()}
    return {"items": len(keys[baseline]), "models": models, "difference": differences}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text: a column per model with its interval, and one per model after the first with the
    difference."""
    baseline, *others = rows[0]["models"]
    lines = [
        ["task", "metric", "items", baseline, *(text for name in others for text in (name, "difference"))]
    ]
    for row in rows:
        name = row["metric"] if row["group"] == "all" else f"{row['metric']} ({row['group']})"
        cells = [row["task"], name, str(row["items"]), shown(row["models"][baseline])]
        for other in others:
            change = row["difference"].get(other)
            clear = change and row["items"] >= ENOUGH and not change["low"] <= 0 <= change["high"]
            cells += [shown(row["models"][other]), shown(change, "+") + " *" * clear if change else "-"]
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def shown(numbers: dict[str, float], sign: str = "") -> str:
    """A value with its interval, in as many digits as it deserves."""
    digits = 1 if abs(numbers["value"]) >= 10 else 3
    value, low, high = (format(numbers[name], f"{sign}.{digits}f") for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
