"""Warnings and verdict are functions of the records and some facts: what is said, and what is not."""

import json

import pytest

from common.settings import StageArgs
from dataset.lm_dataset import PretrainDataset
from dataset.opening import open_datasets
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT, write_jsonl
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags
from trainer.report.metrics import first_best_and_last, read_metrics
from trainer.report.warnings import find_warnings, verdict
from trainer.stage import is_trained_on

FACTS = {"warmup_updates": 0, "from_weight": "none", "monitor": "eval_loss", "mode": "min", "guessing": 8.76}
FACTS |= {"learning_rate": 1e-3}
FACTS |= {"max_gen_len": 8, "total_updates": 1000, "held_out_is_training": False}
FACTS |= {"best_weights": "a_best_64.pth"}


def records(losses: list[float | None], evals: dict[int, float] | None = None, **more) -> list[dict]:
    """A record every ten updates."""
    found = []
    for i, loss in enumerate(losses, 1):
        record = {"update": 1 if i == 1 else 10 * i, "loss": loss, "mean_loss": loss} | more
        if evals and i in evals:
            record["eval_loss"] = evals[i]
        found.append(record)
    return found


def names(found: list[dict], **facts) -> list[str]:
    return [name for name, _ in find_warnings(found, FACTS | facts)]


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"total_updates": 20}, "few updates"),
        ({"warmup_updates": 1000}, "warm-up"),
        ({"held_out_is_training": True}, "held-out data"),
        ({"from_weight": "other", "guessing": 7.0}, "loss"),
        ({}, ""),
    ],
)
def test_settings_and_the_first_update(facts, name):
    assert names(records([8.5]), **facts) == ([name] if name else [])


def test_a_teacher_that_is_the_student():
    assert names(records([3.0], divergence=0.0)) == ["teacher"]
    assert names(records([3.0], divergence=0.01)) == names(records([3.0], divergence=None)) == []


def test_a_sampler_that_computes_something_else():
    rollouts = {"reward": 0.5, "reward_std": 0.1, "frac_reward_zero_std": 0.0, "completion_length": 4.0}
    assert names(records([0.1], **rollouts, sampling_logp_difference=0.3)) == ["sampling"]
    assert names(records([0.1], **rollouts, sampling_logp_difference=0.03)) == []


FALLING = [8.0 - 0.4 * i for i in range(12)]


@pytest.mark.parametrize(
    ("losses", "has_risen"),
    [
        (FALLING, False),
        ([*FALLING, 3.4, 3.7, 3.3, 3.6, 3.5], False),
        ([*FALLING, 6.0, 6.1, 6.2, 6.3, 6.4], True),
        ([*FALLING, 5.7, 5.72, 5.74, 5.72, 5.7], True),  # by 30 %
        ([*FALLING, 8.0, 3.6, 7.6, 3.4, 7.4], False),  # by less than they differ
        ([8.0, 9.25, 9.3, 9.4, 9.5, 9.6], True),
        ([8.0, None, 6.0, 9.3], False),
    ],
)
def test_a_loss_that_diverges(losses, has_risen):
    assert ("loss rose" in names(records(losses))) is has_risen
    assert ("diverged" in verdict(records(losses), FACTS)) is has_risen


def test_the_verdict_is_of_all_records(corpus, tmp_path):
    """Also where the run keeps only the last ones for its warnings: the best evaluation is early."""
    settings = {"epochs": 2, "eval_interval": 1, "num_hidden_layers": 1, "learning_rate": 0.1}
    script = "import trainer.report.metrics as m; m.KEPT_RECORDS = 3"
    done = run("pretrain", flags(corpus, tmp_path, "pretrain", **settings), Faults(script=script))
    path = tmp_path / "out/pretrain_32_metrics.jsonl"
    facts = json.loads((tmp_path / "out/pretrain_32_run.json").read_text())["facts"]
    assert f"verdict: {verdict(read_metrics(path), facts)}" in done.out
    assert verdict(read_metrics(path), facts) != verdict(read_metrics(path)[-4:], facts)
    whole, seen = read_metrics(path), []
    for record in whole:
        seen = first_best_and_last([*seen, record])
        best = min(whole[: record["update"]], key=lambda record: record["eval_loss"])
        assert best in seen and whole[0] in seen and record == seen[-1]
    assert find_warnings(seen, facts) == find_warnings(first_best_and_last(whole), facts)


