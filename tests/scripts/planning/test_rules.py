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


def test_a_vocabulary_is_made_from_little_text_and_is_larger_if_names_are_scattered():
    """docs/dev/LOG.md, "A vocabulary for facts"."""
    for has_spaces, most in ((True, 4096), (False, 1536)):
        assert rules.vocabulary(2e5, 2.5, False, has_spaces) == 512
        assert rules.vocabulary(2e5, 2.5, True, has_spaces) == most
        assert rules.vocabulary(2e6, 2.5, True, has_spaces) is None
        assert rules.vocabulary(2e5, 3.0, True, has_spaces) is None


def test_a_short_sft_has_no_larger_rate_than_a_long_one():
    """docs/dev/LOG.md: the best of 60, 200 and 370 updates is between 3.8e-4 and 7.5e-4."""
    for updates in (60, 200, 370):
        assert rules.sft_learning_rate(128, updates * 2000, 2000) == 6e-4
    assert rules.sft_learning_rate(128, 4e6, 4096) == rules.learning_rate(128, 4e6, 4096) < 6e-4


@given(st.integers(1, 10**7))
def test_a_warmup_is_a_small_part_of_a_run(updates):
    assert 1 <= rules.warmup(updates) <= max(1, min(100, updates / 20))


def test_passes_by_how_much_of_a_text_is_new():
    """PASSES over the new part: a text that is new throughout has PASSES, none has more than MAX_PASSES."""
    found = [rules.most_passes(share, 1e6, False) for share in (0.0, 0.02, 0.5, 0.8, 0.9, 1.0)]
    assert found == [4, 4, 8, 20, 24, 24]


def test_little_text_that_repeats_itself_is_read_until_it_makes_enough_updates():
    """docs/dev/LOG.md: 26,000 tokens with a share of 0.49 want 48 passes or more; new text has PASSES."""
    for is_scattered, passes in ((False, [96, 56, 21, 7]), (True, [96, 96, 41, 7])):
        found = [rules.most_passes(0.49, tokens, is_scattered) for tokens in (500, 26_000, 70_000, 1e6)]
        assert found == passes
    assert rules.most_passes(0.39, 500, False) == 6 and rules.most_passes(0.02, 500, False) == 4
    assert [rules.dropout(passes) for passes in (0.5, 4, 5, 24, 25)] == [0, 0, 0.1, 0.1, 0.2]


@given(st.integers(1, 10**6))
def test_few_conversations_are_held_out_and_repeated_more(conversations):
    share, passes = rules.eval_share(conversations), rules.few_passes(conversations)
    assert 0.02 <= share <= 0.1 and 2 <= passes <= rules.FEW_MAX_PASSES
    assert share >= rules.eval_share(conversations + 1) and passes >= rules.few_passes(conversations + 1)
    if 0.02 < share < 0.1:
        assert abs(share * conversations - 50) <= 0.0005 * conversations


def test_the_rates_of_few_conversations_that_were_measured():
    """docs/dev/LOG.md, "The rate of few conversations": updates of 430 and 1,009 tokens, between the rates that
    were best and the next ones."""
    assert abs(rules.few_learning_rate(128, 430) / 1.8e-4 - 1) < 0.01
    assert 2e-4 < rules.few_learning_rate(128, 1009) < 2.4e-4
    assert rules.few_learning_rate(256, 430) < rules.few_learning_rate(128, 430)
