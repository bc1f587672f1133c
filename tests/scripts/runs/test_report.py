"""The page of the report: what it says of a run, in both languages."""

import math
import re
from array import array

import pytest

from scripts.runs import report
from scripts.runs.figures import draw
from scripts.runs.run import Run
from scripts.runs.words import WORDS, amount
from trainer.report.warnings import verdict

FACTS = {"monitor": "eval_loss", "mode": "min", "guessing": 8.8, "best_weights": "branch_best_64"}
FACTS |= {"data_tokens": 2_000_000}


def run_of(losses: list[float], stage: str = "a.py", **last) -> Run:
    """A run of a record every ten updates."""
    run = Run()
    for i, loss in enumerate(losses):
        record = {"update": 10 * i + 1, "tokens": 10**6 * (i + 1), "seconds": 60.0 * (i + 1), "epoch": i // 2}
        more = last if i + 1 == len(losses) else {}
        run.add(record | {"loss": loss, "mean_loss": loss, "eval_loss": loss} | more)
    run.settings = {"stage": stage, "save_weight": stage.removesuffix(".py")}
    run.settings["data_path"] = "/data/x.jsonl,b.txt"
    run.about = {"parameters": 1_300_000, "facts": FACTS}
    return run


def test_the_words_are_the_same_in_both_languages():
    fields = {lang: {key: re.findall(r"{\w+", text) for key, text in WORDS[lang].items()} for lang in WORDS}
    assert fields["en"].keys() == fields["zh"].keys()
    assert all(sorted(names) == sorted(fields["zh"][key]) for key, names in fields["en"].items())


def test_the_title_says_what_was_trained_and_what_is_bad():
    run = run_of([5.0, 4.0, 3.0], distinct_trigrams=0.3)
    said = report.title([run], "en")
    model = (
        "A model of 1.30 M parameters, trained in 3.0 min; a: 3,000,000 tokens of x.jsonl, b.txt (1.5 passes)"
    )
    assert said == f"{model}; its answers repeat themselves: 30% of their trigrams are distinct"
    assert report.title([run], "zh").startswith(
        "130 万参数的模型，训练用时 3.0 分钟；a：x.jsonl, b.txt 的 3,000,000 个 token（1.5 遍）"
    )
    both = report.title([run, run_of([4.0], stage="b.py")], "en")
    assert both.endswith("; b: 1,000,000 tokens of x.jsonl, b.txt (0.5 passes)") and "repeat" not in both
    assert report.title([run, run_of([4.0])], "en") == "2 run(s), 4.0 min in all"
    mixed = run_of([4.0], stage="b.py")
    mixed.settings["replay_data_path"] = "c/text.txt"  # of which a part is read, more or less often
    assert report.title([run, mixed], "en").endswith("; b: 1,000,000 tokens of x.jsonl, b.txt, text.txt")


@pytest.mark.parametrize("losses", [[9.0, 6.0, 5.0, 4.0], [9.0, 6.0, 5.0, 4.0, *[9.9] * 5], [8.0, 7.999]])
def test_the_page_says_the_verdict_of_the_console(losses):
    run = run_of(losses)
    assert "; ".join(report.sentences(run, "en")) == verdict(run.records, FACTS)
    assert all(re.search("[一-龥]", sentence) for sentence in report.sentences(run, "zh"))


def test_the_held_out_loss_in_words():
    """ln 8 nats are the uncertainty of eight equally likely tokens."""
    run = run_of([math.log(4096), math.log(8)])
    assert report.unsure(run, "en") is None  # not measured before the first update
    run.values["initial_eval_loss"] = array("d", [math.log(4096), math.nan])
    assert (
        "as uncertain as a choice among 8 equally likely ones; before training, among 4,096"
        in report.unsure(run, "en")
    )
    assert "8 个同样可能的词片之间犹豫；训练之前是 4,096 个。" in report.unsure(run, "zh")
    assert report.unsure(run, "en").startswith("On the held-out text, each next piece of a word is")
    few = run_of([math.log(4096), math.log(1.47)])
    few.values["initial_eval_loss"] = array("d", [math.log(4096), math.nan])
    assert "as a choice among 1.5 equally likely ones; before" in report.unsure(few, "en")
    run.about["facts"] = FACTS | {"held_out_is_training": True}
    assert report.unsure(run, "en").startswith(
        "On the text that it was trained on, each next piece of a word is"
    )
    assert report.unsure(run, "zh").startswith("在训练过的文本上")
    run.about["facts"] = FACTS | {"guessing": None}  # of another loss
    assert report.unsure(run, "en") is None


@pytest.mark.parametrize(
    ("first", "now", "said"),
    [
        (6.262, 3.0, "among 20 equally likely ones; before training, among all 512"),
        (math.log(512), math.log(511), "among 511 equally likely ones; before training, among all 512"),
        (6.0, math.log(512), "does no better than guessing among all 512 pieces of words"),
        (6.0, 6.262, "does no better than guessing among all 512"),
        (800.0, 1e4, "does no better than guessing among all 512"),
        (1e4, 2.0, "among 7.4 equally likely ones; before training, among all 512"),
    ],
)
def test_there_are_no_more_tokens_than_the_vocabulary_has(first, now, said):
    """Also of losses whose exponential no number holds."""
    run = run_of([now])
    run.about["facts"] = FACTS | {"guessing": math.log(512)}
    run.values["initial_eval_loss"] = array("d", [first])
    chinese = report.unsure(run, "zh")
    assert said in report.unsure(run, "en") and "512" in chinese and "训练之前是 全部" not in chinese


def test_an_answer_that_stays_the_same_is_one_of_the_last_evaluation(tmp_path):
    run = run_of([4.0])
    for update, answers in ((6, "aa"), (9, "ab"), (12, "ab")):
        samples = [{"prompt": prompt, "answer": answer} for prompt, answer in zip("xy", answers, strict=True)]
        run.add({"update": update, "tokens": 1, "seconds": 1.0, "samples": samples})
    shown = {
        prompt: report.first_and_last(answers, run.answered_at[prompt], WORDS["en"])
        for prompt, answers in run.samples.items()
    }
    assert shown == {"x": [("updates 6 to 12", "a")], "y": [("update 6", "a"), ("update 12", "b")]}
    page = report.page({"a": run}, [], draw({"a": run}, "update"), draw({"a": run}, "update"), "zh")
    assert "第 6 至 12 次更新" in page and "第 12 次更新" in page and "第 9 次更新" not in page


def test_without_its_settings_a_run_has_a_title_and_no_verdict():
    run = run_of([4.0])
    run.settings, run.about = {}, {}
    assert report.sentences(run, "en") == [] and report.title([run], "en") == "1 run(s), 1.0 min in all"


def test_a_plan_beside_what_came(tmp_path):
    run = run_of([5.0, 4.0])
    run.path = tmp_path / "pretrain_64_metrics.jsonl"
    assert report.compare_with_plan(run, "en") is None
    (tmp_path / "plan.json").write_text('{"pretrain_64": 90.0}')
    assert report.compare_with_plan(run, "en") == "updates and evaluations took 2.0 min; planned: 1.5 min"
    assert report.compare_with_plan(run, "zh") == "更新和评估用时 2.0 分钟；计划：1.5 分钟"
    for odd in ("[1]", "{", '{"pretrain_64": "90"}', '{"pretrain_64": NaN}', "[" * 100_000):
        (tmp_path / "plan.json").write_text(odd)
        assert report.compare_with_plan(run, "en") is None


def test_the_page_shows_paths_as_they_are_typed():
    run = run_of([5.0, 4.0])
    run.about["starts"] = [{"command": ["--data_path", "数据/书.txt"]}]
    figure = draw({"a": run}, "tokens")
    assert "数据/书.txt" in report.page({"a": run}, [["run", "a"]], figure, figure, "zh")


def test_amounts_of_parameters():
    for count, english, chinese in (
        (98_600, "0.10 M", "9.86 万"),
        (1_300_000, "1.30 M", "130 万"),
        (63_912_192, "63.91 M", "6,391 万"),
        (127_000_000, "127.00 M", "1.27 亿"),
    ):
        assert (amount(count, "en"), amount(count, "zh")) == (english, chinese)