@pytest.mark.parametrize(
    ("held_out", "is_told"),
    [("{0}", True), ("{1}", True), ("{0},{1}", True), ("{2}", False), ("{0},{2}", False), ("", False)],
)
def test_held_out_data_that_are_trained_are_said_to_be(tmp_path, held_out, is_told):
    """All of the training data, a part of them, in a mixture; not with a share."""
    tokenizer = load_tokenizer(ROOT / "model")
    paths = [
        write_jsonl(tmp_path / f"{i}.jsonl", [{"text": f"text {i} {j}"} for j in range(60)]) for i in range(3)
    ]
    own = {"eval_data_path": held_out.format(*paths)} if held_out else {"eval_share": 0.3}
    for data_path in (f"{paths[0]},{paths[1]}", f"{paths[0]}:1,{paths[1]}:2"):
        args = StageArgs(data_path=data_path, cache_dir=str(tmp_path / "cache"), **own)
        train, evaluated = open_datasets(PretrainDataset, args, tokenizer)
        assert evaluated is not None
        fingerprint = train.fingerprint | {"held_out_data": evaluated.fingerprint["data"]}
        assert is_trained_on(train, evaluated, fingerprint) is is_told
    said = verdict(records([4.0] * 6, {2: 4.0, 6: 3.0}), FACTS | {"held_out_is_training": True})
    assert "measured on the training data, so it says nothing about other text" in said


@pytest.mark.parametrize(
    ("evals", "warned"),
    [([4.0, 4.1, 4.2], False), ([4.0, 4.1, 4.2, 4.3], True), ([4.0, 4.1, 4.1, 4.2], False)],
)
def test_three_rises_of_the_held_out_loss_are_a_warning(evals, warned):
    found = records(FALLING, dict(enumerate(evals, 8)))
    assert ("eval_loss rose" in names(found)) is warned
    if warned:
        assert "4.000, was at update 80" in dict(find_warnings(found, FACTS))["eval_loss rose"]


@pytest.mark.parametrize("count", [4, 5])
def test_rewards_that_tell_nothing_and_cut_completions(count):
    found = records([0.1] * count, reward=0.5, frac_reward_zero_std=1, cut_share=1)
    assert names(found) == (["rewards", "completions"] if count == 5 else [])
    assert names(records([0.1] * 9, reward=0.5, frac_reward_zero_std=0.9, cut_share=0.9)) == []


VERDICTS = {
    "loss 8.000 at first, 3.600 at last; still falling; without held-out data": {},
    "3.600 at last; eval_loss 4.000 at last": {12: 4.0},
    "eval_loss 4.000 at last; still getting better (5.000 at update 80)": {4: 6.0, 8: 5.0, 12: 4.0},
    "eval_loss 4.000 at last; hardly changed since update 80 (4.001)": {4: 6.0, 8: 4.001, 12: 4.0},
    "the best, 4.000, was at update 80 (a_best_64.pth); the training loss fell": {8: 4.0, 12: 4.5},
}


@pytest.mark.parametrize("said", VERDICTS)
def test_the_verdict(said):
    assert said in verdict(records(FALLING, VERDICTS[said]), FACTS)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (
            [7.394, *[7.38] * 18, 7.369],
            "7.374 at last; it fell by less than 2 %, so hardly anything was learned; without",
        ),
        ([8.0, 7.0, *[5.0] * 18], "5.000 at last; without held-out data"),
        ([8.0, *[7 - i / 10 for i in range(19)]], "still falling; without held-out data"),
        ([8.0, *[5.0] * 10, *[9.9] * 9], "the run diverged; without held-out data"),
    ],
)
def test_the_verdict_on_the_training_loss_where_nothing_is_held_out(losses, said):
    assert said in verdict(records(losses), FACTS)


