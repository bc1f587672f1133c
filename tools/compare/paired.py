"""Statistics of paired runs: Student's t without scipy, intervals of several comparisons (Holm), the smallest
difference that so many pairs can show."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

ALPHA = 0.05  # an interval misses the true difference so often


class Difference(NamedTuple):
    """The mean of paired differences with its interval, and the two-sided p value of no difference.

    level: of the interval, 0.95 for a single comparison. is_significant: whether the interval leaves out
    zero, or all differences are the same and not zero."""

    mean: float
    low: float
    high: float
    level: float
    p: float
    is_significant: bool


def t_cdf(t: float, df: int) -> float:
    """Distribution function of Student's t with so many degrees of freedom: the finite sums in the angle
    atan(t / sqrt(df)) of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = df % 2
    term = cosine if is_odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + is_odd, df - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total  # P(-t < T < t), with its sign
    return 0.5 + inside / 2


def t_quantile(share: float, df: int) -> float:
    """The t below which so much of the distribution lies, share >= 0.5, by bisection of `t_cdf`."""
    low, high = 0.0, 1.0
    while t_cdf(high, df) < share:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        if t_cdf(middle, df) < share:
            low = middle
        else:
            high = middle
    return high


def compare_all(differences: Sequence[Sequence[float]]) -> list[Difference]:
    """The result of each of k comparisons with the same first variant. The intervals are widened by Holm's
    rule (Holm 1979): that of the smallest p value has the level 1 - ALPHA / k, the next 1 - ALPHA / (k - 1),
    and so on until the first that shows no difference; the rest keep its level."""
    p_values = [p_value(values) for values in differences]
    results: dict[int, Difference] = {}
    tests = len(differences)
    for i in sorted(range(len(differences)), key=p_values.__getitem__):
        alpha = ALPHA / tests
        results[i] = interval(differences[i], alpha, p_values[i])
        if results[i].is_significant:
            tests = max(1, tests - 1)
    return [results[i] for i in range(len(differences))]


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p value of the mean of at least two differences being zero."""
    error = stdev(differences) / math.sqrt(len(differences))
    if error == 0.0:
        return 1.0 if mean(differences) == 0.0 else 0.0
    return 2 * (1 - t_cdf(abs(mean(differences)) / error, len(differences) - 1))


def interval(differences: Sequence[float], alpha: float, p: float) -> Difference:
    """The t interval of the mean, which misses it in `alpha` of all cases."""
    count, center = len(differences), mean(differences)
    half = t_quantile(1 - alpha / 2, count - 1) * stdev(differences) / math.sqrt(count)
    low, high = center - half, center + half
    return Difference(center, low, high, 1 - alpha, p, not low <= 0.0 <= high)


def smallest_difference(spread: float, pairs: int, comparisons: int = 1) -> float:
    """The true difference that so many pairs find nine times in ten, if single differences spread by `spread`
    (standard deviation), in its unit."""
    df = pairs - 1
    quantiles = t_quantile(1 - ALPHA / comparisons / 2, df) + t_quantile(0.9, df)
    return quantiles * spread / math.sqrt(pairs)
