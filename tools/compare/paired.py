"""Statistics of paired runs without scipy: Student's t, central and noncentral; intervals of several
comparisons (Holm); the smallest difference that a number of pairs can show."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, stdev
from typing import NamedTuple

ALPHA = 0.05  # probability that an interval misses the true difference
POWER = 0.9  # probability that the announced difference is found
EQUAL = 9  # differences are equal if they agree to so many decimals, as shares of the largest one


class Difference(NamedTuple):
    """The mean of paired differences with its interval, and the two-sided p value of no difference.

    level: confidence level of the interval, 0.95 for a single comparison. is_significant: whether the
    interval excludes zero. step: step size of a discrete figure (see `step_of`), 0 for others.
    """

    mean: float
    low: float
    high: float
    level: float
    p: float
    is_significant: bool
    step: float


def step_of(differences: Sequence[float]) -> float:
    """The step size of a discrete figure, such as the share of right answers to a few questions. It is the
    smallest distance between two differences, or between a difference and zero. A figure counts as discrete
    if some differences are equal. It is 0 if none are equal, and also if all are zero."""
    scale = max(map(abs, differences))
    values = [round(value / scale, EQUAL) if scale else 0.0 for value in differences]
    distinct = sorted({0.0, *values})
    if len(set(values)) == len(values) or len(distinct) == 1:
        return 0.0
    return scale * min(high - low for low, high in pairwise(distinct))


def spread_of(differences: Sequence[float]) -> float:
    """The standard deviation of differences. For a discrete figure, its step is added as an independent
    error. Otherwise a few differences that are equal by chance would make any result significant."""
    return math.hypot(stdev(differences), step_of(differences))


def t_cdf(t: float, df: int) -> float:
    """Distribution function of Student's t with df degrees of freedom, by the finite sums in the angle atan(t
    / sqrt(df)) of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
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
    """The t below which this share (>= 0.5) of the distribution lies, by bisection of `t_cdf`."""
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
    rule (Holm 1979). The comparison with the smallest p value has the level 1 - ALPHA / k, the next one 1 -
    ALPHA / (k - 1), and so on until the first one that shows no difference. The remaining ones keep its
    level."""
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
    """Two-sided p value for a mean of zero, of at least two differences."""
    error = spread_of(differences) / math.sqrt(len(differences))
    if error == 0.0:  # all differences are zero
        return 1.0
    return 2 * (1 - t_cdf(abs(mean(differences)) / error, len(differences) - 1))


def interval(differences: Sequence[float], alpha: float, p: float) -> Difference:
    """The t interval of the mean. It misses the true mean with probability `alpha`."""
    count, center = len(differences), mean(differences)
    half = t_quantile(1 - alpha / 2, count - 1) * spread_of(differences) / math.sqrt(count)
    low, high = center - half, center + half
    return Difference(center, low, high, 1 - alpha, p, not low <= 0.0 <= high, step_of(differences))


# --- power


def smallest_difference(spread: float, pairs: int, comparisons: int = 1) -> float:
    """The true difference that so many pairs find nine times in ten, found by bisection of `power`. spread:
    standard deviation of single differences. The result has the same unit."""
    limit = t_quantile(1 - ALPHA / comparisons / 2, pairs - 1)
    low, high = 0.0, 1.0
    while power(high, limit, pairs - 1) < POWER:
        high *= 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, limit, pairs - 1) < POWER else (low, middle)
    return high * spread / math.sqrt(pairs)


def power(shift: float, limit: float, df: int) -> float:
    """The probability that (Z + shift) / S lies outside -limit to limit. Z is standard normal, and S is the
    root of a chi-square divided by its df degrees of freedom. These are the tails of the noncentral t
    distribution. They are computed as the integral of the normal tails over the density of S, by the midpoint
    rule."""
    half_width, steps = 10 / math.sqrt(2 * df), 2000  # 10 standard deviations of S
    begin = max(0.0, 1 - half_width)
    width = (1 + half_width - begin) / steps
    log_scale = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    total = 0.0
    for i in range(steps):
        s = begin + (i + 0.5) * width
        density = math.exp(log_scale + (df - 1) * math.log(s) - df * s**2 / 2)
        beyond = (math.erfc((limit * s + sign * shift) / math.sqrt(2)) / 2 for sign in (-1, 1))
        total += density * sum(beyond)
    return total * width
