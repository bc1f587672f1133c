"""The statistics of pairs against tables and a plain count."""

import math
import random
from statistics import mean, stdev

import pytest

from tools.compare.paired import (
    compare_all,
    interval,
    p_value,
    power,
    smallest_difference,
    spread_of,
    step_of,
    t_cdf,
    t_quantile,
)

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
    # of the two times 1.3 one is a trifle more: equal ones would count as a figure in steps
    hours = [1.2, 2.4, 1.3, 1.3000001, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
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
    """Equal differences come of a figure in steps: a constant one is shown by seven pairs, and not by six."""
    nothing, constant = compare_all([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]])
    assert not nothing.is_significant and (nothing.low, nothing.high, nothing.p) == (0, 0, 1)
    assert not constant.is_significant and constant.low < 0 < constant.high
    found = [interval([0.5] * pairs, 0.05, 0.0).is_significant for pairs in (6, 7)]
    assert found == [False, True]


def test_steps_are_told_by_equal_differences():
    sixths = [2 / 3 - 1 / 2, 1 / 2 - 1 / 3, 5 / 6 - 1 / 2]  # the first two differ in their last bits
    assert sixths[0] != sixths[1] and step_of(sixths) == pytest.approx(1 / 6)
    assert step_of([0.1, 0.25, 0.31]) == step_of([0.0, 0.0]) == 0.0  # unequal, or nothing differs
    assert step_of([-0.25, -0.25]) == 0.25 and step_of([0.5, 0.75, 0.75, 1.25]) == pytest.approx(0.25)
    assert spread_of([0.5, 0.75, 0.75, 1.25]) == pytest.approx(
        math.hypot(stdev([0.5, 0.75, 0.75, 1.25]), 0.25)
    )


def drawn(*fast: tuple[int, int], pairs: tuple[int, ...], other: tuple[int, ...]) -> list:
    """All pairs of values; those that are not `fast` are drawn with --slow only."""
    cases = [(first, second) for second in other for first in pairs]
    return [pytest.param(*case, marks=[] if case in fast else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("pairs", "questions"), drawn((3, 0), (2, 2), (3, 6), (5, 20), pairs=(2, 3, 5), other=(0, 1, 2, 6, 20))
)
def test_false_alarms_stay_below_five_percent(pairs, questions):
    """Of 2,500 drawn comparisons without a true difference: of a loss, and of the share of right answers to
    so many questions. The bound is 5 % and two standard errors."""
    rng = random.Random(pairs * 100 + questions)

    def figure() -> float:
        if not questions:
            return rng.gauss(3.0, 0.1)
        return sum(rng.random() < 0.6 for _ in range(questions)) / questions

    alarms = 0
    for _ in range(2500):
        (found,) = compare_all([[figure() - figure() for _ in range(pairs)]])
        alarms += found.is_significant
    assert alarms <= 0.05 * 2500 + 2 * math.sqrt(0.05 * 0.95 * 2500)
    if not questions:
        assert alarms > 80  # and the test is not made blind


@pytest.mark.parametrize(
    ("pairs", "comparisons"), drawn((2, 1), (3, 3), (5, 1), pairs=(2, 3, 4, 5, 8), other=(1, 3))
)
def test_the_announced_difference_is_found_nine_times_in_ten(pairs, comparisons):
    """In 2,500 drawn comparisons with a difference as large as announced, to two points. With several
    variants the other ones differ in nothing, so that this one needs the strictest level of Holm's rule."""
    rng, spread = random.Random(pairs), 0.7
    least = smallest_difference(spread, pairs, comparisons)
    limit = t_quantile(1 - 0.05 / comparisons / 2, pairs - 1)
    found = 0
    for _ in range(2500):
        values = [rng.gauss(least, spread) for _ in range(pairs)]
        found += abs(mean(values)) > limit * stdev(values) / math.sqrt(pairs)
    assert found / 2500 == pytest.approx(0.9, abs=0.02)


# of any table of the power of a two-sided t test at 5 %: mean in standard deviations, pairs, power
POWERS = [(0.5, 10, 0.2932), (0.5, 30, 0.7540), (0.8, 15, 0.8213), (1.0, 10, 0.8031), (1.0, 5, 0.4015)]


@pytest.mark.parametrize("shift, pairs, expected", POWERS)
def test_power_is_that_of_the_table(shift, pairs, expected):
    limit = t_quantile(0.975, pairs - 1)
    assert power(shift * math.sqrt(pairs), limit, pairs - 1) == pytest.approx(expected, abs=5e-4)
    assert power(0.0, limit, pairs - 1) == pytest.approx(0.05, abs=1e-6)  # the central distribution


def test_intervals_hold_the_truth_in_drawn_pairs():
    """Of 2,000 drawn comparisons of five pairs: some 95 % of the intervals hold it."""
    rng, pairs, spread = random.Random(1), 5, 0.7
    holds = 0
    for _ in range(2000):
        noise = [rng.gauss(0, spread) for _ in range(pairs)]
        result = interval(noise, 0.05, 1.0)
        holds += result.low <= 0 <= result.high
        assert result.mean == pytest.approx(mean(noise)) and stdev(noise) > 0
    assert 1860 < holds < 1940