def test_a_diverged_run_does_not_learn_by_heart():
    losses = [*FALLING, 6.0, 6.1, 6.2, 6.3, 6.4]
    said = verdict(records(losses, {12: 4.0, 17: 6.5}), FACTS)
    assert "diverged" in said and "overfitting" not in said and "the best, 4.000" in said


def test_a_held_out_loss_that_rises_beside_a_training_loss_that_does_not_fall_is_not_overfitting():
    said = verdict(records([4.0] * 12, {8: 4.0, 12: 4.5}), FACTS)
    assert "the best, 4.000, was at update 80" in said and "overfitting" not in said


@pytest.mark.parametrize(
    ("right_then", "right_now"), [(0.4, 0.6), (0.6, 0.6), (0.6, 0.4), (None, 0.6), (0.6, None)]
)
def test_a_lower_loss_with_fewer_right_answers_is_not_the_best(right_then, right_now):
    found = records(FALLING, {8: 4.0, 12: 4.5})
    found[7] |= {"asked": 50, "eval_answers": right_then}
    found[11] |= {"asked": 50, "eval_answers": right_now}
    said = verdict(found, FACTS)
    is_fewer = (right_then, right_now) == (0.4, 0.6)
    assert ("it was 4.000 at update 80, but fewer answers were right then" in said) == is_fewer
    assert ("the best, 4.000, was at update 80" in said) == ("overfitting" in said) == (not is_fewer)


def test_the_verdict_begins_with_the_evaluation_before_the_first_update():
    """Not with the loss of one batch; and says so where a small rate left everything as it was."""
    found = records(FALLING, {8: 3.99, 12: 3.972})
    found[0]["initial_eval_loss"] = 4.498
    said = verdict(found, FACTS)
    assert said == (
        "eval_loss 4.498 before the first update, 3.972 at last; hardly changed since update 80 (3.990)"
    )
    found = records([8.1] * 12, {6: 8.112})
    assert names(found, learning_rate=1e-5) == []  # nothing to compare with
    found[0]["initial_eval_loss"] = 8.114
    assert names(found, learning_rate=1e-3) == names(found, learning_rate=1e-5, total_updates=999) == []
    assert names(found, learning_rate=1e-5, total_updates=120) == ["learning rate"]
    said = verdict(found, FACTS | {"learning_rate": 1e-5})
    assert said.startswith(
        "eval_loss 8.114 before the first update, 8.112 at last; hardly anything was learned: "
    )
    found[0]["initial_eval_loss"], found[5]["eval_loss"] = 2.001, 2.0  # far from guessing
    assert "was learned" not in verdict(found, FACTS | {"learning_rate": 1e-5})


def test_the_best_of_a_metric_that_should_be_high():
    found = records([0.1] * 12, reward=0.25)
    found[3]["eval_reward"], found[11]["eval_reward"] = 0.9, 0.5
    said = verdict(found, FACTS | {"monitor": "eval_reward", "mode": "max"})
    assert "eval_reward 0.500 at last; the best, 0.900, was at update 40" in said


def test_the_verdict_of_rewards_of_answers_and_of_nothing():
    facts = FACTS | {"monitor": "eval_reward", "mode": "max"}
    found = records([0.1] * 20, reward=0.25, eval_reward=0.5, distinct_trigrams=0.3)
    said = verdict(found, facts)
    assert "reward 0.250 at first" in said and "eval_reward 0.500 at last; hardly changed" in said
    assert said.endswith("its answers repeat themselves: 30% of their trigrams are distinct")
    assert verdict(records([None]), FACTS) == "no update had a finite loss"


def test_a_run_warns_once_also_when_it_is_resumed(corpus, tmp_path):
    """And ends with the verdict, which is that of its metrics file."""
    argv = flags(corpus, tmp_path, "pretrain", num_hidden_layers=1, from_resume=1)
    first = run("pretrain", argv, Faults(signals={5: 15}), status=143)
    second = run("pretrain", argv)
    assert (first.err + second.err).count("more --epochs") == 1
    found = read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")
    assert [len(record.get("warnings", [])) for record in found] == [1] + [0] * 15
    last = second.out.splitlines()[-1]
    facts = FACTS | {"best_weights": "pretrain_best_32"}
    assert last == f"verdict: {verdict(found, facts)}"
