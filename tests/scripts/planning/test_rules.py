"""Batch, learning rate and warm-up by the size of model and data."""

from hypothesis import given
from hypothesis import strategies as st

from scripts.planning import rules

TOKENS, WIDTHS = st.floats(1e3, 1e12), st.integers(1, 128).map(lambda n: 16 * n)


@given(WIDTHS, TOKENS, TOKENS)
def test_a_wider_model_has_a_smaller_rate_and_a_larger_run_a_larger_batch(width, few, many):
    few, many = sorted((few, many))
    assert rules.update_tokens(few) <= rules.update_tokens(many)
    rate = rules.learning_rate(width, few, 4096)
    assert rules.learning_rate(2 * width, few, 4096) < rate < rules.learning_rate(width, few, 8192)
    assert rules.learning_rate(width, 2 * many, 4096) < rate


def test_the_numbers_that_were_measured():
    """docs/dev/LOG.md: the best rates of a quarter of the shared data; 5.6e-4 for Shakespeare's three passes."""
    assert abs(rules.learning_rate(64, 354_148, 2048) / 1.8e-3 - 1) < 0.2
    assert abs(rules.learning_rate(128, 354_148, 2048) / 1.0e-3 - 1) < 0.2
    assert abs(rules.learning_rate(128, 741 * 2048, 2048) / 5.6e-4 - 1) < 0.02


def test_a_short_sft_has_no_larger_rate_than_a_long_one():
    """docs/dev/LOG.md: the best of 60, 200 and 370 updates is between 3.8e-4 and 7.5e-4."""
    for updates in (60, 200, 370):
        assert rules.sft_learning_rate(128, updates * 2000, 2000) == 6e-4
    assert rules.sft_learning_rate(128, 4e6, 4096) == rules.learning_rate(128, 4e6, 4096) < 6e-4


@given(st.integers(1, 10**7))
def test_a_warmup_is_a_small_part_of_a_run(updates):
    assert 1 <= rules.warmup(updates) <= max(1, min(100, updates / 20))
