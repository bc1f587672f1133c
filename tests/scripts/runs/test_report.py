"""The page of the report: what it says of a run, in both languages, and what it draws."""

import json
import math
import re

import pytest

from scripts.runs import report
from scripts.runs.figures import draw_large
from scripts.runs.run import Run
from scripts.runs.words import WORDS, long_time


def run_of(losses: list[float], about: dict | None = None, stage: str = "a.py", **more) -> Run:
    """A run of an evaluation every ten updates; a token spells two bytes."""
    run = Run()
    for i, loss in enumerate(losses, 1):
        bits = loss / math.log(2) / 2
        run.add(
            {"update": 10 * i, "tokens": 10**6 * i, "seconds": 60.0 * i, "loss": loss + 1}
            | {"mean_loss": loss + 1}
            | {"eval_loss": loss, "eval_bpb": bits}
            | more
        )
    run.about, run.settings = about or {"parameters": 1_300_000}, {"stage": stage}
    return run


def test_the_words_are_the_same_in_both_languages():
    fields = {lang: {key: re.findall(r"{\w+", text) for key, text in WORDS[lang].items()} for lang in WORDS}
    assert fields["en"].keys() == fields["zh"].keys()
    assert all(sorted(names) == sorted(fields["zh"][key]) for key, names in fields["en"].items())


def test_the_title_says_what_was_trained():
    run = run_of([5.0, 4.0, 3.0])
    assert report.title([run], "en") == "A model of 1.3 M parameters read 6 MB of text in 3 minutes"
    assert report.title([run], "zh") == "一个 130 万参数的模型，用 3 分钟读了 6 MB 文本"
    both = [run, run_of([4.0], stage="b.py")]
    assert report.title(both, "en") == "A model of 1.3 M parameters read 8 MB of text in 4 minutes"
    assert report.title([run, run_of([4.0])], "en") == "2 runs compared, 4 minutes in all"
    assert report.title([run_of([4.0], {"x": 1})], "en") == "A model read 2 MB of text in 60 seconds"
    plain = run_of([4.0], eval_bpb=None)
    assert report.title([plain], "en") == "A model of 1.3 M parameters read 1 M tokens in 60 seconds"
    rewarded = run_of([4.0], reward=0.5)
    assert "practised for rewards, 10 updates in 60 seconds" in report.title([rewarded], "en")
    assert long_time(7500, "en") == "2.1 hours" and long_time(30, "zh") == "30 秒"


FACTS = {"monitor": "eval_loss", "mode": "min", "guessing": 8.8, "best_weights": "a_best_64.pth"}


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([5.0, 4.0, 3.5, 3.2, 3.0], "3.000, still getting better"),
        ([5.0, 3.02, 3.01, 3.01, 3.0], "3.000, hardly changed"),
        ([5.0, 3.0, 3.2, 3.4, 3.6], "3.600, the best, 3.000, was at update 20 (a_best_64.pth)"),
        ([3.0], "3.000, evaluated once"),
    ],
)
def test_the_page_says_the_verdict_of_the_run(losses, said):
    run = run_of(losses, {"facts": FACTS})
    assert said in "; ".join(report.verdict(run, "en"))
    assert f"if {math.exp(losses[-1]):.0f} " in report.verdict(run, "en")[-1]
    assert f"{losses[-1]:.3f}" in report.verdict(run, "zh")[1]
    other_loss = run_of(losses, {"facts": FACTS | {"guessing": None}})  # of DPO: no cross entropy of text
    assert not any("unsure" in sentence for sentence in report.verdict(other_loss, "en"))


def test_the_verdict_without_held_out_text_and_of_a_damaged_file():
    run = Run()
    run.add({"update": 1, "tokens": 1, "seconds": 1.0, "loss": 1.0, "mean_loss": 1.0})
    assert report.verdict(run, "en")[1] == WORDS["en"]["nothing held out"]
    run.about = {"facts": 3}
    assert report.verdict(run, "en")[1] == WORDS["en"]["nothing held out"]


def test_a_plan_beside_what_came(tmp_path):
    run = run_of([5.0, 4.0])
    run.path = tmp_path / "pretrain_64_metrics.jsonl"
    assert report.outcomes(run) == []
    plan = {"seconds": 90.0, "tokens": 1_900_000, "eval_loss": [3.8, 4.1, 4.4]}
    (tmp_path / "plan.json").write_text(json.dumps({"pretrain_64": plan}))
    assert [tuple(each) for each in report.outcomes(run)] == [
        ("time", "1.5 min", "2.0 min"),
        ("tokens", "1,900,000", "2,000,000"),
        ("eval_loss", "3.80 – 4.40", "4.00"),
    ]
    assert report.outcome(run).endswith("held-out loss 4.00 (planned 3.80 – 4.40)")
    (tmp_path / "plan.json").write_text('{"pretrain_64": {"seconds": "soon"}}')
    assert report.outcome(run) is None


@pytest.mark.parametrize("in_a_row", [True, False])
def test_the_large_curve(in_a_row):
    """Stages stand one behind the other."""
    runs = [run_of([5.0, 4.0, 3.0]), run_of([2.0])]
    (axes,) = draw_large(runs, "update", "loss", ["x", "y"], in_a_row).axes
    points = [line.get_xydata().tolist() for line in axes.lines]
    at = 40 if in_a_row else 10
    held_out = [[10, 5.0], [20, 4.0], [30, 3.0]]
    trained = [[update, loss + 1] for update, loss in held_out]
    assert points == [trained, held_out, [[at, 3.0]], [[at, 2.0]]]
    assert draw_large(runs, "update", "kl", ["x", "y"], in_a_row) is None
