"""Estimates, intervals and differences against formulas that are known, and the table."""

import math

import numpy as np
import pytest

from scripts.evaluation.scores import Item, difference, estimate, summarize, table, wilson


@pytest.mark.parametrize(  # by hand from Wilson's formula; the first two are in Newcombe 1998, table I
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)],
)
def test_wilsons_interval(right, count, low, high):
    found = wilson(right, count)
    assert (found.value, found.low, found.high) == pytest.approx((right / count, low, high), abs=1e-4)


def test_a_share_has_wilsons_interval_and_a_mean_the_bootstraps():
    share = np.array([[1.0, 1.0]] * 15 + [[0.0, 1.0]] * 133)
    assert estimate(share) == wilson(15, 148)
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = estimate(np.stack([values, np.ones(400)], axis=1))
    error = 1.96 * values.std() / math.sqrt(400)
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(
        (values.mean() - error, values.mean() + error), abs=0.2 * error
    )


def test_a_ratio_is_of_the_sums():
    assert estimate(np.array([[1.0, 1.0], [1.0, 3.0]])).value == 0.5  # not the mean of 1 and 1/3


def test_a_paired_difference_is_narrower_than_the_intervals_of_both():
    hard = np.random.default_rng(2).normal(0.0, 5.0, 200)  # what both models share
    first, second = (np.stack([hard + shift, np.ones(200)], axis=1) for shift in (0.0, 0.1))
    found = difference(second, first)
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert estimate(first).high - estimate(first).low > 1


def items(right: list[int], key: str = "q") -> list[Item]:
    return [
        Item(f"{key}{i}", {"acc": (float(value), 1.0)}, "zh" if i % 2 else "en")
        for i, value in enumerate(right)
    ]


def test_rows_for_all_items_and_for_each_group():
    rows = summarize("choices", {"a": items([1, 0] * 20), "b": items([1, 1] * 20)})
    assert [(row["group"], row["items"]) for row in rows] == [("all", 40), ("en", 20), ("zh", 20)]
    assert [row["models"]["a"]["value"] for row in rows] == [0.5, 1.0, 0.0]
    assert [row["difference"]["b"]["value"] for row in rows] == [0.5, 0.0, 1.0]
    lines = table(rows).splitlines()
    assert lines[0].split() == ["task", "metric", "items", "a", "b", "difference"]
    few = table(summarize("loss", {"a": items([1, 0] * 10), "b": items([1, 1] * 10)}))
    assert "*" not in few and few.splitlines()[1].endswith("]")  # 20 items are too few for a star
    assert lines[1].endswith("*") and not lines[2].endswith("*") and "acc (zh)" in lines[3]


def test_models_with_other_items_are_not_compared():
    (row,) = summarize("loss", {"a": items([1])[:1], "b": items([1], key="other")[:1]})
    assert row["difference"] == {} and table([row]).splitlines()[1].endswith("-")
