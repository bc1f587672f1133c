"""The statistics of pairs against tables and a plain count."""

import math
import random
from statistics import mean, stdev

import pytest

from tools.compare.paired import compare_all, interval, p_value, smallest_difference, t_cdf, t_quantile

# of any table of Student's t: share below, degrees of freedom, t
TABLE = [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 3, 3.1824), (0.975, 4, 2.7764), (0.95, 5, 2.0150)]
TABLE += [(0.995, 7, 3.4995), (0.9, 1, 3.0777), (0.975, 10, 2.2281), (0.99, 15, 2.6025), (0.975, 30, 2.0423)]
TABLE += [(0.975, 120, 1.9799), (0.9995, 4, 8.6103)]


@pytest.mark.parametrize("share, df, expected", TABLE)
def test_quantiles_are_those_of_the_table(share, df, expected):
    assert t_quantile(share, df) == pytest.approx(expected, abs=5e-5)
    assert t_cdf(expected, df) == pytest.approx(share, abs=1e-5)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 12])
def test_the_distribution_function_is_the_integral_of_the_density(df):
    """Simpson's rule from 0 to 1.7, and symmetry."""
    scale = math.gamma((df + 1) / 2) / math.sqrt(df * math.pi) / math.gamma(df / 2)
    steps, end = 400, 1.7
    density = [scale * (1 + (end * i / steps) ** 2 / df) ** (-(df + 1) / 2) for i in range(steps + 1)]
    weights = [1, *([4, 2] * (steps // 2))[:-1], 1]
    area = sum(w * d for w, d in zip(weights, density, strict=True)) * end / steps / 3
    assert t_cdf(end, df) == pytest.approx(0.5 + area, abs=1e-9)
    assert t_cdf(-end, df) == pytest.approx(0.5 - area, abs=1e-9)


def test_an_interval_by_hand():
    """Student's sleep data, ten patients: t = 4.0621, p = 0.002833, interval 0.7001 to 2.4599."""
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    result = interval(hours, 0.05, p_value(hours))
    assert result.p == pytest.approx(0.002833, abs=1e-6)
    assert (result.low, result.high) == (pytest.approx(0.7001, abs=1e-4), pytest.approx(2.4599, abs=1e-4))
    assert result.is_significant


def test_holm_stops_at_the_first_that_shows_nothing():
    def values(center: float) -> list[float]:
        return [center - 1, center, center + 1, center - 1, center, center + 1]

    p_values = [p_value(values(center)) for center in (3.0, 1.1, 0.96, 0.0)]
    assert p_values[0] < 0.05 / 4 and 0.05 / 3 < p_values[1] < p_values[2] < 0.05
    results = compare_all([values(center) for center in (0.96, 3.0, 0.0, 1.1)])
    assert [result.is_significant for result in results] == [False, True, False, False]
    levels = [1 - 0.05 / 3, 1 - 0.05 / 4, 1 - 0.05 / 3, 1 - 0.05 / 3]
    assert [result.level for result in results] == pytest.approx(levels)
    for result in results:
        assert result.is_significant == (not result.low <= 0 <= result.high)


def test_a_constant_difference_and_none():
    nothing, constant = compare_all([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
    assert not nothing.is_significant and (nothing.low, nothing.high, nothing.p) == (0, 0, 1)
    assert constant.is_significant and constant.p == 0


def test_intervals_and_the_announced_difference_hold_in_drawn_pairs():
    """Of 2,000 drawn comparisons of five pairs: some 95 % of the intervals hold the truth, and a difference
    as large as announced is found in some 90 %."""
    rng, pairs, spread = random.Random(1), 5, 0.7
    least = smallest_difference(spread, pairs)
    holds = found = 0
    for _ in range(2000):
        noise = [rng.gauss(0, spread) for _ in range(pairs)]
        result = interval(noise, 0.05, 1.0)
        holds += result.low <= 0 <= result.high
        shifted = [value + least for value in noise]
        found += interval(shifted, 0.05, 1.0).low > 0
        assert result.mean == pytest.approx(mean(noise)) and stdev(noise) > 0
    assert 1860 < holds < 1940
    assert 1700 < found < 1900
