"""`python -m dataset.show_samples`: what a person sees of the labels."""

import json
import sys

import pytest

from common.command_line import one_line_errors
from dataset.held_out import Split
from dataset.show_samples import main

CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"你好 {i} 🙂"}]}
    for i in range(5)
]


@pytest.fixture
def inspect(monkeypatch, capsys):
    """inspect(*options) gives what the command prints."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["inspect", *map(str, options)])
        with one_line_errors():
            main()
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def test_samples_and_report(write, cache_dir, inspect):
    path = write("a.jsonl", CHATS)
    common = ("--kind", "sft", "--data_path", path, "--cache_dir", cache_dir, "--max_seq_len", 64)
    out = inspect(*common, "--samples", 1)
    assert f"\nsample 0 from {path}:1: " in out and "5 records, 5 samples" in out and "tokenised " in out
    packed = inspect(*common, "--samples", 1, "--packing", 1)
    assert "sequence 0: " in packed and "filled" in packed
    assert "sample 0" not in inspect(*common, "--samples", 0)


def test_nearly_equal_questions_are_counted_and_the_held_out_ones_make_a_quiz(
    write, cache_dir, inspect, tmp_path
):
    questions = [f"What is {i} + 1?" for i in range(60)] + ["what is 3 + 1 ?", "What is 4 + 1?"]
    sums = [{"question": question, "answer": f"So #### {i}"} for i, question in enumerate(questions)]
    path = write("sums.jsonl", sums)
    common = ("--kind", "sft", "--data_path", path, "--cache_dir", cache_dir, "--samples", 0)
    out = inspect(*common, "--eval_share", 0.1, "--quiz", tmp_path / "quiz.jsonl")
    assert "first questions: 62, of which 2 repeat an earlier one, 1 of them with other case" in out
    quiz = [json.loads(line) for line in (tmp_path / "quiz.jsonl").read_text().splitlines()]
    split = Split(0.1, held_out=True)
    assert quiz == [record for record in sums if split.includes(record["question"])] and 0 < len(quiz) < 20
    assert f"quiz.jsonl: {len(quiz)} questions" in out
    with pytest.raises(SystemExit):
        inspect(*common, "--quiz", tmp_path / "quiz.jsonl")


def test_held_out_questions_that_are_nearly_trained_ones_are_named(write, cache_dir, inspect):
    """A word apart; with other words none is."""
    fruits = ["apples", "pears", "plums", "figs", "dates", "limes", "kiwis", "grapes", "nuts", "beans"]
    text = "A gardener carries {} from the orchard to the market on a sunny morning; how many does he carry?"
    near = [text.format(fruit) for fruit in fruits]
    other = [f"{fruit * 3} {fruit[::-1] * 4}" for fruit in fruits]
    for questions, leaks in ((near, True), (other, False)):
        path = write("a.jsonl", [{"question": question, "answer": "9"} for question in questions])
        out = inspect("--kind", "sft", "--data_path", path, "--cache_dir", cache_dir, "--eval_share", 0.5)
        held_out = sum(Split(0.5, held_out=True).includes(question) for question in questions)
        assert 0 < held_out < 10
        assert (
            f"nearly equal a trained one, a word or a number apart: {held_out} of {held_out}." in out
        ) is leaks


ODD = "<script>alert('&')</script>\x1b[2J\x00\u202e\n\n龘 🙂\u3000第"
ODD_CHAT = {"messages": [{"role": "user", "content": ODD}, {"role": "assistant", "content": ODD}]}


def test_the_text_marks_what_is_trained(write, cache_dir, inspect):
    path = write("a.jsonl", [ODD_CHAT])
    seen = ODD.replace("\x1b", "\\x1b").replace("\x00", "\\x00").replace("\u202e", "\\u202e")
    out = inspect("--kind", "sft", "--data_path", path, "--cache_dir", cache_dir, "--samples", 1)
    assert f"<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n⟦{seen}<|im_end|>⟧\n" in out
