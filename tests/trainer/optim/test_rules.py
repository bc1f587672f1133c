"""`auto` for the batch and the learning rate: the rules, who takes them, and what a resumed run does."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import UserError
from dataset.lm_dataset import StageDataset
from trainer import train_dpo, train_full_sft, train_pretrain
from trainer.optim import rules
from trainer.run import resume

TOKENS, WIDTHS = st.floats(1e3, 1e12), st.integers(1, 128).map(lambda n: 16 * n)


class Data(StageDataset):
    """Data of so many items and tokens."""

    num_tokens = 0

    def __init__(self, num_tokens: int, items: int):
        self.num_tokens, self.items = num_tokens, items

    def __len__(self) -> int:
        return self.items


@given(WIDTHS, TOKENS, TOKENS)
def test_a_wider_model_has_a_smaller_rate_and_a_larger_run_a_larger_batch(width, few, many):
    few, many = sorted((few, many))
    assert rules.update_tokens(few) <= rules.update_tokens(many)
    rate = rules.learning_rate(width, few, 4096, "muon")
    assert (
        rules.learning_rate(2 * width, few, 4096, "muon")
        < rate
        < rules.learning_rate(width, few, 8192, "muon")
    )
    assert rules.learning_rate(width, 2 * many, 4096, "muon") < rate


@given(st.integers(1, 10**6), st.integers(1, 2000), st.integers(1, 5), st.integers(1, 64), st.integers(1, 8))
def test_an_update_is_near_the_rule_and_never_empty(items, length, epochs, ranks, accumulation):
    data = Data(num_tokens=items * length, items=items)
    args = train_pretrain.Args(
        batch_size=None, learning_rate=None, epochs=epochs, accumulation_steps=accumulation
    )
    chosen = rules.chosen(args, data, ranks)
    assert 1 <= chosen.batch_size <= items and 0 < chosen.learning_rate < 1
    of_ranks, wanted = length * accumulation * ranks, rules.update_tokens(items * length * epochs)
    if of_ranks < wanted < items * of_ranks:
        assert abs(chosen.batch_size * of_ranks - wanted) <= of_ranks / 2 + 1e-6 * wanted
    explicit = args.model_copy(update={"batch_size": 7, "learning_rate": 0.25})
    assert rules.chosen(explicit, data, ranks) == explicit


@given(st.integers(1, 10**7))
def test_a_warmup_is_a_small_part_of_a_run(updates):
    assert 1 <= rules.warmup(updates) <= max(1, min(100, updates / 20))
    assert rules.warmup(updates) <= rules.warmup(updates + 1)


def test_data_that_the_rules_do_not_know():
    for name in ("batch_size", "learning_rate"):
        args = train_pretrain.Args(**{name: None})
        with pytest.raises(UserError, match=f"--{name} auto: the rules know text and SFT data, not a list"):
            rules.apply_rules(args, None, [1, 2, 3])


def test_only_stages_that_were_measured_take_auto():
    for stage in (train_pretrain, train_full_sft):
        assert not stage.Args(learning_rate=None, batch_size=None).contradictions()
    wrong = train_dpo.Args(learning_rate=None).contradictions()
    assert wrong == ["--learning_rate auto: the rules are those of pretraining and SFT; give a number"]


@given(ranks=st.integers(1, 8), now=st.integers(1, 8), size=st.integers(1, 64), steps=st.integers(1, 8))
# 14 samples: 3 per rank and step do not divide them, 7 in one step do
@example(ranks=1, now=2, size=7, steps=2)
def test_a_checkpoint_decides_on_other_ranks(ranks, now, size, steps):
    """Whatever the ranks, an update has as many samples as before, wherever the ranks divide them."""
    run_before = {"global_batch": ranks * size * steps, "learning_rate": 0.125}
    checkpoint = {"run": run_before, "world_size": ranks}
    args = train_pretrain.Args(batch_size=None, learning_rate=None, accumulation_steps=steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "world_size", lambda: now)
        patch.setattr(resume, "world_size", lambda: now)
        resumed = rules.apply_rules(args, checkpoint, Data(num_tokens=10**9, items=10**6))
        resumed = resume.keep_global_batch(resumed, checkpoint)
    assert resumed.learning_rate == 0.125 and resumed.batch_size <= size
    if run_before["global_batch"] % now == 0 and now != ranks:
        assert resumed.batch_size * resumed.accumulation_steps * now == run_before["global_batch"]
