"""The effect of a variant in compute: the share of the first variant's updates after which it has the same
figure."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tools.compare.paired import interval
from trainer.report.metrics import read_metrics

MIN_POINTS = 5  # evaluations of a run; between fewer the curve is not a straight line

Curve = list[tuple[float, float]]  # share of the run's updates, figure


class Effect(NamedTuple):
    """The updates that a variant needs for the same figure, divided by those of the first variant: the
    geometric mean over the pairs, with its interval."""

    ratio: float
    low: float
    high: float


def read_curve(path: Path, metric: str) -> Curve:
    """The curve of a figure in a metrics file, with its value before the first update. It is empty if the
    figure was not measured after that."""
    records = read_metrics(path)
    points = [(0, record[f"initial_{metric}"]) for record in records[:1] if f"initial_{metric}" in record]
    points += [(record["update"], record[metric]) for record in records if metric in record]
    updates = points[-1][0] if points else 0
    return [(update / updates, value) for update, value in points] if updates else []


def share_until(curve: Curve, value: float) -> float | None:
    """The share of the updates after which a figure first was as low as this. Between two evaluations the
    curve is a straight line. None if the first value is as low, or no value is."""
    if curve[0][1] <= value:
        return None
    for (begin, before), (end, after) in pairwise(curve):
        if after <= value:
            return begin + (end - begin) * (before - value) / (before - after)
    return None


def effect(pairs: Sequence[tuple[Curve, Curve]], mode: str, level: float) -> Effect | None:
    """The effect of a variant. pairs: the curves of the first variant and of this one. mode: min or max, what
    is better. level: of the interval.

    The figure is the worse one of a pair at the end: both runs of the pair have reached it. None: a run has
    too few evaluations, or its first value is not worse than this figure.
    """
    logs = []
    for curves in pairs:
        if min(map(len, curves)) < MIN_POINTS:
            return None
        sign = -1.0 if mode == "max" else 1.0
        first, other = ([(share, sign * value) for share, value in curve] for curve in curves)
        worse = max(first[-1][1], other[-1][1])
        share_of_first, share_of_other = share_until(first, worse), share_until(other, worse)
        if not share_of_first or not share_of_other:
            return None
        logs.append(math.log(share_of_other / share_of_first))
    found = interval(logs, 1 - level, p=1.0)
    return Effect(*map(math.exp, (found.mean, found.low, found.high)))
