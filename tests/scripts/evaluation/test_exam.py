"""The exam of the demo: the scorer, its file, and batches of answers."""

import json
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.conversation import prompt_tokens
from scripts.demo.corpus import make_corpus
from scripts.evaluation.exam import ask, is_right, names_value, read_exam
from trainer.trainer_utils import load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
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


@pytest.mark.parametrize(
    "line", ["{", "[]", "null", '{"question": "who?"}', '{"question": 1, "accepted": "x"}']
)
def test_bad_exam_line_is_named(tmp_path, line):
    path = tmp_path / "exam.jsonl"
    good = {"question": "q", "accepted": ["a"], "rejected": [], "attribute": "x", "language": "en"}
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"exam\.jsonl:2 is not an exam question"):
        read_exam(path)


def test_missing_or_empty_exam(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("none.jsonl", "empty.jsonl"):
        with pytest.raises(UserError, match=r"python -m scripts\.demo\.corpus"):
            read_exam(tmp_path / name)


def test_answers_are_those_of_each_question_alone():
    """By transformers' `generate`."""
    model, tokenizer = tiny_model(), load_tokenizer(ROOT / "model")
    questions = [
        "Where does Belin live?",
        "贝琳住在哪里？",
        "If I want to visit Belin, where should I go?",
        "hi",
    ]
    for thinking in (False, True):
        for question, answer in zip(questions, ask(model, tokenizer, questions, 6, thinking), strict=True):
            prompt = prompt_tokens(
                tokenizer, [{"role": "user", "content": question}], enable_thinking=thinking
            )
            options = {
                "max_new_tokens": 6,
                "do_sample": False,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": 0,
            }
            alone = tokenizer.decode(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :])
            assert answer == ("<think>" * thinking + alone.replace(tokenizer.eos_token, "")).strip()
