"""The effect of a variant in updates: by hand, and on made-up runs of which one is a known number of updates
ahead."""

import json
import math
import random

import pytest

from tools.compare.effect import effect, read_curve, share_until

FIRST = [(0.0, 6.0), (0.25, 5.0), (0.5, 4.0), (0.75, 3.5), (1.0, 3.0)]
AHEAD = [(0.0, 6.0), (0.25, 4.0), (0.5, 3.2), (0.75, 2.8), (1.0, 2.0)]  # 3.0 at 0.625


def test_between_two_evaluations_the_curve_is_a_straight_line():
    assert share_until(FIRST, 4.5) == 0.375
    assert share_until(FIRST, 3.0) == 1.0
    assert share_until([(0.0, 3.0), (0.5, 1.0), (1.0, 2.0)], 1.5) == 0.375  # the first time
    assert share_until(FIRST, 6.0) is None and share_until(FIRST, 2.9) is None


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_better_and_the_worse_variant_are_each_others_inverse(mode):
    first, ahead = (
        [(share, value if mode == "min" else -value) for share, value in curve] for curve in (FIRST, AHEAD)
    )
    slower = [(min(1.0, 1.1 * share), value) for share, value in ahead]
    better = effect([(first, ahead), (first, slower)], mode, 0.95)
    worse = effect([(ahead, first), (slower, first)], mode, 0.95)
    assert better and worse
    assert better.ratio == pytest.approx(0.625 * 1.1**0.5)
    assert worse == pytest.approx([1 / better.ratio, 1 / better.high, 1 / better.low])


def test_without_enough_evaluations_or_a_common_figure_there_is_none():
    assert effect([(FIRST, AHEAD), (FIRST, AHEAD[1:])], "min", 0.95) is None
    below = [(share, 1.0) for share, _ in FIRST]
    assert effect([(FIRST, below)] * 2, "min", 0.95) is None


def test_a_curve_is_read_by_the_share_of_the_updates(tmp_path):
    records = [{"update": update, "mean_loss": 1.0} for update in range(1, 5)]
    records[0]["initial_eval_loss"], records[1]["eval_loss"], records[3]["eval_loss"] = 4.0, 3.0, 2.0
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    assert read_curve(tmp_path / "m.jsonl", "eval_loss") == [(0.0, 4.0), (0.5, 3.0), (1.0, 2.0)]
    assert read_curve(tmp_path / "m.jsonl", "eval_bpb") == []
    (tmp_path / "m.jsonl").write_text('{"update": 1, "initial_eval_loss": 4.0}\n')
    assert read_curve(tmp_path / "m.jsonl", "eval_loss") == []


@pytest.mark.parametrize("ahead", [0, 50, 150])
def test_the_interval_holds_the_truth_in_nineteen_of_twenty(ahead):
    """Of 1,000 updates the variant is some ahead: a falling curve with the noise of a seed, which a pair
    shares, and that of each evaluation."""
    rng = random.Random(ahead)
    updates = range(50, 1001, 50)

    def curve(head_start: int, seed: float) -> list[tuple[float, float]]:
        return [
            (update / 1000, 2 + 8 * (update + head_start + 20) ** -0.35 + seed + rng.gauss(0, 0.003))
            for update in updates
        ]

    held, ratios = 0, []
    for _ in range(400):
        seeds = [rng.gauss(0, 0.02) for _ in range(4)]
        found = effect([(curve(0, seed), curve(ahead, seed)) for seed in seeds], "min", 0.95)
        assert found
        held += found.low <= 1 - ahead / 1000 <= found.high
        ratios.append(math.log(found.ratio))
    assert 368 <= held <= 392  # 380 within 2.8 standard errors
    assert math.exp(sum(ratios) / 400) == pytest.approx(1 - ahead / 1000, abs=0.003)
