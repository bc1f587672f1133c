"""Multiple choice: the log-likelihoods against transformers' Qwen3 one choice at a time, and the rules of
lm-eval written out by hand; mistakes."""

import json

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import choice, convert_model, evaluate
from tests.conftest import ROOT, write_jsonl
from trainer.weights.files import save_weights

TOKENIZER = load_tokenizer(ROOT / "model")
QUESTIONS = [
    {
        "question": "Question: Where is Belin?\nAnswer:",
        "choices": ["here", "in Saltport", "no one knows"],
        "answer": 1,
    },
    {"question": "贝琳住在哪里？", "choices": ["盐港", "不知道在什么地方"], "answer": "不知道在什么地方"},
    {"question": "Two and two are ", "choices": ["four", "a very large number", "4", "five"], "answer": "C"},
    {"question": "A ship", "choices": ["sails", "sleeps under the old stone bridge"], "answer": 0},
]
SHOTS = [{"question": "One and one are", "choices": ["two", "three"], "answer": 0}]


@pytest.fixture
def model(tmp_path):
    """A model whose predictions differ, saved."""
    torch.manual_seed(3)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(8)
    save_weights(model, tmp_path / "a_32.pth")
    return tmp_path / "a_32.pth"


def by_hand(reference, context: str, choice: str) -> float:
    """lm-eval's log-likelihood of a continuation, one forward pass."""
    blanks = len(context) - len(context.rstrip())
    continuation = " " + choice
    if blanks:
        continuation, context = context[-blanks:] + continuation, context[:-blanks]
    whole = TOKENIZER(context + continuation, add_special_tokens=False)["input_ids"]
    begin = len(TOKENIZER(context, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        log_probs = reference(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
    return sum(float(log_probs[i - 1, whole[i]]) for i in range(begin, len(whole)))


@pytest.mark.parametrize("with_shots", [False, True])
def test_item_by_item_as_lm_eval_and_stock_transformers(model, with_shots, tmp_path, call, monkeypatch):
    assert call(convert_model, "--to", "hf", "--model", model, "--output", tmp_path / "hf").returncode == 0
    reference = Qwen3ForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    data, shots = write_jsonl(tmp_path / "q.jsonl", QUESTIONS), write_jsonl(tmp_path / "s.jsonl", SHOTS)
    flags = ["--task", "choice", "--model", model, "--data_path", data, "--json", tmp_path / "report.json"]
    flags += ["--shots_path", shots] if with_shots else []
    monkeypatch.setattr(evaluate, "BATCH_TOKENS", 40)
    done = call(evaluate, *flags, "--show", 1)
    assert done.returncode == 0, done.stderr
    (judged,) = json.loads((tmp_path / "report.json").read_text())["models"].values()

    before = "One and one are two\n\n" if with_shots else ""
    right = [1, 1, 2, 0]
    acc, acc_norm = [], []
    for answer, question, gold in zip(judged["answers"], QUESTIONS, right, strict=True):
        expected = [by_hand(reference, before + question["question"], each) for each in question["choices"]]
        assert answer["log_likelihoods"] == pytest.approx(expected, rel=1e-4)
        acc.append(float(np.argmax(expected) == gold))
        lengths = [len(each) for each in question["choices"]]
        acc_norm.append(float(np.argmax(np.array(expected) / lengths) == gold))
        assert answer["reference"] == question["choices"][gold]
    assert [answer["scores"]["acc"] for answer in judged["answers"]] == acc
    assert [answer["scores"]["acc_norm"] for answer in judged["answers"]] == acc_norm
    assert judged["figures"]["acc"] == evaluate.mean(acc)  # with Wilson's interval
    assert judged["figures"]["acc_norm"]["value"] == np.mean(acc_norm)
    assert "  Q: Question: Where is Belin?" in done.stdout and "acc_norm" in done.stdout


def test_a_context_that_is_too_long_loses_its_beginning():
    sample = choice.choice_sample(TOKENIZER, "one two three four five six seven", "eight", 4, "q:1")
    full = choice.choice_sample(TOKENIZER, "one two three four five six seven", "eight", 1000, "q:1")
    assert sample["input_ids"].tolist() == full["input_ids"].tolist()[-5:]  # the last one is a target only
    assert sample["loss_weight"].sum() == full["loss_weight"].sum()


GOOD = QUESTIONS[0]
MISTAKES = {
    "no choices": ({"question": "a"}, "q.jsonl:2: not a question with two or more choices; the form is"),
    "one choice": (GOOD | {"choices": ["a"]}, "q.jsonl:2: not a question with two or more choices"),
    "an empty choice": (GOOD | {"choices": ["a", " "]}, "q.jsonl:2: not a question"),
    "a question that is no text": (GOOD | {"question": 3}, "q.jsonl:2: not a question"),
    "a number too large": (
        GOOD | {"answer": 3},
        "q.jsonl:2: answer 3 is not a choice; give its number (from 0)",
    ),
    "true": (GOOD | {"answer": True}, "q.jsonl:2: answer True is not a choice"),
    "another letter": (GOOD | {"answer": "D"}, "q.jsonl:2: answer 'D' is not a choice"),
    "nothing": (GOOD | {"answer": None}, "q.jsonl:2: answer None is not a choice"),
    "a list": (GOOD | {"answer": [0]}, "q.jsonl:2: answer [0] is not a choice"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case, model, tmp_path, error_line):
    record, expected = MISTAKES[case]
    data = write_jsonl(tmp_path / "q.jsonl", [GOOD, record])
    assert expected in error_line(evaluate, "--task", "choice", "--model", model, "--data_path", data)


def test_mistakes_of_flags_are_one_line(model, tmp_path, error_line):
    data = write_jsonl(tmp_path / "q.jsonl", [GOOD])
    flags = ["--model", model, "--data_path", data]
    assert "--shots_path is for --task choice" in error_line(
        evaluate, "--task", "loss", *flags, "--shots_path", data
    )
    assert "has 5 tokens; it must have 1 to 2" in error_line(
        evaluate, "--task", "choice", *flags, "--max_seq_len", 2
    )
