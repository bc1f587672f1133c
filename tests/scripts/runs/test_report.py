"""The page of the report: what it says of a run, in both languages."""

import json
import re

import pytest

from scripts.runs import report
from scripts.runs.run import Run
from scripts.runs.words import WORDS
from trainer.report.warnings import verdict

FACTS = {"monitor": "eval_loss", "mode": "min", "guessing": 8.8, "best_weights": "branch_best_64"}


def run_of(losses: list[float], held_out: list[float] | None = None, stage: str = "a.py", **facts) -> Run:
    """A run of a record every ten updates."""
    run = Run()
    for i, loss in enumerate(losses):
        record = {"update": 10 * i + 1, "tokens": 10**6 * (i + 1), "seconds": 60.0 * (i + 1), "loss": loss}
        if held_out is not None:
            record["eval_loss"] = held_out[i]
        run.add(record | {"mean_loss": loss})
    run.settings, run.about = {"stage": stage}, {"parameters": 1_300_000, "facts": FACTS | facts}
    return run


def test_the_words_are_the_same_in_both_languages():
    fields = {lang: {key: re.findall(r"{\w+", text) for key, text in WORDS[lang].items()} for lang in WORDS}
    assert fields["en"].keys() == fields["zh"].keys()
    assert all(sorted(names) == sorted(fields["zh"][key]) for key, names in fields["en"].items())


def test_the_title_says_what_was_trained():
    run = run_of([5.0, 4.0, 3.0])
    text = "A model of 1.30 M parameters: 3,000,000 tokens in 21 updates, 3.0 min"
    assert report.title([run], "en") == text
    assert report.title([run], "zh") == "1.30 M 参数的模型：21 次更新，3,000,000 个 token，3.0 min"
    both = [run, run_of([4.0], stage="b.py")]
    assert report.title(both, "en").endswith("4,000,000 tokens in 22 updates, 4.0 min")
    assert report.title([run, run_of([4.0])], "en") == "2 run(s), 4.0 min in all"


FALLING, DIVERGED = (
    [9.0, 6.0, 5.0, 4.5, 4.2, 4.0, 3.9, 3.8],
    [9.0, 6.0, 5.0, 4.5, 4.2, 4.0, 9.9, 9.9, 9.9, 9.9, 9.9],
)
BARELY = [9.0, 8.999, 8.998, 8.997, 8.996, 8.995, 8.994, 8.993]  # of a rate of 1e-7


@pytest.mark.parametrize(
    ("losses", "held_out", "said", "not_said"),
    [
        (FALLING, FALLING, "3.800, still getting better", "overfitting"),
        (
            FALLING,
            [5.0, 3.0, 3.2, 3.4, 3.6, 3.7, 3.8, 3.9],
            "was at update 11 (branch_best_64); the training",
            "better",
        ),
        (DIVERGED, DIVERGED, "the run diverged", "overfitting"),
        (BARELY, BARELY, "hardly changed", "larger model"),
        (FALLING, None, "no held-out data", "better"),
    ],
)
def test_the_page_says_the_verdict_of_the_console(losses, held_out, said, not_said):
    run = run_of(losses, held_out)
    text = report.verdict(run, "en")
    assert said in text and not_said not in text
    assert text == verdict(run.records, run.about["facts"])
    assert "；" in report.verdict(run, "zh")


def test_of_a_loss_that_is_not_of_text_nothing_is_said_of_text():
    run = run_of([0.69, 0.6, 0.5], [0.69, 0.61, 0.55], guessing=None)  # DPO
    said = report.title([run], "en") + report.verdict(run, "en")
    assert not re.search(r"text|read|unsure|heart", said)


def test_facts_that_are_damaged_or_missing():
    run = run_of([4.0])
    for about in ({"facts": 3}, {}):
        run.about = about
        assert WORDS["en"]["nothing held out"] in report.verdict(run, "en")
        assert report.title([run], "en") == "1 run(s), 1.0 min in all"


def test_a_plan_beside_what_came(tmp_path):
    run = run_of([5.0, 4.0])
    run.path = tmp_path / "pretrain_64_metrics.jsonl"
    assert report.outcomes(run) == {}
    (tmp_path / "plan.json").write_text('{"pretrain_64": {"seconds": 90.0, "tokens": 1900000}}')
    assert report.outcomes(run) == {"time": ("1.5 min", "2.0 min"), "tokens": ("1,900,000", "2,000,000")}
    for damaged in ('{"pretrain_64": {"seconds": "soon"}}', json.dumps([1]), "{"):
        (tmp_path / "plan.json").write_text(damaged)
        assert report.outcomes(run) == {}
