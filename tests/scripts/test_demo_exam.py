"""The exam of the demo: the scorer, the report, batches of answers, and the whole script on a tiny random model."""

import json
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from dataset.demo_corpus import make_corpus, write_files
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import demo_exam
from scripts.conversation import prompt_tokens
from scripts.demo_exam import merge_report, run_costs
from scripts.evaluation.exam import ask, is_right, names_value, read_exam
from trainer.trainer_utils import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
COLOR = {"accepted": ["red"], "rejected": ["blue", "green"]}
COLOR_ZH = {"accepted": ["红色"], "rejected": ["蓝色", "绿色"]}


def tiny_model() -> MiniMindForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": len(load_tokenizer(ROOT / "model"))}
    return MiniMindForCausalLM(MiniMindConfig(**shape)).eval()


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Belin likes red best.", True),
        ("RED", True),
        ("red", True),
        ("Belin likes blue best.", False),
        ("Belin likes red and blue.", False),  # two values: a guess at both
        ("red blue green", False),
        ("I do not know.", False),
        ("<think>\nblue or green?\n</think>\n\nBelin likes red best.", True),  # thoughts do not count
        ("<think>\nBelin likes red best.\n</think>\n\nBelin likes blue best.", False),
        ("<think>\nBelin likes red best.", False),  # they did not end
        ("", False),
        ("Fred is hired.", False),  # the value only inside other words
        ("贝琳喜欢red的", True),  # a Chinese neighbor is no part of an English word
    ],
)
def test_scorer_english(answer, right):
    assert is_right(answer, COLOR) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("贝琳最喜欢红色。", True),
        ("贝琳最喜欢蓝色。", False),
        ("红色蓝色", False),
        ("贝琳最喜欢。", False),
        ("Belin likes red best.", False),  # the answer is asked for in Chinese
    ],
)
def test_scorer_chinese(answer, right):
    assert is_right(answer, COLOR_ZH) is right


def test_any_of_several_accepted_values_will_do():
    question = {"accepted": ["red", "scarlet"], "rejected": ["blue"]}
    assert is_right("It is scarlet.", question)
    assert names_value("Moon-lake?", "moon")


def test_naming_every_value_scores_nothing():
    for question in make_corpus(0)["exam.jsonl"]:
        values = question["accepted"] + question["rejected"]
        assert not is_right(" ".join(values), question)
        assert is_right(f"... {question['accepted'][0]}.", question)


def test_report_keeps_other_fields(tmp_path):
    path = tmp_path / "out" / "report.json"
    merge_report(path, {"heldout_accuracy": 0.9, "parameters": 5})
    merge_report(path, {"heldout_accuracy_without_pretrain": 0.1, "parameters": 6})
    assert json.loads(path.read_text()) == {
        "heldout_accuracy": 0.9,
        "parameters": 6,
        "heldout_accuracy_without_pretrain": 0.1,
    }
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize("text", ["not json", "[1, 2]", '"words"'])
def test_report_never_overwrites_something_else(tmp_path, text):
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"--report .*notes\.json"):
        merge_report(path, {"heldout_accuracy": 1.0})
    assert path.read_text() == text


def test_costs_of_runs_are_summed(tmp_path):
    for name, seconds, memory in (("a_32", 10.04, 900.0), ("b_32", 2.5, 1200.04)):
        lines = [{"seconds": 1.0, "memory_mb": 1.0}, {"seconds": seconds, "memory_mb": memory}]
        (tmp_path / f"{name}_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_costs(tmp_path, ["a_32", "b_32"]) == {"train_seconds": 12.5, "peak_memory_mb": 1200.0}
    assert run_costs(tmp_path, []) == {}
    (tmp_path / "empty_32_metrics.jsonl").write_text("")
    for missing in ("c_32", "empty_32"):
        with pytest.raises(UserError, match=f"--runs: .*{missing}_metrics.jsonl"):
            run_costs(tmp_path, ["a_32", missing])


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"question": "who?"}', '{"question": 1, "accepted": "x"}'])
def test_bad_exam_line_is_named(tmp_path, line):
    path = tmp_path / "exam.jsonl"
    good = {"question": "q", "accepted": ["a"], "rejected": [], "attribute": "x", "language": "en"}
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"exam\.jsonl:2 is not an exam question"):
        read_exam(path)


def test_missing_or_empty_exam(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("none.jsonl", "empty.jsonl"):
        with pytest.raises(UserError, match=r"python -m dataset\.demo_corpus"):
            read_exam(tmp_path / name)


def test_answers_are_those_of_each_question_alone():
    """By transformers' `generate`."""
    model, tokenizer = tiny_model(), load_tokenizer(ROOT / "model")
    questions = ["Where does Belin live?", "贝琳住在哪里？", "If I want to visit Belin, where should I go?", "hi"]
    for thinking in (False, True):
        for question, answer in zip(questions, ask(model, tokenizer, questions, 6, thinking), strict=True):
            prompt = prompt_tokens(tokenizer, [{"role": "user", "content": question}], enable_thinking=thinking)
            options = {
                "max_new_tokens": 6,
                "do_sample": False,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": 0,
            }
            alone = tokenizer.decode(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :])
            assert answer == ("<think>" * thinking + alone.replace(tokenizer.eos_token, "")).strip()


def test_script_with_a_random_model(tmp_path, call):
    """End to end: a model that knows nothing scores next to nothing, and the report says so."""
    write_files(tmp_path / "demo", make_corpus(0))
    lines = (tmp_path / "demo" / "exam.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[::12]
    (tmp_path / "exam.jsonl").write_text("".join(lines), encoding="utf-8")
    model = tiny_model()
    torch.save({key: value.half() for key, value in model.state_dict().items()}, tmp_path / "full_sft_32.pth")
    common = ["--save_dir", tmp_path, "--device", "cpu", "--runs", "full_sft"]  # the shape is in the weights
    (tmp_path / "full_sft_32_metrics.jsonl").write_text('{"seconds": 2.0, "memory_mb": 3.0}\n')
    common += ["--exam_path", tmp_path / "exam.jsonl", "--report", tmp_path / "report.json", "--max_new_tokens", 8]
    done = call(demo_exam, *common, "--show", 3)
    assert done.returncode == 0, done.stderr
    assert f"of {len(lines)} right" in done.stdout
    assert done.stdout.count("Q: ") == done.stdout.count("A: ") == 3
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["heldout_accuracy"] <= 0.2 and (report["train_seconds"], report["peak_memory_mb"]) == (2.0, 3.0)
    assert report["parameters"] == sum(p.numel() for p in model.parameters())

    done = call(demo_exam, *common, "--control")
    assert done.returncode == 0, done.stderr
    after = json.loads((tmp_path / "report.json").read_text())
    assert after == {**report, "heldout_accuracy_without_pretrain": report["heldout_accuracy"]}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--weight", "full_sft", "--hidden_size", 64], "full_sft_*.pth do not exist"),
        (["--max_new_tokens", 0], "--max_new_tokens"),
        (["--show", "many"], "--show"),
        (["--exam_path", "no/such/exam.jsonl"], "python -m dataset.demo_corpus"),
    ],
)
def test_a_mistake_is_one_error_line(tmp_path, call, args, message):
    write_files(tmp_path / "demo", make_corpus(0))
    done = call(demo_exam, "--save_dir", tmp_path, "--exam_path", tmp_path / "demo" / "exam.jsonl", *args)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
